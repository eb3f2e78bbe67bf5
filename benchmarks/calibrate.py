"""Fit the roofline's constants on the published train rows, by coordinate search. Prints the fitted tables.

    python benchmarks/calibrate.py --cache DIR [--minutes 10] [--without DEVICE]

What is fitted are the constants of `devices/efficiency.py` marked so, those that an architecture has of its
own (`costs/calibration.py`), and the `matmul_share` of the two GPUs of the data for which no fastest matrix
product is published. Every family of rows (a model on a GPU in one precision) counts by the root of its
number of rows, so that no benchmark with many batch sizes decides alone. The loss is the mean of
|log(predicted / published)|. The test rows are never looked at. `--without` leaves a device out.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from published.fitting import EVERYWHERE, Fit, Key, Limits, Point
from published.prediction import is_test
from published.rows import Row, captured, load_rows
from trainfit.traces.trace import Trace

FITTED: dict[str, tuple[float, float, float]] = {
    "in_step_share": (0.8, 0.70, 1.0),
    "tf32_share": (0.8, 0.40, 1.1),
    "shared_lanes_share": (0.45, 0.30, 0.85),
    "tile_fill": (64.0, 32.0, 512.0),
    "unaligned_share": (0.7, 0.25, 1.0),
    "convolution_share": (0.8, 0.50, 1.0),
    "grouped_convolution_share": (0.5, 0.10, 1.0),
    "grouped_channels_last_share": (0.5, 0.10, 1.0),
    "depthwise_cycles": (1.5, 0.30, 5.0),
    "depthwise_tap_cycles": (0.1, 0.02, 0.5),
    "depthwise_float32_waste": (200.0, 32.0, 1024.0),
    "attention_share": (0.7, 0.40, 1.0),
    "attention_backward_share": (0.55, 0.30, 0.9),
    "efficient_attention_share": (0.8, 0.50, 1.0),
    "score_cycles": (0.1, 0.03, 0.5),
    "dropped_score_cycles": (0.2, 0.03, 1.0),
    "stream_share": (0.85, 0.80, 0.92),
    "strided_share": (0.7, 0.40, 0.90),
    "transposed_share": (0.5, 0.20, 0.85),
    "joined_share": (0.6, 0.30, 0.90),
    "rewriting_share": (0.7, 0.40, 0.90),
    "reduction_share": (0.8, 0.60, 0.92),
    "irregular_share": (0.25, 0.10, 0.60),
    "list_share": (0.8, 0.60, 0.90),
    "cache_gain": (2.5, 1.0, 4.0),
    "kernel_seconds": (2.5e-6, 1e-6, 5e-6),
}
"""Where each begins, and where such figures lie in microbenchmarks. The fit only chooses within: two errors
that cancel on these rows would not on others."""
OWN: dict[Key, tuple[float, float, float]] = {
    ("sm_90", "tf32_share"): (0.7, 0.40, 1.1),
    ("sm_90", "in_step_share"): (0.8, 0.50, 1.0),
    ("sm_90", "convolution_share"): (0.7, 0.40, 1.0),
    ("gfx942", "in_step_share"): (0.5, 0.25, 1.0),
    ("gfx942", "simt_share"): (0.5, 0.20, 0.85),
    ("gfx942", "memory_share"): (0.7, 0.35, 1.0),
    ("gfx942", "kernel_seconds"): (5e-6, 2e-6, 10e-6),
    ("h100-sxm-80gb", "host_factor"): (2.0, 0.5, 5.0),
    ("l40s", "matmul_share"): (0.8, 0.50, 1.0),
    ("rtx-3090", "matmul_share"): (1.0, 0.85, 1.15),
}
"""What an architecture has of its own, the host of a published machine, and the fastest product of the two
devices for which none is published. GeForce cards clock above their datasheet."""
Sample = tuple[Row, Trace]


def main() -> int:
    """Fit and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cache", type=Path, help="keep captured steps in this folder")
    parser.add_argument("--minutes", type=float, default=10.0, help="stop after this long")
    parser.add_argument("--without", default="", help="leave this device out")
    options = parser.parse_args()
    samples = [s for s in load_samples(options.cache) if s[0].device.name != options.without]
    print(f"{len(samples)} train rows with distinct steps")
    fit = Fit(samples, *start(row for row, _ in samples))
    fit.improve(deadline=time.monotonic() + 60 * options.minutes)
    print(f"loss {fit.loss:.4f}")
    for (where, name), value in fit.point.items():
        print(f"    {where:16} {name}: {value:.3g}")
    errors = sorted(abs(math.exp(error) - 1) for error in fit.errors)
    print(f"80 % of the train rows are within {errors[int(0.8 * len(errors))]:.1%}")
    return 0


def load_samples(cache: Path | None) -> list[Sample]:
    """Return the train rows that can be expressed, one per distinct step."""
    rows = {row.step: row for row in reversed(load_rows()) if not is_test(row)}
    found = captured(list(rows.values()), cache, lambda text: print(text, file=sys.stderr))
    return [(row, trace) for row, trace in found if isinstance(trace, Trace)]


def start(rows: Iterable[Row]) -> tuple[Point, Limits]:
    """Return where the fit begins, and the limits; what no row is about is left out."""
    scopes = {EVERYWHERE, *(name for row in rows for name in (row.device.architecture, row.device.name))}
    figures = {(EVERYWHERE, name): known for name, known in FITTED.items()}
    figures |= {key: known for key, known in OWN.items() if key[0] in scopes}
    point = {key: first for key, (first, _, _) in figures.items()}
    return point, {key: (least, most) for key, (_, least, most) in figures.items()}


if __name__ == "__main__":
    sys.exit(main())
