"""Predicted step time (roofline) against published step times of GPUs that are not here.

    python benchmarks/time_accuracy_published.py [--cache DIR] [--csv FILE]

Each row is predicted three times (`benchmarks/calibrate.py` makes the fits): with the constants that are
built in, which were fitted on all rows; with those of a fit that has not seen the row's model on its device;
and with those of one that has seen no row of the device. The bounds are about the second. Needs the
`benchmarks` extra; rows of models that are not installed are left out and named. Captures about 300 steps, a
few seconds each; `--cache` keeps them for the next run. The same traces are also priced by the roofline of
torch's own `RuntimeEstimator`.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from published.fitting import constants_at
from published.peer import peer_seconds
from published.prediction import Prediction, comparable_pairs, predict, quantile, third_of
from published.rows import Row, captured, load_rows
from published.stored_fits import StoredFit, load_fit, without_device, without_model
from result_files import arguments, write_rows
from trainfit.costs.constants import constants_of, uncalibrated_width
from trainfit.traces.trace import Trace

MEDIAN_BOUND = 0.08
TAIL_BOUND = 0.22
NEW_BOUND = 0.15
NEW = ("h100-sxm-80gb", "h200-sxm-141gb", "mi325x-256gb")
"""Devices of which there are few rows; the two bounds above are about the others."""
WITHIN = (0.75, 0.90)
RATIO_BOUND = 0.05
ENOUGH = 10
"""With fewer rows on a device, their share within the range says nothing."""
ONE = 1


@dataclass(frozen=True)
class Judged:
    """A row with what is said about it by those who have seen more and less of it."""

    row: Row
    built_in: Prediction
    model_not_seen: Prediction
    device_not_seen: Prediction
    peer: Prediction


WAYS: dict[str, Callable[[Judged], Prediction]] = {
    "built in": lambda judged: judged.built_in,
    "model not seen": lambda judged: judged.model_not_seen,
    "device not seen": lambda judged: judged.device_not_seen,
    "RuntimeEstimator": lambda judged: judged.peer,
}


def main() -> int:
    """Run the benchmark; 1 if a bound is missed."""
    parser = arguments(__doc__)
    parser.add_argument("--cache", type=Path, help="keep captured steps in this folder")
    options = parser.parse_args()
    found: list[Judged] = []
    rows = load_rows()
    for row, trace in captured(rows, options.cache, lambda text: print(text, file=sys.stderr, flush=True)):
        if isinstance(trace, str):
            print(f"not expressed: {row.id}: {trace}")
        else:
            found.append(judged(row, trace))
    print_rows(found)
    print_tables(found)
    holds = bounds(found)
    for name, kept in holds.items():
        print(f"{'holds ' if kept else 'MISSED'} {name}")
    write_rows("time_accuracy_published", [_columns(one) for one in found], options.csv)
    return 0 if all(holds.values()) else 1


def judged(row: Row, trace: Trace) -> Judged:
    """Return what each fit says about a row."""
    return Judged(
        row,
        built_in=predict(row, trace),
        model_not_seen=_with_fit(row, trace, without_model(row)),
        device_not_seen=_with_fit(row, trace, without_device(row)),
        peer=Prediction(row, peer_seconds(row, trace)),
    )


def _with_fit(row: Row, trace: Trace, name: str) -> Prediction:
    fit = _fit(name)
    device = row.device
    if name == without_device(row):
        # Nothing is known about it but its datasheet.
        fitted_share = (device.name, "matmul_share") in _fit(without_model(row)).point
        device = replace(device, constants={}, calibrated=False)
        device = replace(device, matmul_share=None) if fitted_share else device
    device, constants = constants_at(fit.point, device)
    widths = constants_of(device)
    related = widths.related_uncertainty
    if device.architecture not in fit.kinds:
        related = uncalibrated_width(replace(device, architecture=f"{device.architecture}, new"), widths)
    constants = replace(constants, uncertainty=widths.uncertainty, related_uncertainty=related)
    kinds = fit.kinds.get(device.architecture, frozenset()) if device.calibrated else None
    return predict(replace(row, device=device), trace, constants, kinds)


@cache
def _fit(name: str) -> StoredFit:
    return load_fit(name)


def _columns(one: Judged) -> dict[str, object]:
    return {
        "id": one.row.id,
        "family": one.row.family,
        "third": third_of(one.row),
        "built_in_seconds": one.built_in.seconds,
        "predicted_seconds": one.model_not_seen.seconds,
        "lower_seconds": one.model_not_seen.lower_seconds,
        "upper_seconds": one.model_not_seen.upper_seconds,
        "new_device_seconds": one.device_not_seen.seconds,
        "new_device_lower_seconds": one.device_not_seen.lower_seconds,
        "new_device_upper_seconds": one.device_not_seen.upper_seconds,
        "peer_seconds": one.peer.seconds,
        "published_seconds": one.row.measured_seconds,
    }


def figures(predictions: Iterable[Prediction]) -> str:
    """Say in one line how good predictions are."""
    chosen = list(predictions)
    errors = [p.error for p in chosen]
    within = sum(p.within for p in chosen)
    return (
        f"{len(chosen):3} rows, median error {statistics.median(errors):6.1%}, 90th percentile "
        f"{quantile(errors, 0.9):6.1%}, median predicted / published "
        f"{statistics.median(p.ratio for p in chosen):.2f}, within the range {within}"
    )


def kind_of_model(row: Row) -> str:
    """Return the family of models that a row is of, for tables."""
    name = row.data["model"]
    if name.startswith("MPT"):
        return "decoders"
    if name.startswith("HF "):
        return "other transformers"
    words = (
        "vit",
        "deit",
        "beit",
        "swin",
        "mixer_b16",
        "gmlp",
        "resmlp",
        "xcit",
        "convit",
        "twins",
        "sequencer",
    )
    return "image transformers" if any(word in name for word in words) else "convolutional nets"


def print_tables(found: list[Judged]) -> None:
    """Print the figures by device, by device and family of models, by batch size and by third."""
    groups: tuple[Callable[[Row], str], ...] = (
        lambda row: row.device.name,
        lambda row: f"{row.device.name}, {kind_of_model(row)}",
        lambda row: "batch 1" if row.data["config"]["batch_per_gpu"] == ONE else "larger batches",
        lambda row: "few rows" if row.device.name in NEW else "A100, L40S and RTX 3090",
        lambda row: f"third {third_of(row)}",
        lambda row: "all",
    )
    for group in groups:
        for name in sorted({group(one.row) for one in found}):
            for way, prediction in WAYS.items():
                chosen = [prediction(one) for one in found if group(one.row) == name]
                print(f"{name:36} {way:16} {figures(chosen)}")


def bounds(found: list[Judged]) -> dict[str, bool]:
    """Say which bounds hold."""
    holds: dict[str, bool] = {}
    usual = [one.model_not_seen.error for one in found if one.row.device.name not in NEW]
    holds["L40S, RTX 3090 and A100: median <= 8 %"] = statistics.median(usual) <= MEDIAN_BOUND
    holds["L40S, RTX 3090 and A100: 90th percentile <= 22 %"] = quantile(usual, 0.9) <= TAIL_BOUND
    for name in sorted({one.row.device.name for one in found}):
        chosen = [one.model_not_seen for one in found if one.row.device.name == name]
        if name in NEW:
            holds[f"{name}: median <= 15 %"] = statistics.median(p.error for p in chosen) <= NEW_BOUND
        if len(chosen) >= ENOUGH:
            within = sum(p.within for p in chosen) / len(chosen)
            holds[f"{name}: 75 to 90 % within the range"] = WITHIN[0] <= within <= WITHIN[1]
    ratios = [abs(a.ratio / b.ratio - 1) for a, b in comparable_pairs(one.model_not_seen for one in found)]
    print(f"ratios of two rows: {len(ratios)} pairs, median error {statistics.median(ratios):.1%}")
    holds["ratio of rows that differ only in batch or checkpointing, median <= 5 %"] = (
        statistics.median(ratios) <= RATIO_BOUND
    )
    return holds


def print_rows(found: list[Judged]) -> None:
    """Print one line per row."""
    for one in found:
        said = ", ".join(f"{way} {prediction(one).ratio - 1:+.1%}" for way, prediction in WAYS.items())
        print(
            f"{third_of(one.row)} {one.row.id:45} {one.row.measured_seconds * 1e3:10.1f} ms published: {said}"
        )


if __name__ == "__main__":
    sys.exit(main())
