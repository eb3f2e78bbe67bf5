"""Predicted step time (roofline) against published step times of GPUs that are not here.

    python benchmarks/time_accuracy_published.py [--rows test|train|all|others] [--cache DIR] [--csv FILE]

The constants of the roofline were fitted on the train rows (`benchmarks/calibrate.py`); the bounds are about
the test rows: other models, which the fit has not seen. Needs the `hf` extra. Captures about a hundred steps,
a few seconds each; `--cache` keeps them for the next run. The same traces are also priced by the roofline of
torch's own `RuntimeEstimator`, side by side. `--rows others` are rows on devices that nothing was fitted on:
it says how wide a range has to be there.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

from published.peer import peer_seconds
from published.prediction import Prediction, comparable_pairs, is_test, predict, quantile
from published.rows import OTHER_DEVICES, Row, captured, load_rows
from result_files import arguments, write_rows

MEDIAN_BOUND = 0.15
TAIL_BOUND = 0.35
RATIO_BOUND = 0.05


def main() -> int:
    """Run the benchmark; 1 if a bound is missed."""
    parser = arguments(__doc__)
    parser.add_argument("--rows", choices=("test", "train", "all", "others"), default="all")
    parser.add_argument("--cache", type=Path, help="keep captured steps in this folder")
    options = parser.parse_args()
    if options.rows == "others":
        return other_devices(options.cache, options.csv)
    predictions: list[Prediction] = []
    peers: list[Prediction] = []
    left_out: list[tuple[Row, str]] = []
    rows = [row for row in load_rows() if options.rows in ("all", "test" if is_test(row) else "train")]
    for row, found in captured(rows, options.cache, lambda text: print(text, file=sys.stderr, flush=True)):
        if isinstance(found, str):
            left_out.append((row, found))
        else:
            predictions.append(predict(row, found))
            peers.append(Prediction(row, peer_seconds(row, found)))
    print_rows(predictions, peers)
    for row, reason in left_out:
        print(f"not expressed: {row.id}: {reason}")
    result = summary(predictions)
    result["peer"] = {name: figures for name, figures in summary(peers).items() if name != "bounds"}
    print_summary(result)
    table = [
        {
            "id": p.row.id,
            "family": p.row.family,
            "split": split_of(p.row),
            "predicted_seconds": p.seconds,
            "peer_seconds": peer.seconds,
            "published_seconds": p.row.measured_seconds,
        }
        for p, peer in zip(predictions, peers)
    ]
    write_rows("time_accuracy_published", table, options.csv, everything=options.rows == "all")
    return 0 if all(result["bounds"].values()) else 1


def other_devices(cache: Path | None, path: Path | None) -> int:
    """Print the factor that four of five rows are within, by maker; rows of one sample wait for the host."""
    factors: dict[str, list[float]] = {}
    rows = []
    for row, found in captured(load_rows(OTHER_DEVICES), cache, lambda text: print(text, file=sys.stderr)):
        if isinstance(found, str):
            print(f"not expressed: {row.id}: {found}")
            continue
        prediction = predict(row, found)
        ratio, batch = prediction.ratio, row.data["config"]["batch_per_gpu"]
        rows.append({"id": row.id, "device": row.device.name, "batch": batch})
        rows[-1] |= {"predicted_seconds": prediction.seconds, "published_seconds": row.measured_seconds}
        print(f"{row.device.name:16} {row.id:45} predicted / published {ratio:.2f}")
        if batch > 1:
            maker = "NVIDIA" if row.device.architecture.startswith("sm_") else "AMD"
            factors.setdefault(maker, []).append(max(ratio, 1 / ratio))
    for maker, found_factors in factors.items():
        print(f"{maker}: {len(found_factors)} rows, four of five within {quantile(found_factors, 0.8):.2f} x")
    write_rows("time_other_devices", rows, path)
    return 0


def split_of(row: Row) -> str:
    return "test" if is_test(row) else "train"


def summary(predictions: list[Prediction]) -> dict[str, Any]:
    """Return the figures that the bounds are about."""
    result: dict[str, Any] = {"bounds": {}}
    for name, wanted in (("test", True), ("train", False)):
        chosen = [p for p in predictions if is_test(p.row) is wanted]
        if chosen:
            errors = [p.error for p in chosen]
            result[name] = {
                "rows": len(chosen),
                "median_error": statistics.median(errors),
                "p90_error": quantile(errors, 0.9),
                "median_ratio": statistics.median(p.ratio for p in chosen),
            }
    ratios = [abs(a.ratio / b.ratio - 1) for a, b in comparable_pairs(predictions)]
    if ratios:
        result["ratio"] = {"pairs": len(ratios), "median_error": statistics.median(ratios)}
        result["bounds"]["ratio of rows that differ only in batch or checkpointing, median <= 5 %"] = (
            result["ratio"]["median_error"] <= RATIO_BOUND
        )
    if "test" in result:
        result["bounds"]["test rows, median <= 15 %"] = result["test"]["median_error"] <= MEDIAN_BOUND
        result["bounds"]["test rows, 90th percentile <= 35 %"] = result["test"]["p90_error"] <= TAIL_BOUND
    return result


def print_rows(predictions: list[Prediction], peers: list[Prediction]) -> None:
    """Print one line per row, then one per model and GPU."""
    for p, peer in zip(predictions, peers):
        print(
            f"{split_of(p.row):5} {p.row.id:45} {p.row.measured_seconds * 1e3:10.1f} ms published "
            f"{p.seconds * 1e3:10.1f} ms predicted {p.ratio - 1:+7.1%}  "
            f"RuntimeEstimator {peer.ratio - 1:+7.1%}"
        )
    families: dict[str, list[tuple[Prediction, Prediction]]] = {}
    for p, peer in zip(predictions, peers):
        families.setdefault(p.row.family, []).append((p, peer))
    for family, members in families.items():
        ratio, peer_ratio = (statistics.median(pair[side].ratio for pair in members) for side in (0, 1))
        worst = max((p for p, _ in members), key=lambda p: p.error)
        print(
            f"{split_of(members[0][0].row):5} {family:45} {len(members):3} rows, "
            f"median predicted / published {ratio:.2f}, worst error {worst.ratio - 1:+.1%}; "
            f"RuntimeEstimator {peer_ratio:.2f}"
        )


def print_summary(result: dict[str, Any]) -> None:
    """Print the figures and whether each bound holds."""
    for name in ("test", "train"):
        if name in result:
            figures = result[name]
            peer = result["peer"][name]
            print(
                f"{name}: {figures['rows']} rows, median error {figures['median_error']:.1%}, "
                f"90th percentile {figures['p90_error']:.1%}, median predicted / published "
                f"{figures['median_ratio']:.2f}; RuntimeEstimator {peer['median_error']:.1%}, "
                f"{peer['p90_error']:.1%} and {peer['median_ratio']:.2f}: our median error is "
                f"{figures['median_error'] / peer['median_error']:.2f} x its"
            )
    if "ratio" in result:
        figures, peer = result["ratio"], result["peer"]["ratio"]
        print(
            f"ratios: {figures['pairs']} pairs, median error {figures['median_error']:.1%}; "
            f"RuntimeEstimator {peer['median_error']:.1%}"
        )
    for name, holds in result["bounds"].items():
        print(f"{'holds ' if holds else 'MISSED'} {name}")


if __name__ == "__main__":
    sys.exit(main())
