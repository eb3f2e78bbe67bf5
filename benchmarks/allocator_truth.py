"""Our allocator beside torch's own: random sequences of all options and versions, steps of built-in models.

    TRAINFIT_ALLOCATOR_ORACLE=.../2.13.0/alloc_oracle python benchmarks/allocator_truth.py
        [--sequences 2000] [--others 500] [--models gpt2 resnet-50] [--csv FILE]

The oracle is torch's real `libc10_cuda.so` on a device made of a counter; `allocator_cases.py` says how it is
found. Compared are all statistics at all marks, all placements, messages and exit status. The newest version
runs `--sequences` random sequences per option, the others `--others`. Each model is trained from before its
first step until the allocator is steady, with and without expandable segments, with enough memory and with
the smallest capacity that does; so is one rank of some meshes, whose memory is of several streams. For each,
the oracle's search for that capacity has to find the same. Exit code 1 if anything differs.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

from allocator_cases import (
    OPTIONS,
    VARIABLE,
    AllocatorCase,
    exists_in,
    first_difference,
    oracle_answer,
    oracles,
    our_answer,
    random_case,
)
from result_files import arguments, write_rows
from trainfit.allocator import (
    parse_conf,
    parse_sequence,
    replay,
    search_capacity,
    sequence_text,
)
from trainfit.allocator.device_memory import StepMemory
from trainfit.allocator.fast_core import COMPILED
from trainfit.devices.device_table import find_device
from trainfit.models.catalog import PRESETS
from trainfit.traces.simulate import simulate

ENOUGH = 1 << 44
"""Bytes of the device, and what it says it has."""
SHOWN = 3
RANKS: tuple[tuple[str, dict[str, int]], ...] = (
    ("llama-3-8b", {"dp": 8}),
    ("llama-3-8b", {"replicate": 2, "fsdp": 8}),
    ("llama-3-8b", {"dp": 8, "tp": 8}),
    ("gpt2", {"replicate": 8}),
)
"""Steps of one rank: FSDP, HSDP, FSDP with tensor parallelism, DDP."""


def main() -> int:
    """Run the benchmark."""
    parser = arguments(__doc__)
    parser.add_argument("--sequences", type=int, default=2000)
    parser.add_argument("--others", type=int, default=500)
    parser.add_argument("--models", nargs="*", default=sorted(PRESETS))
    options = parser.parse_args()
    found = oracles()
    if not found:
        print(f"{VARIABLE} names no oracle")
        return 2
    print(f"our core is {'compiled' if COMPILED else 'plain Python'}")
    newest = max(found, key=lambda version: int(version.split(".")[1]))
    rows = []
    for model in options.models:
        rows += model_rows(model, newest, found[newest])
    for model, mesh in RANKS:
        if model in options.models:
            rows += model_rows(model, newest, found[newest], mesh)
    for version, oracle in sorted(found.items(), key=lambda entry: entry[0] != newest):
        count = options.sequences if version == newest else options.others
        for option in OPTIONS:
            if exists_in(option, version) and count:
                rows.append(random_row(option, version, oracle, count))
    everything = options.sequences >= 2000 and options.models == sorted(PRESETS)
    write_rows("allocator_truth", rows, options.csv, everything=everything)
    wrong = sum(row["mismatches"] for row in rows)
    print(f"{sum(row['sequences'] for row in rows):,} sequences, {wrong} of them different")
    return 1 if wrong else 0


def random_row(option: str, version: str, oracle: Path, count: int) -> dict[str, Any]:
    """Compare random sequences of one option and version."""
    row = {"version": version, "what": "random", "case": option, "sequences": count}
    counts = dict.fromkeys(("events", "allocations", "mismatches", "out_of_memory", "with_retries"), 0)
    for seed in range(count):
        case = random_case(option, seed)
        theirs = oracle_answer(oracle, case)
        difference = first_difference(our_answer(version, case), theirs)
        counts["events"] += theirs.rows[-1]["events"]
        counts["allocations"] += len(theirs.placements)
        counts["mismatches"] += bool(difference)
        counts["out_of_memory"] += theirs.status == 3
        counts["with_retries"] += theirs.rows[-1]["num_alloc_retries"] > 0
        if difference and counts["mismatches"] <= SHOWN:
            print(f"{version}, {option}, seed {seed}: {difference}")
    print(f"{version:8} {option:24} {count:6,} sequences, {counts['mismatches']} different", flush=True)
    return row | counts


def model_rows(
    model: str, version: str, oracle: Path, mesh: dict[str, int] | None = None
) -> list[dict[str, Any]]:
    """Compare steps of a built-in model, or of one rank of it, and how fast both replay them."""
    import trainfit

    device = find_device("a100-40gb")
    cluster = None
    if mesh:
        cluster = trainfit.Cluster(math.prod(mesh.values()), mesh=tuple(mesh.items()))
    trace = trainfit.capture(model, device=device, cluster=cluster)
    sequence = StepMemory(simulate(trace), device).sequence
    name = " ".join([model, *(f"{dimension}={size}" for dimension, size in (mesh or {}).items())])
    text = sequence_text(sequence)
    asked = replay(sequence).requested_peak_bytes
    sequence = parse_sequence(text)
    rows = []
    for conf in ("", "expandable_segments:True"):
        plenty = AllocatorCase(text, conf, ENOUGH, ENOUGH, None, False, False)
        own = search_capacity(sequence, parse_conf(conf, version), total_bytes=ENOUGH)
        same_search = {"event": "search", **asdict(own)} == oracle_search(oracle, plenty)
        differences = [] if same_search else ["the search for the smallest capacity"]
        for case in (plenty, changed(plenty, capacity=own.min_capacity)):
            difference = first_difference(our_answer(version, case), oracle_answer(oracle, case))
            differences += [difference] if difference else []
        ours = min(own_seconds(version, plenty) for _ in range(5))
        theirs = min(oracle_seconds(oracle, plenty) for _ in range(5))
        row = {"version": version, "what": "model", "case": f"{name} {conf}".strip(), "sequences": 2}
        row |= {"events": len(sequence), "mismatches": len(differences), "asked_bytes": asked}
        row |= {"reserved_bytes": own.reserved_peak, "smallest_bytes": own.min_capacity}
        row |= {"our_rate": len(sequence) / ours, "oracle_rate": len(sequence) / theirs}
        print(
            f"{row['case']:44} {len(sequence):9,} events, {len(differences)} different; events per second: "
            f"{row['our_rate']:,.0f}, the oracle {row['oracle_rate']:,.0f}: {theirs / ours:.2f} x",
            *differences,
            flush=True,
        )
        rows.append(row)
    return rows


def own_seconds(version: str, case: AllocatorCase) -> float:
    """Return how long one replay takes, without reading the text, in the time that the process ran."""
    sequence = parse_sequence(case.text)
    conf = parse_conf(case.conf, version)
    begin = time.process_time()
    replay(sequence, conf, case.capacity, total_bytes=case.total)
    return time.process_time() - begin


def oracle_seconds(oracle: Path, case: AllocatorCase) -> float:
    """Return how long the oracle says one replay takes."""
    return float(_oracle_rows(oracle, case, [])[-1]["seconds"])


def oracle_search(oracle: Path, case: AllocatorCase) -> dict[str, Any]:
    """Return what the oracle's own search prints."""
    return _oracle_rows(oracle, changed(case, capacity=16 << 40), ["--search"])[-1]


def _oracle_rows(oracle: Path, case: AllocatorCase, more: list[str]) -> list[dict[str, Any]]:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(case.text)
        file.flush()
        command = [str(oracle), file.name, *case.arguments(), *more]
        result = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=True)
    return [json.loads(line) for line in result.stdout.splitlines()]


if __name__ == "__main__":
    sys.exit(main())
