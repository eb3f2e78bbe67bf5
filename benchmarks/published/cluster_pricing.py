"""From a published run on a cluster and its trace to predicted seconds and bytes; what was fitted for it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from trainfit.allocator.device_memory import StepMemory
from trainfit.allocator.named_options import named_options
from trainfit.costs.constants import constants_of
from trainfit.costs.roofline import roofline_costs
from trainfit.costs.schedule import Schedule, schedule
from trainfit.devices.device_table import Device
from trainfit.devices.efficiency import Constants
from trainfit.traces.simulate import simulate
from trainfit.traces.trace import Trace

from .cluster_rows import ClusterRow
from .compiled_pricing import compiled

Point = Mapping[tuple[str, str], float]
"""Values of constants, by where they hold (`ClusterRow.scopes`) and their name."""
FITTED = Path(__file__).parent / "fits" / "clusters.json"


@dataclass(frozen=True)
class ClusterPrediction:
    """A published run beside what is predicted for it."""

    row: ClusterRow
    seconds: float
    exposed_seconds: float
    """Of one micro-batch and the optimizer: by how much communication makes them longer."""
    reserved_bytes: int | None
    allocated_bytes: int | None
    smallest_bytes: int | None
    """The least memory with which it runs."""

    @property
    def time_ratio(self) -> float | None:
        """Predicted over published seconds."""
        measured = self.row.measured_seconds
        return None if measured is None else self.seconds / measured

    @property
    def memory_ratio(self) -> float | None:
        """Predicted over published bytes."""
        measured = self.row.measured_bytes
        return None if measured is None or self.reserved_bytes is None else self.reserved_bytes / measured

    @property
    def seconds_per_token(self) -> float:
        """Of one GPU."""
        return self.seconds / self.row.tokens


def constants_at(point: Point, row: ClusterRow) -> tuple[Device, Constants]:
    """Return the device and the constants that hold for it, of which some are as the point has them."""
    found: dict[str, float] = {}
    device = row.device
    for scope in row.scopes:
        found |= {name: value for (where, name), value in point.items() if where == scope}
    share = found.pop("matmul_share", device.matmul_share)
    return replace(device, matmul_share=share), replace(constants_of(device), **found)


def seconds_of(row: ClusterRow, trace: Trace, point: Point) -> tuple[float, float]:
    """Return the seconds of a step of all its micro-batches, and what of a captured one is exposed."""
    device, constants = constants_at(point, row)
    times = schedule(trace, roofline_costs(trace, device, constants))
    kind = row.config["compile"]
    if kind:
        times = compiled(times, constants, "" if "whole" in kind or "graph" in kind else ".blocks.")
    return _all_batches(row, times), times.exposed_communication_seconds


def _all_batches(row: ClusterRow, times: Schedule) -> float:
    batches = row.config.get("grad_accum", 1)
    if row.source != "nanotron":
        phases = times.phase_seconds
        return float(batches * (phases["forward"] + phases["backward"]) + phases["optimizer"])
    if batches == 1:
        return times.step_seconds
    # Two were captured: the first, whose gradients stay here, stands for all but the last.
    phases_of = [op.phase for op in times.trace.ops]
    pairs = enumerate(itertools.pairwise(phases_of))
    first = next(number + 1 for number, pair in pairs if pair == ("backward", "forward"))
    return times.step_seconds + (batches - 2) * float(times.op_seconds[:first].sum())


def predicted(row: ClusterRow, trace: Trace, point: Point) -> ClusterPrediction:
    """Predict one run; its memory where that was published, or that it did not fit."""
    seconds, exposed = seconds_of(row, trace, point)
    reserved = allocated = smallest = None
    if row.measured_bytes is not None or not row.ran:
        memory = StepMemory(simulate(trace), row.device, named_options(row.allocator))
        figures = memory.figures
        reserved, allocated = figures.reserved_peak_bytes, figures.allocated_peak_bytes
        smallest = figures.smallest_memory_bytes
    return ClusterPrediction(row, seconds, exposed, reserved, allocated, smallest)


def load_point() -> dict[tuple[str, str], float]:
    """Return what was fitted on the rows that calibrate."""
    found = json.loads(FITTED.read_text(encoding="utf-8"))["constants"]
    return {(where, name): value for where, constants in found.items() for name, value in constants.items()}


def save_point(point: Point, loss: float) -> None:
    """Write what was fitted."""
    constants: dict[str, dict[str, float]] = {}
    for (where, name), value in point.items():
        constants.setdefault(where, {})[name] = round(value, 4)
    text = json.dumps({"constants": constants, "mean_error": round(loss, 4)}, indent=1)
    FITTED.write_text(text + "\n", encoding="utf-8")
