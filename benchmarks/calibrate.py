"""Fit the roofline's constants on published step times, by coordinate search, and print them.

    python benchmarks/calibrate.py [--cache DIR] [--minutes 10] [--only everything|models|devices]

What is fitted are the constants of `devices/efficiency.py` marked so, those that an architecture has of its
own (`costs/calibration.py`), and the `matmul_share` of the two GPUs of the data for which no fastest matrix
product is published. Every family of rows (a model on a GPU in one precision) counts by the root of its
number of rows, so that no benchmark with many batch sizes decides alone; at most three rows of each count.
The loss is the mean of |log(predicted / published)|.

Ten fits, each written to `published/fits`: one on everything, whose constants are built in; three that leave
out a third of the families of rows (a model on a device), chosen by a hash; and one without any row of each
device. `time_accuracy_published.py` judges each row by fits that have not seen it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from published.fitting import EVERYWHERE, Fit, Key, Limits, Point, constants_at, family_of
from published.rows import Row, captured, load_rows
from published.stored_fits import EVERYTHING, StoredFit, save_fit, without_device, without_model
from result_files import arguments
from trainfit.costs.roofline import Roofline
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
    "narrow_groups_gain": (1.2, 1.0, 3.0),
    "odd_groups_share": (0.25, 0.05, 1.0),
    "depthwise_cycles": (0.5, 0.10, 5.0),
    "depthwise_tap_cycles": (0.2, 0.02, 0.5),
    "depthwise_last_cycles": (1.4, 0.10, 5.0),
    "depthwise_last_tap_cycles": (0.1, 0.02, 0.5),
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
    ("sm_80", "in_step_share"): (0.8, 0.60, 1.0),
    ("sm_90", "tf32_share"): (0.7, 0.40, 1.1),
    ("sm_90", "in_step_share"): (0.8, 0.50, 1.0),
    ("sm_90", "convolution_share"): (0.7, 0.40, 1.0),
    ("gfx942", "in_step_share"): (0.5, 0.25, 1.0),
    ("gfx942", "simt_share"): (0.5, 0.20, 0.85),
    ("gfx942", "memory_share"): (0.7, 0.35, 1.0),
    ("gfx942", "kernel_seconds"): (5e-6, 2e-6, 10e-6),
    ("gfx942", "convolution_share"): (0.8, 0.30, 1.5),
    ("gfx942", "grouped_convolution_share"): (0.5, 0.10, 1.5),
    ("gfx942", "depthwise_tap_cycles"): (0.2, 0.02, 2.0),
    ("h100-sxm-80gb", "host_factor"): (2.0, 0.5, 5.0),
    ("l40s", "matmul_share"): (0.8, 0.50, 1.0),
    ("rtx-3090", "matmul_share"): (1.0, 0.85, 1.15),
}
"""What an architecture has of its own, the host of a published machine, and the fastest product of the two
devices for which none is published. GeForce cards clock above their datasheet."""
NOTICEABLE = 0.05

Sample = tuple[Row, Trace]


def main() -> int:
    """Fit, print and write."""
    parser = arguments(__doc__)
    parser.add_argument("--cache", type=Path, help="keep captured steps in this folder")
    parser.add_argument("--minutes", type=float, default=10.0, help="stop a fit after this long")
    parser.add_argument("--only", choices=("everything", "models", "devices"), help="one kind of fit")
    options = parser.parse_args()
    samples = load_samples(options.cache)
    print(f"{len(samples)} rows with distinct steps")
    for name, seen in fits_of(thinned(samples), options.only):
        fit = Fit(seen, *start(row for row, _ in seen))
        fit.improve(deadline=time.monotonic() + 60 * options.minutes)
        kinds = {architecture: frozenset(found) for architecture, found in noticeable_kinds(fit).items()}
        save_fit(name, StoredFit(fit.point, kinds, fit.loss))
        print(f"{name}: {len(seen)} rows, loss {fit.loss:.4f}", flush=True)
        if name == EVERYTHING:
            for (where, what), value in fit.point.items():
                print(f"    {where:16} {what}: {value:.3g}")
            for architecture, found in sorted(kinds.items()):
                print(f"    {architecture:16} {', '.join(sorted(found))}", flush=True)
    return 0


def fits_of(samples: list[Sample], only: str | None) -> Iterator[tuple[str, list[Sample]]]:
    """Yield the name of each fit, and the rows that it sees."""
    if only in (None, "everything"):
        yield EVERYTHING, samples
    left_out = {"models": without_model, "devices": without_device}
    for kind, name_of in left_out.items():
        if only in (None, kind):
            for name in sorted({name_of(row) for row, _ in samples}):
                yield name, [sample for sample in samples if name_of(sample[0]) != name]


def thinned(samples: list[Sample]) -> list[Sample]:
    """Return at most three rows of each family: the shortest, the middle and the longest step."""
    families: dict[str, list[Sample]] = {}
    for sample in samples:
        families.setdefault(family_of(sample[0]), []).append(sample)
    found: list[Sample] = []
    for family in families.values():
        family.sort(key=lambda sample: sample[0].measured_seconds)
        picked = {0, len(family) // 2, len(family) - 1}
        found += [family[number] for number in sorted(picked)]
    return found


def noticeable_kinds(fit: Fit) -> dict[str, set[str]]:
    """Return the kinds of operators that take a noticeable share of some row, by architecture."""
    found: dict[str, set[str]] = {}
    for sample in fit.samples:
        shares: dict[str, float] = {}
        device, constants = constants_at(fit.point, sample.row.device)
        model = Roofline(device, constants, sample.trace.tf32)
        for (signature, contents), count, seconds in zip(sample.calls, sample.counts, sample.seconds):
            kind = model.price_contents(signature, contents).kind
            shares[kind] = shares.get(kind, 0.0) + count * seconds
        total = sum(shares.values())
        noticed = {kind for kind, seconds in shares.items() if seconds >= NOTICEABLE * total}
        found.setdefault(sample.row.device.architecture, set()).update(noticed)
    return found


def load_samples(cache: Path | None) -> list[Sample]:
    """Return the rows that can be expressed, one per distinct step."""
    rows = {row.step: row for row in reversed(load_rows())}
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
