"""Fit the roofline's constants on the published train rows, by coordinate search. Prints the fitted table.

    python benchmarks/calibrate.py --cache DIR [--minutes 10]

What is fitted are the constants of `costs/constants.py` marked so, and the `matmul_share` of the two GPUs of
the data for which no fastest matrix product is published. Every family of rows (a model on a GPU in one
precision) counts by the root of its number of rows, so that no benchmark with many batch sizes decides alone.
The loss is the mean of |log(predicted / published)|. The test rows are never looked at.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from pathlib import Path

from published.prediction import is_test, predict
from published.rows import Row, captured, load_rows
from trainfit.costs.constants import CALIBRATED
from trainfit.devices.efficiency import Constants
from trainfit.traces.trace import Trace

FITTED = (
    *("in_step_share", "shared_lanes_share", "tile_fill", "convolution_share", "grouped_convolution_share"),
    *("depthwise_flops", "depthwise_float32_flops", "attention_share", "attention_backward_share"),
    *("efficient_attention_share", "stream_share", "reduction_share", "strided_share", "irregular_share"),
    *("list_share", "cache_gain", "kernel_seconds"),
)
LIMITS = {
    "stream_share": (0.80, 0.92),
    "reduction_share": (0.60, 0.92),
    "strided_share": (0.30, 0.90),
    "irregular_share": (0.10, 0.60),
    "list_share": (0.60, 0.90),
    "cache_gain": (1.0, 4.0),
    "tile_fill": (32.0, 512.0),
    "kernel_seconds": (1e-6, 4e-6),
    "in_step_share": (0.70, 1.0),
    "rtx-3090": (0.85, 1.30),
    "l40s": (0.50, 1.0),
}
"""Where such figures lie in microbenchmarks. The fit only chooses within: two errors that cancel on these
rows would not on others. GeForce cards clock above their datasheet, and at half rate do not throttle."""
DEVICES = ("l40s", "rtx-3090")
_FIRST_STEP = 1.25
_LAST_STEP = 1.01

Point = dict[str, float]
Sample = tuple[Row, Trace]


def main() -> int:
    """Fit and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cache", type=Path, help="keep captured steps in this folder")
    parser.add_argument("--minutes", type=float, default=10.0, help="stop after this long")
    options = parser.parse_args()
    samples = load_samples(options.cache)
    print(f"{len(samples)} train rows with distinct steps")
    point = fit(samples, start(samples), time.monotonic() + 60 * options.minutes)
    print(f"loss {loss(samples, point):.4f}")
    for name, value in point.items():
        print(f"    {name}: {value:.3g}")
    errors = sorted(abs(math.exp(error) - 1) for error in residuals(samples, point).values())
    print(f"80 % of the train rows are within {errors[int(0.8 * len(errors))]:.1%}")
    return 0


def load_samples(cache: Path | None) -> list[Sample]:
    """Return the train rows that can be expressed, one per distinct step."""
    rows = {row.step: row for row in reversed(load_rows()) if not is_test(row)}
    found = captured(list(rows.values()), cache, lambda text: print(text, file=sys.stderr))
    return [(row, trace) for row, trace in found if isinstance(trace, Trace)]


def start(samples: list[Sample]) -> Point:
    """Begin where the constants are now."""
    point = {name: float(getattr(CALIBRATED, name)) for name in FITTED}
    shares = {row.device.name: row.device.matmul_share for row, _ in samples}
    point |= {name: shares.get(name) or CALIBRATED.best_share for name in DEVICES}
    return {name: min(max(value, _least(name)), _most(name)) for name, value in point.items()}


def _least(name: str) -> float:
    return LIMITS.get(name, (0.0, math.inf))[0]


def _most(name: str) -> float:
    return LIMITS.get(name, (0.0, math.inf))[1]


def fit(samples: list[Sample], point: Point, deadline: float) -> Point:
    """Move one coordinate at a time, by smaller and smaller factors, while it helps."""
    best = loss(samples, point)
    factors = dict.fromkeys(point, _FIRST_STEP)
    while max(factors.values()) > _LAST_STEP and time.monotonic() < deadline:
        for name in point:
            for factor in (factors[name], 1 / factors[name]):
                moved = point | {name: min(max(point[name] * factor, _least(name)), _most(name))}
                now = loss(samples, moved)
                if now < best - 1e-6:
                    best, point = now, moved
                    break
            else:
                factors[name] = 1 + (factors[name] - 1) / 2
        print(f"  loss {best:.4f}", file=sys.stderr)
    return point


def residuals(samples: list[Sample], point: Point) -> dict[str, float]:
    """Return log(predicted / published) of each row."""
    constants: Constants = dataclasses.replace(CALIBRATED, **{name: point[name] for name in FITTED})
    found: dict[str, float] = {}
    for row, trace in samples:
        share = point.get(row.device.name, row.device.matmul_share)
        device = dataclasses.replace(row.device, matmul_share=share)
        ratio = predict(dataclasses.replace(row, device=device), trace, constants).ratio
        found[row.id] = math.log(ratio)
    return found


def loss(samples: list[Sample], point: Point) -> float:
    """Return the mean error over families, each weighted by the root of its size."""
    errors = residuals(samples, point)
    families: dict[str, list[float]] = {}
    for row, _ in samples:
        family = f"{row.family} {row.data['config']['precision']}"
        families.setdefault(family, []).append(abs(errors[row.id]))
    total = sum(math.sqrt(len(family)) * sum(family) / len(family) for family in families.values())
    return total / sum(math.sqrt(len(family)) for family in families.values())


if __name__ == "__main__":
    sys.exit(main())
