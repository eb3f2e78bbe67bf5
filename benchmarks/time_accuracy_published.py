"""Predicted step time (roofline) against published step times of GPUs that are not here.

    python benchmarks/time_accuracy_published.py [--rows test|train|all] [--cache DIR] [--csv FILE]

The constants of the roofline were fitted on the train rows (`benchmarks/calibrate.py`); the bounds are about
the test rows: other models, which the fit has not seen. Needs the `benchmarks` extra; rows of models that are
not installed are left out and named. Captures about 300 steps, a few seconds each; `--cache` keeps them for
the next run. The same traces are also priced by the roofline of torch's own `RuntimeEstimator`.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from published.peer import peer_seconds
from published.prediction import Prediction, comparable_pairs, is_test, predict, quantile
from published.rows import Row, captured, load_rows
from result_files import arguments, write_rows

MEDIAN_BOUND = 0.08
TAIL_BOUND = 0.22
NEW_BOUND = 0.15
NEW = ("h100-sxm-80gb", "h200-sxm-141gb", "mi325x-256gb")
"""Devices of which there are few rows; the two bounds above are about the others."""
WITHIN = (0.75, 0.90)
RATIO_BOUND = 0.05
ENOUGH = 10
"""With fewer test rows on a device, their share within the range says nothing."""
ONE = 1


def main() -> int:
    """Run the benchmark; 1 if a bound is missed."""
    parser = arguments(__doc__)
    parser.add_argument("--rows", choices=("test", "train", "all"), default="all")
    parser.add_argument("--cache", type=Path, help="keep captured steps in this folder")
    options = parser.parse_args()
    predictions: list[Prediction] = []
    peers: list[Prediction] = []
    rows = [row for row in load_rows() if options.rows in ("all", split_of(row))]
    for row, found in captured(rows, options.cache, lambda text: print(text, file=sys.stderr, flush=True)):
        if isinstance(found, str):
            print(f"not expressed: {row.id}: {found}")
        else:
            predictions.append(predict(row, found))
            peers.append(Prediction(row, peer_seconds(row, found)))
    print_rows(predictions, peers)
    print_tables(predictions)
    holds = bounds(predictions)
    print_peers(predictions, peers)
    for name, kept in holds.items():
        print(f"{'holds ' if kept else 'MISSED'} {name}")
    table = [
        {
            "id": p.row.id,
            "family": p.row.family,
            "split": split_of(p.row),
            "predicted_seconds": p.seconds,
            "lower_seconds": p.lower_seconds,
            "upper_seconds": p.upper_seconds,
            "peer_seconds": peer.seconds,
            "published_seconds": p.row.measured_seconds,
        }
        for p, peer in zip(predictions, peers)
    ]
    write_rows("time_accuracy_published", table, options.csv, everything=options.rows == "all")
    return 0 if all(holds.values()) else 1


def split_of(row: Row) -> str:
    return "test" if is_test(row) else "train"


def figures(predictions: Iterable[Prediction]) -> str:
    """Say in one line how good predictions are."""
    chosen = list(predictions)
    if not chosen:
        return "no rows"
    errors = [p.error for p in chosen]
    within = sum(p.within for p in chosen) / len(chosen)
    return (
        f"{len(chosen):3} rows, median error {statistics.median(errors):6.1%}, 90th percentile "
        f"{quantile(errors, 0.9):6.1%}, median predicted / published "
        f"{statistics.median(p.ratio for p in chosen):.2f}, within the range {within:4.0%}"
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


def print_tables(predictions: list[Prediction]) -> None:
    """Print the figures by device, by device and family of models, and by batch size."""
    groups: tuple[Callable[[Row], str], ...] = (
        lambda row: row.device.name,
        lambda row: f"{row.device.name}, {kind_of_model(row)}",
        lambda row: "batch 1" if row.data["config"]["batch_per_gpu"] == ONE else "larger batches",
    )
    for group in groups:
        for name in sorted({group(p.row) for p in predictions}):
            for split in ("train", "test"):
                chosen = [p for p in predictions if group(p.row) == name and split_of(p.row) == split]
                if chosen:
                    print(f"{split:5} {name:36} {figures(chosen)}")
    for split in ("train", "test"):
        print(f"{split:5} {'all':36} {figures(p for p in predictions if split_of(p.row) == split)}")


def bounds(predictions: list[Prediction]) -> dict[str, bool]:
    """Say which bounds hold."""
    found: dict[str, bool] = {}
    test = [p for p in predictions if is_test(p.row)]
    usual = [p.error for p in test if p.row.device.name not in NEW]
    if usual:
        found["test rows of L40S, RTX 3090 and A100: median <= 8 %"] = (
            statistics.median(usual) <= MEDIAN_BOUND
        )
        found["test rows of L40S, RTX 3090 and A100: 90th percentile <= 22 %"] = (
            quantile(usual, 0.9) <= TAIL_BOUND
        )
    for name in sorted({p.row.device.name for p in test}):
        chosen = [p for p in test if p.row.device.name == name]
        if name in NEW:
            median = statistics.median(p.error for p in chosen)
            found[f"test rows of {name}: median <= 15 %"] = median <= NEW_BOUND
        if len(chosen) >= ENOUGH:
            within = sum(p.within for p in chosen) / len(chosen)
            found[f"test rows of {name}: 75 to 90 % within the range"] = WITHIN[0] <= within <= WITHIN[1]
    ratios = [abs(a.ratio / b.ratio - 1) for a, b in comparable_pairs(predictions)]
    if ratios:
        print(f"ratios of two rows: {len(ratios)} pairs, median error {statistics.median(ratios):.1%}")
        found["ratio of rows that differ only in batch or checkpointing, median <= 5 %"] = (
            statistics.median(ratios) <= RATIO_BOUND
        )
    return found


def print_rows(predictions: list[Prediction], peers: list[Prediction]) -> None:
    """Print one line per row."""
    for p, peer in zip(predictions, peers):
        print(
            f"{split_of(p.row):5} {p.row.id:45} {p.row.measured_seconds * 1e3:10.1f} ms published "
            f"{p.seconds * 1e3:10.1f} ms predicted {p.ratio - 1:+7.1%}  "
            f"RuntimeEstimator {peer.ratio - 1:+7.1%}"
        )


def print_peers(predictions: list[Prediction], peers: list[Prediction]) -> None:
    """Print the error of torch's RuntimeEstimator on the same rows."""
    for split in ("train", "test"):
        errors: dict[str, list[Any]] = {"ours": [], "its": []}
        for p, peer in zip(predictions, peers):
            if split_of(p.row) == split:
                errors["ours"].append(p.error)
                errors["its"].append(peer.error)
        if errors["its"]:
            ours, its = (statistics.median(errors[who]) for who in ("ours", "its"))
            print(
                f"{split}: RuntimeEstimator's median error {its:.1%}, 90th percentile "
                f"{quantile(errors['its'], 0.9):.1%}: ours is {ours / its:.2f} x its"
            )


if __name__ == "__main__":
    sys.exit(main())
