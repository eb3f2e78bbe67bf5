"""Predicted against measured peak memory of a training step, on many models, one process per case.

    python benchmarks/memory_accuracy.py                  all cases, two at a time
    python benchmarks/memory_accuracy.py hf-gpt2 lstm     some cases

Each case is captured (nothing is run but single operators, to see their workspaces), then really run for a
warm-up and a measured step; the truth is the profiler's allocation events. Exit code 1 if a bound is missed:
0.1 % of the peak without convolutions, 1 % with, 5 % where memory depends on data; persistent bytes equal.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from own_process import CaseFailed, report, run_one
from result_files import arguments, write_rows

sys.path.insert(0, str(Path(__file__).parent))

CASE_SECONDS = 600


@dataclass(frozen=True)
class Result:
    """One case: predicted and measured figures, or the message of its failure."""

    name: str
    group: str
    kind: str
    convolutions: bool
    data_dependent: bool
    predicted_bytes: int = 0
    measured_bytes: int = 0
    persistent_difference: int = 0
    ops: int = 0
    capture_seconds: float = 0.0
    assumptions: int = 0
    failure: str = ""

    @property
    def error(self) -> float:
        return (self.predicted_bytes - self.measured_bytes) / max(self.measured_bytes, 1)

    @property
    def bound(self) -> float:
        return 0.05 if self.data_dependent else 0.01 if self.convolutions else 0.001

    @property
    def good(self) -> bool:
        return not self.failure and abs(self.error) <= self.bound and self.persistent_difference == 0


def run_case(name: str, threads: int) -> Result:
    """Predict and measure one case in this process."""
    import torch

    from cases import all_cases
    from trainfit.capturing import capture
    from trainfit.traces.simulate import simulate
    from trainfit.verifying.measuring import measure_step
    from trainfit.workspace.measured import THOROUGH

    torch.set_num_threads(threads)
    case = all_cases()[name]
    begin = time.perf_counter()
    trace = capture(case.build, target=name, limits=THOROUGH)
    timeline = simulate(trace)
    seconds = time.perf_counter() - begin
    measured = measure_step(case.build, "cpu", steps=trace.steps, timed=0)
    return Result(
        name,
        case.group,
        case.kind,
        case.convolutions,
        case.data_dependent,
        predicted_bytes=timeline.peak_bytes,
        measured_bytes=measured.peak_bytes,
        persistent_difference=timeline.persistent_bytes - measured.persistent_bytes,
        ops=len(trace.ops),
        capture_seconds=seconds,
        assumptions=len(trace.warnings),
    )


def in_own_process(name: str, threads: int) -> Result:
    """Run one case in a process of its own."""
    from cases import all_cases

    case = all_cases()[name]
    try:
        return Result(**run_one(__file__, name, "--threads", str(threads), seconds=CASE_SECONDS))
    except CaseFailed as error:
        about = (case.name, case.group, case.kind, case.convolutions, case.data_dependent)
        return Result(*about, failure=str(error))


def as_line(result: Result) -> str:
    verdict = "ok  " if result.good else "MISS"
    if result.failure:
        return f"{verdict} {result.name:34} {result.failure}"
    exact = "exact" if result.predicted_bytes == result.measured_bytes else f"{100 * result.error:+.4f} %"
    return (
        f"{verdict} {result.name:34} {result.kind:20} predicted {result.predicted_bytes:>11,} measured "
        f"{result.measured_bytes:>11,}  {exact:>11}  persistent {result.persistent_difference:+d}  "
        f"{result.ops:5} ops  {result.capture_seconds:5.1f} s"
    )


def summary(results: list[Result]) -> Iterator[str]:
    captured = [result for result in results if not result.failure]
    within = sum(result.good for result in results)
    yield f"{len(captured)} of {len(results)} cases captured, {within} within their bound"
    groups = {
        "without convolutions": [r for r in captured if not r.convolutions and not r.data_dependent],
        "with convolutions": [r for r in captured if r.convolutions and not r.data_dependent],
        "memory depends on data": [r for r in captured if r.data_dependent],
    }
    for label, group in groups.items():
        if group:
            errors = [abs(r.error) for r in group]
            exact = sum(r.predicted_bytes == r.measured_bytes for r in group)
            yield (
                f"{label}: {len(group)} cases, {exact} exact to the byte, median error "
                f"{100 * statistics.median(errors):.5f} %, worst {100 * max(errors):.4f} % "
                f"({max(group, key=lambda r: abs(r.error)).name})"
            )


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("names", nargs="*", help="cases to run (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument("--threads", type=int, default=1, help="torch threads per case")
    parser.add_argument("--run-one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run_one:
        report(asdict(run_case(options.run_one, options.threads)))
        return 0
    from cases import all_cases

    names = options.names or list(all_cases())
    unknown = [name for name in names if name not in all_cases()]
    if unknown:
        parser.error(f"unknown cases: {', '.join(unknown)}")
    results: list[Result] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for result in pool.map(lambda name: in_own_process(name, options.threads), names):
            results.append(result)
            print(as_line(result), flush=True)
    print(*summary(results), sep="\n")
    write_rows("memory_accuracy", results, options.csv, everything=not options.names)
    return 0 if all(result.good for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
