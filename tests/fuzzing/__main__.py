"""Try many inputs: `python tests/fuzzing --inputs 10000 --seed 1`. Prints what was tried and what failed."""

from __future__ import annotations

import argparse
import platform
import sys
import time

import hypothesis
import torch
from kinds import KINDS, run


def main() -> int:
    parser = argparse.ArgumentParser(description="Try generated inputs on trainfit.")
    parser.add_argument("--inputs", type=int, default=1000, help="how many in all")
    parser.add_argument("--seed", type=int, default=1, help="the same seed gives the same inputs")
    parser.add_argument(
        "--kind", choices=list(KINDS), action="append", help="only this kind; repeat for more"
    )
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="go on to the next kind after so long"
    )
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}, torch {torch.__version__}, hypothesis {hypothesis.__version__}, ", end="")
    print(f"Python {platform.python_version()}\n")
    print(f"{'inputs':20} {'tried':>6} {'failed':>6} {'seconds':>8} {'CPU':>8}")
    tried, failures, begin = 0, [], time.perf_counter()
    for name, kind in KINDS.items():
        if arguments.kind and name not in arguments.kind:
            continue
        count = round(kind.share * arguments.inputs)
        cpu = time.process_time()
        tally = run(name, count, arguments.seed, arguments.seconds)
        cpu = time.process_time() - cpu
        left_out = f"   ({tally.left_out} more, which torch refuses)" if tally.left_out else ""
        print(f"{name:20} {tally.tried:6} {len(tally.failures):6} {tally.seconds:8.0f} {cpu:8.0f}{left_out}")
        for failure in tally.failures:
            print(f"\n{failure}")
        sys.stdout.flush()
        tried, failures = tried + tally.tried, failures + tally.failures
    print(f"{'all':20} {tried:6} {len(failures):6} {time.perf_counter() - begin:8.0f}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
