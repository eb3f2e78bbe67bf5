"""Meshes that `trainfit scale` chooses against those of published runs: Llama 3 8B, 70B and 405B on H100.

    python benchmarks/scale_choices.py [--models llama-3-8b,...] [--csv FILE]

Each published run is asked about with its number of GPUs and its global batch, in the precision that it used
(float32 parameters, bfloat16 where FSDP gathers them; float8 in torchtitan's runs of 70B and 405B). The
chosen mesh is the published one, or predicted to be faster, and then the reason is that which `trainfit
scale` gives. The runs of torchtitan had H100 of 96 GB with a slower memory; here it is the one of 80 GB.
Nothing is confirmed by a whole capture: the figures are derived.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import trainfit
from result_files import arguments, write_rows

_TITAN = "pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md"
_HERD = "The Llama 3 Herd of Models (2024), table 4"


@dataclass(frozen=True)
class PublishedRun:
    """A run: the model, how many GPUs, its mesh and what a step trains on."""

    model: str
    ranks: int
    mesh: str
    sequences: int
    """Of all GPUs, in one step."""
    source: str
    tokens_per_second_per_gpu: float | None = None
    seq: int = 8192


RUNS = (
    PublishedRun("llama-3-8b", 8, "fsdp=8", 16, _TITAN, 5762),
    PublishedRun("llama-3-8b", 64, "fsdp=64", 64, "pytorch/torchtitan PR 1881", 5097),
    PublishedRun("llama-3-8b", 128, "fsdp=128", 256, _TITAN, 5605),
    PublishedRun("llama-3-70b", 256, "fsdp=32,tp=8", 512, _TITAN, 829),
    PublishedRun("llama-3-405b", 512, "pp=8,fsdp=8,tp=8", 256, _TITAN, 100),
    PublishedRun("llama-3-405b", 8192, "pp=16,fsdp=64,tp=8", 2048, _HERD, None),
    PublishedRun("llama-3-405b", 16384, "pp=16,fsdp=128,tp=8", 2048, _HERD, None),
)


def row_of(run: PublishedRun) -> dict[str, Any]:
    """Ask for the best mesh of a run's size, and look the published one up among the others."""
    options = trainfit.StepOptions(seq=run.seq, dtype="bf16-autocast")
    result = trainfit.scale(
        run.model, run.ranks, device="h100", options=options, global_batch=run.sequences, confirm="none"
    )
    [size] = result.sizes
    winner = size.winner
    rows = [*([] if winner is None else [winner]), *size.others]
    published = next((row for row in rows if row.words == run.mesh), None)
    return {
        "model": run.model,
        "ranks": run.ranks,
        "published": run.mesh,
        "source": run.source,
        "published_tokens_per_second_per_gpu": run.tokens_per_second_per_gpu,
        "chosen": None if winner is None else winner.words,
        "chosen_batch": None if winner is None else f"{winner.micro_batch} x {winner.accumulation}",
        "recompute": None if winner is None else winner.recompute,
        "chosen_tokens_per_second_per_gpu": None if winner is None else winner.tokens_per_second_per_gpu,
        "predicted_tokens_per_second_per_gpu": published and published.tokens_per_second_per_gpu,
        "same": winner is not None and winner.words == run.mesh,
        "reason": "not looked at" if published is None else published.reason,
        "seconds": result.data.seconds["total"],
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--models", default=",".join(dict.fromkeys(run.model for run in RUNS)))
    given = parser.parse_args()
    runs, rows = [run for run in RUNS if run.model in given.models.split(",")], []
    for run in runs:
        row = row_of(run)
        rows.append(row)
        chosen, its = (row[f"{name}_tokens_per_second_per_gpu"] or 0.0 for name in ("chosen", "predicted"))
        print(
            f"{run.model} on {run.ranks}: chosen {row['chosen']} ({row['chosen_batch']}, recompute "
            f"{row['recompute']}), {chosen:,.0f} tokens/s/GPU; published {run.mesh}, {its:,.0f} predicted, "
            f"{run.tokens_per_second_per_gpu or 'not'} published; {row['reason'] or 'the same'} "
            f"({row['seconds']:.0f} s)",
            flush=True,
        )
    write_rows("scale_choices", rows, given.csv, everything=len(runs) == len(RUNS))
    held = sum(row["chosen"] is not None for row in rows)
    print(f"the published mesh, or one that is predicted faster: {held} of {len(rows)}")


if __name__ == "__main__":
    main()
