"""Plans applied for real: measured peak against budget and promise, loss and gradients against no plan.

    python benchmarks/plan_truth.py                 all cases, two at a time
    python benchmarks/plan_truth.py hf-gpt2         some cases
    python benchmarks/plan_truth.py --offload       plans that copy results to a second memory

For each model four budgets between the smallest reachable peak and the peak without a plan. Every plan is
applied to the real model on the CPU; the truth is the profiler's allocation events of the second step. Exit
code 1 if a measured peak is above its budget, more than 1 % from the promise (where memory depends on data:
more than the reserve from the promise without it), or if loss or gradients are not equal bit by bit.

With `--offload` copies are taken to be so fast that results, and inputs of regions, are copied rather than
recomputed or held: at once when their region ends, and beside the next block, as on a GPU. The second
memory is one that torch does not own.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from own_process import CaseFailed, report, run_one
from result_files import arguments, write_rows

sys.path.insert(0, str(Path(__file__).parent))

CASES = (
    *(
        "builtin-gpt2-tiny",
        "builtin-llama-tiny",
        "builtin-mixtral-tiny",
        "builtin-bert-tiny",
        "builtin-vit-tiny",
    ),
    *(
        "builtin-resnet-18",
        "hf-gpt2",
        "hf-llama",
        "hf-qwen2",
        "hf-gemma2",
        "hf-opt",
        "hf-mixtral",
        "hf-qwen2-moe",
    ),
    *(
        "hf-bert",
        "hf-roberta",
        "hf-albert",
        "hf-t5",
        "hf-bart",
        "hf-mamba",
        "hf-vit",
        "hf-swin",
        "hf-convnext",
    ),
    *("hf-resnet", "hf-whisper"),
)
SHARES = (0.0, 0.25, 0.5, 0.75)
"""Of the way from the smallest reachable peak to the peak without a plan."""
CASE_SECONDS = 900


@dataclass(frozen=True)
class Result:
    """One plan of one case, or the message of its failure."""

    name: str
    share: float
    reserve_bytes: int = 0
    """What the promise sets aside, because memory depends on data."""
    budget_bytes: int = 0
    promised_bytes: int = 0
    measured_bytes: int = 0
    unplanned_bytes: int = 0
    regions: int = 0
    added_share: float = 0.0
    host_bytes: int = 0
    """What is in the second memory between forward and backward."""
    host_inputs: int = 0
    """Inputs of regions among that."""
    equal: bool = False
    """Loss, gradients, and parameters afterwards, bit by bit."""
    failure: str = ""

    @property
    def error(self) -> float:
        """Of the promise without its reserve."""
        return (self.promised_bytes - self.reserve_bytes - self.measured_bytes) / max(self.measured_bytes, 1)

    @property
    def good(self) -> bool:
        bound = max(0.01, self.reserve_bytes / max(self.measured_bytes, 1))
        within = self.measured_bytes <= self.budget_bytes and abs(self.error) <= bound
        return not self.failure and within and self.equal


OFFLOAD_SHARES = (0.2, 0.5)
_FAST = 1e13
"""Bytes per second."""


def links(offload: bool) -> list[Any]:
    """Return the links to try: none, or one for copies at once and one for copies beside the next block."""
    from trainfit.planning.host_copies import HostLink

    return [HostLink(_FAST, 0.0, overlaps) for overlaps in (False, True)] if offload else [None]


def run_case(name: str, threads: int, offload: bool = False) -> list[Result]:
    """Plan, apply and measure one case in this process."""
    import torch

    from cases import all_cases
    from trainfit.capturing import capture
    from trainfit.costs.pricing import price_trace
    from trainfit.devices.device_table import find_device
    from trainfit.planning.planner import Planner
    from trainfit.verifying.measuring import measure_step
    from trainfit.verifying.plan_comparison import compare_results
    from trainfit.workspace.measured import THOROUGH

    torch.set_num_threads(threads)
    case = all_cases()[name]
    build = case.build
    trace = capture(build, target=name, limits=THOROUGH)
    costs = price_trace(trace, find_device("cpu"))
    unplanned = measure_step(build, "cpu", steps=trace.steps, timed=0)
    results: list[Result] = []
    planners = [Planner(trace, costs, link=link) for link in links(offload)]
    for planner, share in itertools.product(planners, OFFLOAD_SHARES if offload else SHARES):
        smallest, largest = planner.smallest().peak_bytes, planner.nothing().peak_bytes
        budget = round(smallest + share * (largest - smallest))
        found = planner.plan(budget)
        plan = found.plan
        if not found.fits:
            results.append(Result(name, share, failure="no plan fits, although one did with less"))
            continue
        measured = measure_step(build, "cpu", plan, steps=trace.steps, timed=0)
        compared = compare_results(build, plan)
        results.append(
            Result(
                name,
                share,
                plan.reserve_bytes,
                budget,
                plan.peak_bytes,
                measured.peak_bytes,
                unplanned.peak_bytes,
                len(plan.regions),
                plan.added_seconds / plan.baseline_step_seconds,
                plan.host_bytes,
                sum(len(plan.kind_of(region).host_inputs) for region in plan.regions),
                not compared.differences,
            )
        )
    return results


def in_own_process(name: str, threads: int, offload: bool) -> list[Result]:
    """Run one case in a process of its own."""
    more = ("--offload",) if offload else ()
    try:
        found = run_one(__file__, name, "--threads", str(threads), *more, seconds=CASE_SECONDS)
    except CaseFailed as error:
        return [Result(name, 0.0, failure=str(error))]
    return [Result(**entry) for entry in found]


def as_line(result: Result) -> str:
    verdict = "ok  " if result.good else "MISS"
    if result.failure:
        return f"{verdict} {result.name:22} {result.failure}"
    same = "equal" if result.equal else "NOT EQUAL"
    return (
        f"{verdict} {result.name:22} {result.share:.0%} budget {result.budget_bytes:>12,} promised "
        f"{result.promised_bytes:>12,} measured {result.measured_bytes:>12,} ({100 * result.error:+.4f} %), "
        f"unplanned {result.unplanned_bytes:>12,}, {result.regions} regions, "
        f"{result.added_share:+.1%} time, {result.host_bytes:,} on the host, {result.host_inputs} inputs, "
        f"{same}"
    )


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("names", nargs="*", help="cases to run (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument("--threads", type=int, default=1, help="torch threads per case")
    parser.add_argument("--offload", action="store_true", help="plans that copy to a second memory")
    parser.add_argument("--run-one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run_one:
        found = run_case(options.run_one, options.threads, options.offload)
        report([asdict(result) for result in found])
        return 0
    results: list[Result] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        names = options.names or CASES
        for found in pool.map(lambda name: in_own_process(name, options.threads, options.offload), names):
            results += found
            for result in found:
                print(as_line(result), flush=True)
    good = sum(result.good for result in results)
    print(f"{good} of {len(results)} plans keep what they promise")
    rows = [asdict(result) | {"error": result.error} for result in results]
    table = "offload_truth" if options.offload else "plan_truth"
    if not options.offload:
        rows = [{name: value for name, value in row.items() if name != "host_inputs"} for row in rows]
    write_rows(table, rows, options.csv, everything=not options.names)
    return 0 if good == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
