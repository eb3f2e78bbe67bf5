"""What plans cost for real: measured overhead of our plan beside full checkpointing and the prediction.

    python benchmarks/plan_time.py                  three cases, about seven minutes each
    python benchmarks/plan_time.py llama-tiny       one of them

The budget is the peak of full checkpointing plus 20 % of the way to the peak without any. Full checkpointing
is `torch.utils.checkpoint` around every block. The steps run in turn in one process, with one thread, counted
in the time that the thread has run: as it is, with full checkpointing, as it is, with our plan, and so on.
Each is divided by the mean of its two neighbours as it is, and the overhead is the median of these ratios,
with its standard error. The operators are measured for the plan, and once more in turn with the steps for the
prediction, so that both are about the same minutes of a machine whose speed changes; Python's share is
measured before and after them. The C allocator keeps freed memory, as torch's own does on a GPU; otherwise
most of the difference would be the operating system clearing pages.

Exit code 1 if a step takes less than 1 s, if our overhead is more than 75 % of full checkpointing's, if the
prediction is more than 15 % from the measured one, or if the plan's measured peak is above the budget.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from own_process import CaseFailed, report, run_one
from result_files import arguments, write_rows

if TYPE_CHECKING:
    import torch

    from trainfit import Step, Trace
    from trainfit.costs.table import CostTable
    from trainfit.plans.plan import Plan

BATCHES = {"gpt2-tiny": 48, "llama-tiny": 48, "bert-tiny": 64, "vit-tiny": 256, "resnet-18": 16}
"""Built-in models, at batches whose steps take seconds: Python's share, which changes most from one minute to
the next, is small then."""
DEFAULT = ("gpt2-tiny", "llama-tiny", "bert-tiny")
"""Those whose overhead is large enough to be measured: resnet-18's plan adds about one percent."""
KEEPS_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
BUDGET_SHARE = 0.2
LEAST_SECONDS = 1.0
LARGEST_SHARE_OF_FULL = 0.75
LARGEST_ERROR = 0.15
MEASURING_SECONDS = 40.0
CASE_SECONDS = 1800


@dataclass(frozen=True)
class Result:
    """One case: seconds and peaks as measured, overheads as shares of the step without a plan."""

    name: str
    step_seconds: float = 0.0
    full: float = 0.0
    plan: float = 0.0
    standard_error: float = 0.0
    """Of the plan's overhead."""
    predicted: float = 0.0
    budget_bytes: int = 0
    unplanned_peak_bytes: int = 0
    full_peak_bytes: int = 0
    plan_peak_bytes: int = 0
    rounds: int = 0
    failure: str = ""

    @property
    def share_of_full(self) -> float:
        return self.plan / self.full if self.full > 0 else 1.0

    @property
    def error(self) -> float:
        return (self.predicted - self.plan) / self.plan if self.plan > 0 else 1.0

    @property
    def good(self) -> bool:
        return (
            not self.failure
            and self.step_seconds >= LEAST_SECONDS
            and self.share_of_full <= LARGEST_SHARE_OF_FULL
            and abs(self.error) <= LARGEST_ERROR
            and self.plan_peak_bytes <= self.budget_bytes
        )


def checkpoint_blocks(model: torch.nn.Module, names: list[str]) -> None:
    """Put every block under torch's own checkpointing."""
    from torch.utils.checkpoint import checkpoint

    modules = dict(model.named_modules())

    def checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)

    for name in names:
        block = modules[name]
        block.forward = checkpointed(block.forward)  # type: ignore[method-assign]


def error_of_median(values: list[float]) -> float:
    """Return the standard error of a median, from medians of samples drawn again."""
    drawn = random.Random(0)
    medians = [statistics.median(drawn.choices(values, k=len(values))) for _ in range(1000)]
    return statistics.stdev(medians)


def three_steps(build: Callable[[], Step], blocks: list[str], plan: Plan) -> tuple[Callable[[], Step], ...]:
    """Return what builds the step as it is, with full checkpointing, and with the plan."""
    import trainfit

    def in_full() -> Step:
        built = build()
        checkpoint_blocks(built.model, blocks)
        return built

    def planned() -> Step:
        built = build()
        trainfit.apply(built.model, plan)
        return built

    return build, in_full, planned


class Turns:
    """Steps that run in turn: as it is, with full checkpointing, as it is, with our plan, and so on."""

    def __init__(self, ways: tuple[Callable[[], Step], ...]) -> None:
        from trainfit.timing.clocks import cpu_clock

        self.clock = cpu_clock()
        self.steps = [way() for way in ways]
        self.times: list[list[float]] = [[] for _ in self.steps]
        for step in self.steps * 2:
            step.run()

    def run(self, *ways: int) -> None:
        for way in ways:
            begin = self.clock()
            self.steps[way].run()
            self.times[way].append(self.clock() - begin)

    @property
    def rounds(self) -> int:
        return len(self.times[1])

    @property
    def overheads(self) -> list[list[float]]:
        """Of full checkpointing and of the plan: each run beside the mean of its two neighbours as it is."""
        plain, *others = self.times
        # The neighbours of the n-th of the first are the plain ones 2n and 2n + 1, of the second one later.
        return [
            [2 * own / (plain[2 * n + place] + plain[2 * n + place + 1]) - 1 for n, own in enumerate(way)]
            for place, way in enumerate(others)
        ]


def measured_in_turn(trace: Trace, costs: CostTable, turns: Turns, rounds: int) -> CostTable:
    """Time the operators again in turn with the steps, Python's share before and after; return the costs."""
    from trainfit.costs import this_machine
    from trainfit.costs.constants import CALIBRATED
    from trainfit.costs.measured_costs import measured_costs
    from trainfit.costs.roofline import Roofline
    from trainfit.costs.table import Host

    hosts = [this_machine.host(refresh=True)[0]]
    again = measured_costs(
        trace,
        costs.device,
        host=hosts[0],
        fallback=Roofline(costs.device, CALIBRATED, trace.tf32).price,
        refresh=True,
        between=lambda: turns.run(0, 1, 0, 2),
        budget_seconds=MEASURING_SECONDS,
    )
    turns.run(*(0, 1, 0, 2) * (rounds - turns.rounds), 0)
    hosts.append(this_machine.host(refresh=True)[0])
    seconds_of = {field.name: [getattr(host, field.name) for host in hosts] for field in fields(Host)[1:]}
    host = replace(hosts[0], **{name: statistics.fmean(both) for name, both in seconds_of.items()})
    return replace(again, host=host)


def run_case(name: str, rounds: int) -> Result:
    """Plan one case and run its three steps in turn, in this process."""
    import torch

    import trainfit
    from trainfit import StepOptions
    from trainfit.costs.schedule import schedule
    from trainfit.planning.baselines import baselines, blocks_of
    from trainfit.planning.certify import Unplanned
    from trainfit.planning.planner import Planner
    from trainfit.planning.replay import replayed
    from trainfit.targets.parse import load
    from trainfit.verifying.measuring import measure_step

    torch.set_num_threads(1)
    build = load(name, StepOptions(batch=BATCHES[name])).build
    trace = trainfit.capture(build, device="cpu")
    costs = trainfit.price(trace, "cpu", costs="measured")
    full = next(way for way in baselines(Unplanned.of(trace, costs), 0) if way.name == "full")
    planner = Planner(trace, costs)
    budget = round(full.peak_bytes + BUDGET_SHARE * (planner.step.peak_bytes - full.peak_bytes))
    found = planner.plan(budget)
    assert found.fits
    seconds = schedule(trace, costs).marginal_seconds.tolist()
    blocks = [trace.module_name(r.module).partition(".")[2] for r in blocks_of(trace, seconds)]
    ways = three_steps(build, blocks, found.plan)
    unplanned, in_full, planned = (measure_step(way, "cpu", timed=0).peak_bytes for way in ways)
    turns = Turns(ways)
    again = measured_in_turn(trace, costs, turns, rounds)
    step_seconds, planned_seconds = (replayed(trace, again, way).step_seconds for way in ((), found.effects))
    of_full, of_plan = turns.overheads
    return Result(
        name,
        step_seconds=statistics.median(turns.times[0]),
        full=statistics.median(of_full),
        plan=statistics.median(of_plan),
        standard_error=error_of_median(of_plan),
        predicted=planned_seconds / step_seconds - 1,
        budget_bytes=budget,
        unplanned_peak_bytes=unplanned,
        full_peak_bytes=in_full,
        plan_peak_bytes=planned,
        rounds=turns.rounds,
    )


def in_own_process(name: str, rounds: int) -> Result:
    """Run one case in a process of its own."""
    try:
        return Result(**run_one(__file__, name, "--rounds", str(rounds), seconds=CASE_SECONDS))
    except CaseFailed as error:
        return Result(name, failure=str(error))


def as_line(r: Result) -> str:
    verdict = "ok  " if r.good else "MISS"
    if r.failure:
        return f"{verdict} {r.name:12} {r.failure}"
    return (
        f"{verdict} {r.name:12} {r.step_seconds:.2f} s per step; full {r.full:+.1%}, plan {r.plan:+.1%} "
        f"± {r.standard_error:.1%} ({r.share_of_full:.0%} of full), "
        f"predicted {r.predicted:+.1%} ({r.error:+.1%}); "
        f"peak {r.unplanned_peak_bytes:,}, full {r.full_peak_bytes:,}, plan {r.plan_peak_bytes:,} "
        f"of {r.budget_bytes:,}"
    )


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("names", nargs="*", help=f"cases to run (default: {', '.join(DEFAULT)})")
    parser.add_argument("--rounds", type=int, default=30, help="steps of each kind at least (default: 30)")
    parser.add_argument("--run-one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run_one:
        report(asdict(run_case(options.run_one, options.rounds)))
        return 0
    unknown = sorted(set(options.names) - set(BATCHES))
    if unknown:
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(BATCHES)}")
    os.environ |= KEEPS_MEMORY
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as cache:
        # What was measured with another allocator, or at another time, would not compare.
        os.environ["TRAINFIT_CACHE"] = cache
        for name in options.names or DEFAULT:
            results.append(in_own_process(name, options.rounds))
            print(as_line(results[-1]), flush=True)
    rows = [asdict(result) | {"batch": BATCHES[result.name]} for result in results]
    write_rows("plan_time", rows, options.csv, everything=not options.names)
    return 0 if all(result.good for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
