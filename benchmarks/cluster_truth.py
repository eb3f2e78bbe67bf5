"""Sharded steps on real ranks: predicted against measured, by rank and phase; and plans applied to them.

    python benchmarks/cluster_truth.py                 all cases on 2 and on 4 ranks
    python benchmarks/cluster_truth.py fsdp tp         some cases
    python benchmarks/cluster_truth.py --ranks 2 --no-plans

Every case (`cluster_cases/`) is an ordinary function that makes its own process groups. Each rank captures it
as one process among fake ones, then runs it for real with the others; the truth is the profiler's allocation
events of a step after at least two others, on process groups whose exchange takes no memory of torch's.

All ranks run the plan of the first, but for stages of pipelines; what it needs on a rank is predicted from
the trace of that rank.

Exit code 1 if the peak of a rank or of one of its phases is more than 0.1 % off, with a plan or without, if
the bytes before the step are not equal, or if a plan exceeds its budget or changes a gradient.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forked_ranks import RanksFailed, run_ranks
from result_files import arguments, write_rows

sys.path.insert(0, str(Path(__file__).parent))

from cluster_cases import CASES
from trainfit.capturing import capture
from trainfit.costs.pricing import price_trace
from trainfit.devices.device_table import find_device
from trainfit.planning import master
from trainfit.planning.master import MasterProblem
from trainfit.planning.planner import Planner
from trainfit.planning.unit_gathers import has_units_inside
from trainfit.plans.plan import Plan
from trainfit.plans.plan_store import load_plan, save_plan
from trainfit.traces.simulate import simulate
from trainfit.traces.trace import Trace
from trainfit.verifying.rank_control import RankControl
from trainfit.verifying.rank_measuring import planned_memory, predicted_memory
from trainfit.verifying.rank_verification import RankFound, run_rank
from trainfit.verifying.silent_backend import silent_groups
from trainfit.workspace.measured import THOROUGH

BOUND = 0.001
SHARES = (0.0, 0.5)
"""Budgets of plans: how far they are on the way from the smallest reachable peak to that without a plan."""
PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Row:
    """One rank of one case, with a plan or without; or the message of its failure."""

    name: str
    ranks: int
    rank: int = 0
    share: float | None = None
    """Of the plan's budget; None without a plan."""
    budget_bytes: int = 0
    predicted_bytes: int = 0
    measured_bytes: int = 0
    persistent_predicted_bytes: int = 0
    persistent_measured_bytes: int = 0
    forward_predicted_bytes: int = 0
    forward_measured_bytes: int = 0
    backward_predicted_bytes: int = 0
    backward_measured_bytes: int = 0
    optimizer_predicted_bytes: int = 0
    optimizer_measured_bytes: int = 0
    unplanned_bytes: int = 0
    regions: int = 0
    equal: bool | None = None
    failure: str = ""

    @property
    def error(self) -> float:
        """Of the peak."""
        return _error(self.predicted_bytes, self.measured_bytes)

    @property
    def worst_phase_error(self) -> float:
        """Of the phase whose peak was predicted worst."""
        return max((_error(*self.phase(name)) for name in PHASES), key=abs)

    def phase(self, name: str) -> tuple[int, int]:
        return getattr(self, f"{name}_predicted_bytes"), getattr(self, f"{name}_measured_bytes")

    @property
    def good(self) -> bool:
        if self.failure or max(abs(self.error), abs(self.worst_phase_error)) > BOUND:
            return False
        if self.share is not None and (self.measured_bytes > self.budget_bytes or self.equal is not True):
            return False
        return self.persistent_predicted_bytes == self.persistent_measured_bytes


def _error(predicted: int, measured: int) -> float:
    return (predicted - measured) / max(measured, 1)


def on_this_rank(name: str, share: float | None) -> dict[str, Any]:
    """Predict and measure a case on the rank that this process is, with a plan or without."""
    control = RankControl.from_environment()
    try:
        case, cluster = CASES[name], control.cluster
        trace = capture(case.build, target=name, limits=THOROUGH, cluster=cluster)
        predicted = predicted_memory(simulate(trace))
        plan, budget = None, 0
        if share is not None:
            make = functools.partial(_plan_of_rank, trace, share, case.around_units)
            plan, budget = make() if case.plan_per_rank else _shared(make, control)
            predicted = planned_memory(plan, trace)
        with silent_groups():
            found = run_rank(case.build, predicted, trace.steps, control, plan=plan, eager=False)
        control.leave()
        return asdict(_row(name, cluster.world_size, found, share, budget, plan))
    except BaseException as error:
        control.failed(str(error))
        raise


def _plan_of_rank(trace: Trace, share: float, around_units: bool) -> tuple[Plan, int]:
    """Return a plan for the rank that this process is, and its budget."""
    planner = Planner(trace, price_trace(trace, find_device("cpu")))
    if around_units:
        planner.problem = _around_units(planner)
    smallest, largest = planner.smallest().peak_bytes, planner.nothing().peak_bytes
    budget = round(smallest + share * (largest - smallest))
    return planner.plan(budget).plan, budget


def _around_units(planner: Planner) -> MasterProblem:
    """Return the planner's problem with the regions that lie around units, but for the whole model."""
    trace, before = planner.trace, planner.problem
    kept = [
        number
        for number, option in enumerate(before.options)
        for region in (option.effects[0].region,)
        if region.module != trace.model and has_units_inside(trace, region.calls)
    ]
    place = {number: position for position, number in enumerate(kept)}
    exclusive = [[place[number] for number in group if number in place] for group in before.exclusive]
    options = [before.options[number] for number in kept]
    return master.build(simulate(trace), options, exclusive, before.spare_seconds)


def _shared(make: Callable[[], tuple[Plan, int]], control: RankControl) -> tuple[Plan, int]:
    """Return the plan of rank 0, which all ranks use, and its budget."""
    text, budget = "", 0
    if control.cluster.rank == 0:
        plan, budget = make()
        text = _plan_text(plan)
    text, budget = control.gathered([text, budget])[0]
    return _plan_from(text), budget


def _plan_text(plan: Plan) -> str:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        save_plan(plan, file.name)
        return Path(file.name).read_text(encoding="utf-8")


def _plan_from(text: str) -> Plan:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        Path(file.name).write_text(text, encoding="utf-8")
        return load_plan(file.name)


def _row(
    name: str,
    ranks: int,
    found: RankFound,
    share: float | None = None,
    budget_bytes: int = 0,
    plan: Plan | None = None,
) -> Row:
    phases = {
        f"{phase}_{what}_bytes": memory.phase_bytes.get(phase, 0)
        for phase in PHASES
        for what, memory in (("predicted", found.predicted), ("measured", found.measured))
    }
    equal = None if plan is None else bool(found.loss_equal is not False and found.gradients_equal)
    return Row(
        name=name,
        ranks=ranks,
        rank=found.rank,
        share=share,
        budget_bytes=budget_bytes,
        predicted_bytes=found.predicted.peak_bytes,
        measured_bytes=found.measured.peak_bytes,
        persistent_predicted_bytes=found.predicted.persistent_bytes,
        persistent_measured_bytes=found.measured.persistent_bytes,
        **phases,
        unplanned_bytes=found.baseline_peak_bytes,
        regions=0 if plan is None else len(plan.regions),
        equal=equal,
    )


def run_case(name: str, ranks: int, share: float | None = None) -> list[Row]:
    """Run a case on so many ranks."""
    try:
        found = run_ranks(functools.partial(on_this_rank, name, share), ranks)
    except RanksFailed as error:
        return [Row(name, ranks, share=share, failure=" ".join(str(error).split()))]
    return [Row(**row) for row in found]


def as_lines(row: Row) -> list[str]:
    verdict = "ok  " if row.good else "MISS"
    where = f"{verdict} {row.name:24} {row.rank} of {row.ranks}"
    if row.failure:
        plan = "" if row.share is None else f" plan {row.share:.0%}"
        return [f"{verdict} {row.name:24} {row.ranks} ranks{plan}: {row.failure}"]
    peak = f"{row.predicted_bytes:>11,} predicted, {row.measured_bytes:>11,} measured {_shown(row.error)}"
    if row.share is not None:
        same = "equal" if row.equal else "NOT EQUAL"
        return [
            f"{where} plan {row.share:.0%} of {row.budget_bytes:>11,}: {peak}, unplanned "
            f"{row.unplanned_bytes:>11,}, {row.regions} regions, {same}"
        ]
    before = (row.persistent_predicted_bytes, row.persistent_measured_bytes)
    parts = {name: row.phase(name) for name in PHASES} | {"before": before}
    if row.good and all(one == other for one, other in parts.values()) and row.error == 0:
        sizes = ", ".join(f"{name} {measured:,}" for name, (_, measured) in parts.items())
        return [f"{where} peak {row.measured_bytes:>11,} exact; all exact: {sizes}"]
    lines = [f"{where} peak {peak}"]
    for name, (predicted, measured) in parts.items():
        off = predicted - measured
        text = "exact" if off == 0 else f"{off:+,} bytes"
        lines.append(f"       {name:10} {predicted:>11,} predicted, {measured:>11,} measured, {text}")
    return lines


def _shown(error: float) -> str:
    return "exact" if error == 0 else f"({100 * error:+.4f} %)"


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("names", nargs="*", help="cases to run (default: all)")
    parser.add_argument("--ranks", type=int, choices=(2, 4), help="on so many ranks only")
    parser.add_argument("--no-plans", action="store_true", help="make and apply no plans")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in CASES]
    if unknown:
        parser.error(f"there is no case {unknown[0]}; there are {', '.join(CASES)}")
    begin, rows = time.perf_counter(), []
    for name in options.names or CASES:
        for ranks in CASES[name].ranks:
            if options.ranks in (None, ranks):
                for share in (None, *(SHARES if CASES[name].plans and not options.no_plans else ())):
                    found = run_case(name, ranks, share)
                    rows += found
                    print("\n".join(line for row in found for line in as_lines(row)), flush=True)
    unplanned = [row for row in rows if row.share is None]
    # A plan without regions, because the peak is elsewhere, proves nothing.
    plans = {(row.name, row.ranks, row.share) for row in rows if row.share is not None and row.regions}
    bad_plans = {(row.name, row.ranks, row.share) for row in rows if row.share is not None and not row.good}
    exact = sum(row.good and row.error == 0 and row.worst_phase_error == 0 for row in unplanned)
    print(
        f"{len({row.name for row in rows})} variants: {sum(row.good for row in unplanned)} of "
        f"{len(unplanned)} ranks within {BOUND:.1%}, {exact} exact to the byte; {len(plans - bad_plans)} of "
        f"{len(plans)} plans hold; {time.perf_counter() - begin:.0f} s"
    )
    everything = not options.names and options.ranks is None and not options.no_plans
    write_rows("cluster_truth", [asdict(row) for row in rows], options.csv, everything=everything)
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
