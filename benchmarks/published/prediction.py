"""From a row and its trace to predicted seconds, and the split into rows to fit on and rows to judge by."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from trainfit.costs.constants import constants_of
from trainfit.costs.roofline import roofline_costs
from trainfit.costs.schedule import schedule
from trainfit.costs.summary import summarise
from trainfit.devices.efficiency import Constants
from trainfit.traces.trace import Trace

from .rows import Row

ADAMW_BYTES = 4 * 4 + 3 * 4 + 2
"""A sharded AdamW step reads parameter, gradient and two moments in float32, writes three of them, and the
bf16 copy that the next forward gathers."""


@dataclass(frozen=True)
class Prediction:
    """A published row with what trainfit says."""

    row: Row
    seconds: float
    lower_seconds: float = 0.0
    upper_seconds: float = 0.0
    """The range that four of five steps are expected in."""

    @property
    def within(self) -> bool:
        """Whether the published time is in the range."""
        return self.lower_seconds <= self.row.measured_seconds <= self.upper_seconds

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.seconds / self.row.measured_seconds

    @property
    def error(self) -> float:
        """Relative error, without sign."""
        return abs(self.ratio - 1)


def predict(
    row: Row, trace: Trace, constants: Constants | None = None, kinds: frozenset[str] | None = None
) -> Prediction:
    """Predict the step of a row, with the constants that are built in, or with those of a fit.

    `kinds` are the kinds of operators that the fit has seen on the device. For sharded rows the micro batch
    counts `grad_accum` times; the collectives are taken to hide behind the computation, and the optimizer
    works on one shard.
    """
    constants = constants or constants_of(row.device)
    costs = roofline_costs(trace, row.device, constants)
    if kinds is not None:
        present = frozenset(cost.kind for cost in costs.costs if cost.kind)
        costs = replace(costs, uncalibrated=present - kinds)
    time = summarise(schedule(trace, costs))
    seconds = time.step_seconds * row.data["config"].get("grad_accum", 1)
    seconds += sharded_optimizer_seconds(row, constants)
    scale = seconds / time.step_seconds
    return Prediction(row, seconds, time.lower_seconds * scale, time.upper_seconds * scale)


def sharded_optimizer_seconds(row: Row, constants: Constants) -> float:
    """Return what the optimizer takes where the captured step has none, because it is sharded."""
    config = row.data["config"]
    if "sharding" not in config:
        return 0.0
    shard = row.data["arch"]["params"] / config["n_gpus"]
    assert row.device.bandwidth_bytes_per_second is not None
    return float(shard * ADAMW_BYTES / (row.device.bandwidth_bytes_per_second * constants.list_share))


THIRDS = 3


def third_of(row: Row) -> int:
    """Return to which third of the families a row belongs, by a hash of the family's name.

    Each third is judged by a fit on the other two. The hash is the one by which the first third was kept for
    judging when there was one fit only, before any was made.
    """
    return hashlib.sha256(row.family.encode()).digest()[0] % THIRDS


def comparable_pairs(predictions: Iterable[Prediction]) -> Iterator[tuple[Prediction, Prediction]]:
    """Yield pairs of rows that differ only in batch size or checkpointing."""
    groups: dict[str, dict[str, Prediction]] = {}
    for prediction in predictions:
        config = {
            name: value
            for name, value in prediction.row.data["config"].items()
            if name not in ("batch_per_gpu", "ac", "dataloader_cpus")
        }
        key = json.dumps([prediction.row.family, config], sort_keys=True)
        groups.setdefault(key, {}).setdefault(prediction.row.step, prediction)
    for group in groups.values():
        yield from itertools.combinations(group.values(), 2)


def quantile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]
