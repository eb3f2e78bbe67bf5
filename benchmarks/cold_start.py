"""From the shell to the answer for a small model, as a multiple of `import torch`; and a second capture.

    python benchmarks/cold_start.py [--rounds 7] [--target TARGET] [--csv FILE]

In each round three processes run one after another: `import torch`, an estimate for a GPU, an estimate for
this machine's CPU. Time is that of the processor (user and system), which other work on the machine disturbs
least; the ratio is that of the medians. What is measured about this machine is on disk before, and so is
Python's bytecode (one run of each comes first, not counted). Then, in one process, the same step is captured
again and again. Exit code 1 if a ratio is above its bound.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

from result_files import arguments, write_rows

BOUNDS = {"GPU": 2.0, "CPU": 2.5}
AGAIN = """
import statistics, sys, time
import trainfit
target = sys.argv[1]
for device in ("h100", "cpu"):
    trainfit.capture(target, device=device)
    taken = []
    for _ in range(5):
        begin = time.process_time()
        trace = trainfit.capture(target, device=device)
        taken.append(time.process_time() - begin)
    print(device, len(trace.ops), statistics.median(taken))
"""


def processor_seconds(command: list[str]) -> tuple[float, float]:
    """Run a command; return its processor seconds and its wall seconds."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = {**os.environ, "COLUMNS": "100"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    wall, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def main() -> int:
    """Run the benchmark."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--target", default="gpt2-tiny")
    options = parser.parse_args()
    estimate = [sys.executable, "-m", "trainfit", "estimate", options.target, "--device"]
    commands = {
        "import torch": [sys.executable, "-c", "import torch"],
        "GPU": [*estimate, "h100"],
        "CPU": [*estimate, "cpu"],
    }
    for command in commands.values():
        processor_seconds(command)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for _ in range(options.rounds):
        for name, command in commands.items():
            taken[name].append(processor_seconds(command))
    medians = {name: [statistics.median(column) for column in zip(*rows)] for name, rows in taken.items()}
    torch_processor, torch_wall = medians["import torch"]
    for name, (processor, wall) in medians.items():
        ratios = f"{processor / torch_processor:.2f} x import torch (wall clock {wall / torch_wall:.2f} x)"
        print(f"{name:13} {processor:5.2f} s of processor time, {ratios}")
    rows: list[dict[str, Any]] = [
        {"what": name, "round": number, "processor_seconds": processor, "wall_seconds": wall}
        for name, rounds in taken.items()
        for number, (processor, wall) in enumerate(rounds)
    ]
    second = [sys.executable, "-c", AGAIN, options.target]
    again = subprocess.run(second, check=True, capture_output=True, text=True).stdout
    for line in again.splitlines():
        device, ops, seconds = line.split()
        print(f"captured again for {device}: {ops} ops in {float(seconds):.2f} s of processor time")
        rows.append({"what": f"again, {device}", "processor_seconds": float(seconds), "ops": int(ops)})
    write_rows("cold_start", rows, options.csv, everything=options.target == "gpt2-tiny")
    return int(any(medians[name][0] > bound * torch_processor for name, bound in BOUNDS.items()))


if __name__ == "__main__":
    sys.exit(main())
