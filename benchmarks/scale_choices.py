"""Meshes that `trainfit scale` chooses against those of published runs: Llama 3 8B, 70B and 405B on H100.

    python benchmarks/scale_choices.py [--models llama-3-8b,...] [--rows FILE] [--csv FILE]

Each published run is asked about with its number of GPUs, its global batch and the GPU that it ran on, in
the precision that it used (float32 parameters, bfloat16 where FSDP gathers them). The chosen mesh is the
published one, or predicted to be faster, and then the reason is that which `trainfit scale` gives.

Sources. torchtitan: benchmarks/llama3_h100_202412_torchtitan.md of pytorch/torchtitan, tables 1 (8B on 8), 3
(8B on 128), 4 (70B on 256: FSDP 32, TP 8, local batch 16) and 5 (405B on 512: FSDP 8, TP 8, PP 8, 1F1B, local
batch 32); those of 70B and 405B had float8 products and torch.compile, which are not predicted here. Its GPUs
are H100 with 96 GB of HBM2e and 500 W (`h100-hbm2e-96gb`). 8B on 64: its PR 1881. The runs of 405B on 8,192
and 16,384: The Llama 3 Herd of Models (2024), table 4 (TP 8, CP 1, PP 16, DP 64 and 128, 16M tokens,
sequences of 8,192; 430 and 400 TFLOP/s for each GPU, which are 43 % and 41 % of the peak), of 80 GB.

Winners of 8B and 70B are confirmed by a capture of the whole model; the others are derived. `--rows` keeps
each row as it is made, and another run goes on with those that are missing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
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
    device: str = "h100-hbm2e-96gb"
    seq: int = 8192


RUNS = (
    PublishedRun("llama-3-8b", 8, "fsdp=8", 16, _TITAN, 5762),
    PublishedRun("llama-3-8b", 64, "fsdp=64", 64, "pytorch/torchtitan PR 1881", 5097),
    PublishedRun("llama-3-8b", 128, "fsdp=128", 256, _TITAN, 5605),
    PublishedRun("llama-3-70b", 256, "fsdp=32,tp=8", 512, _TITAN, 829),
    PublishedRun("llama-3-405b", 512, "pp=8,fsdp=8,tp=8", 256, _TITAN, 100),
    PublishedRun("llama-3-405b", 8192, "pp=16,fsdp=64,tp=8", 2048, _HERD, None, "h100"),
    PublishedRun("llama-3-405b", 16384, "pp=16,fsdp=128,tp=8", 2048, _HERD, None, "h100"),
)


def row_of(run: PublishedRun) -> dict[str, Any]:
    """Ask for the best mesh of a run's size, and look the published one up among the others."""
    options = trainfit.StepOptions(seq=run.seq, dtype="bf16-autocast")
    begin = time.process_time()
    result = trainfit.scale(
        run.model,
        run.ranks,
        device=run.device,
        options=options,
        global_batch=run.sequences,
        confirm="none" if run.model == "llama-3-405b" else "best",
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
        "device": run.device,
        "published_tokens_per_second_per_gpu": run.tokens_per_second_per_gpu,
        "chosen": None if winner is None else winner.words,
        "chosen_batch": None if winner is None else f"{winner.micro_batch} x {winner.accumulation}",
        "chosen_is": None if winner is None else winner.source,
        "chosen_mfu": None if winner is None else winner.model_flops_utilisation,
        "published_mfu_predicted": published and published.model_flops_utilisation,
        "published_fits": published is not None and published.fits,
        "recompute": None if winner is None else winner.recompute,
        "chosen_tokens_per_second_per_gpu": None if winner is None else winner.tokens_per_second_per_gpu,
        "predicted_tokens_per_second_per_gpu": published and published.tokens_per_second_per_gpu,
        "same": winner is not None and winner.words == run.mesh,
        "reason": "not looked at" if published is None else published.reason,
        "seconds": result.data.seconds["total"],
        "processor_seconds": time.process_time() - begin,
    }


def rows_of(runs: Sequence[PublishedRun], file: Path | None) -> Iterator[tuple[PublishedRun, dict[str, Any]]]:
    """Yield each run with its row, those of an earlier run of this script from the file."""
    known: dict[tuple[str, int], dict[str, Any]] = {}
    if file is not None and file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            known[row["model"], row["ranks"]] = row
    for run in runs:
        row = known.get((run.model, run.ranks))
        if row is None:
            row = row_of(run)
            if file is not None:
                with file.open("a", encoding="utf-8") as open_file:
                    open_file.write(json.dumps(row) + "\n")
        yield run, row


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--models", default=",".join(dict.fromkeys(run.model for run in RUNS)))
    parser.add_argument("--rows", type=Path, help="keep rows in this file, and read those that are there")
    given = parser.parse_args()
    runs, rows = [run for run in RUNS if run.model in given.models.split(",")], []
    for run, row in rows_of(runs, given.rows):
        rows.append(row)
        chosen, its = (row[f"{name}_tokens_per_second_per_gpu"] or 0.0 for name in ("chosen", "predicted"))
        print(
            f"{run.model} on {run.ranks}: {row['chosen_is']} {row['chosen']} ({row['chosen_batch']}, "
            f"recompute {row['recompute']}), {chosen:,.0f} tokens/s/GPU; published {run.mesh}, {its:,.0f} "
            f"predicted, "
            f"{run.tokens_per_second_per_gpu or 'not'} published; {row['reason'] or 'the same'} "
            f"({row['processor_seconds']:.0f} s of processor time)",
            flush=True,
        )
    write_rows("scale_choices", rows, given.csv, everything=len(runs) == len(RUNS))
    # One that was not looked at, or that does not fit here although it ran, is no answer.
    held = sum(row["same"] or row["published_fits"] for row in rows)
    print(f"the published mesh, or one that is predicted faster: {held} of {len(rows)}")


if __name__ == "__main__":
    main()
