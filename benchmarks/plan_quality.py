"""How good are plans? Same trace, same costs: ours beside PyTorch's, the usual ways and the exact optimum.

    python benchmarks/plan_quality.py                     all built-ins, and steps small enough to try all
    python benchmarks/plan_quality.py gpt2 llama-3-8b     some
    python benchmarks/plan_quality.py --executors         with the time that running regions takes the host

Every plan, whoever made it, is replayed on the same trace (H100, roofline): its peak and its time are the
replay's. What an executor takes besides is not counted, because each way may have another; executor_time.py
compares those. With `--executors` it is: then the usual ways are priced like our regions that keep nothing,
and PyTorch's own plans, `modules` and the exact optimum are left out. Each other way is asked first, and our
solvers get its peak as their budget. Exit code 1 if

- `regions` adds more time than another way at the same peak,
- it adds more than 1.01 times the exact optimum where that is known, or
- it reports a gap above 1 % of the step.

PyTorch's plans come from its own code (`torch.distributed._tools.sac_ilp`), see torch_sac.py.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from own_process import CaseFailed, report, run_one
from result_files import arguments, write_rows

if TYPE_CHECKING:
    from trainfit import Step, Trace
    from trainfit.costs.table import CostTable
    from trainfit.planning.modules.unit_planner import ModulePlanner
    from trainfit.planning.planner import Planner

sys.path.insert(0, str(Path(__file__).parent))

DEVICE = "h100-sxm-80gb"
SHARES, EXACT_SHARES = (0.2, 0.5, 0.8), (0.1, 0.3, 0.5, 0.7, 0.9)
"""Of the way from the smallest reachable peak to the peak without a plan."""
TORCH_SHARES = (0.95, 0.85, 0.7)
"""Of the peak without a plan in PyTorch's own model."""
TORCH_PLANS, MANY_MODULES = 2, 250
"""Of those that PyTorch finds; one where modules are many, because its solver takes minutes for each."""
TORCH_TRIES = 3
"""With other seeds of its fit, if it finds none."""
LARGER_BATCH = ("tinyllama-1.1b", "llama-2-7b", "mixtral-8x7b", "llama-3-70b", "llama-3-405b")
"""With one sample, their largest moment is the optimizer's, and there is nothing to plan."""
LARGEST_GAP = 0.01
LARGEST_RATIO_TO_OPTIMUM = 1.01
ROUNDING = 1e-9
EXECUTOR = ("region_call", "region_op", "checkpoint_call", "checkpoint_op")
CASE_SECONDS = 1800


@dataclass(frozen=True)
class Row:
    """One comparison at one peak; times are added seconds as shares of the step without a plan."""

    case: str
    against: str
    budget_bytes: int = 0
    peak_share: float = 0.0
    """Of the peak without a plan."""
    other: float | None = None
    regions: float | None = None
    modules: float | None = None
    gap: float = 0.0
    good: bool = True
    note: str = ""


def small_steps() -> dict[str, Callable[[], Step]]:
    """Steps of few ops, for which every plan can be tried."""
    import torch
    from torch import nn

    from trainfit import Step

    class Gated(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up, self.gate = (
                nn.Linear(width, 4 * width, bias=False),
                nn.Linear(width, 4 * width, bias=False),
            )
            self.down = nn.Linear(4 * width, width, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))

    def stack(*blocks: nn.Module) -> Callable[[], Step]:
        def build() -> Step:
            with torch.device("cuda"):
                model = nn.Sequential(*blocks).to("cuda")
                inputs = torch.randn(4096, 512, requires_grad=False)
                return Step.of(model, (inputs,), loss=lambda out: out.square().mean(), optimizer=None)

        return build

    def mlp() -> nn.Module:
        return nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512), nn.Tanh())

    return {
        "exact-gated": lambda: stack(Gated(512), Gated(512))(),
        "exact-mlp": lambda: stack(mlp(), mlp())(),
        "exact-uneven": lambda: stack(mlp(), Gated(512), nn.Sequential(nn.LayerNorm(512), nn.GELU()))(),
    }


def built_ins() -> tuple[str, ...]:
    from trainfit.models.catalog import PRESETS

    return tuple(PRESETS)


def run_case(name: str, *, executors: bool) -> list[Row]:
    """Compare on one step, in this process."""
    import trainfit
    from trainfit.planning.modules.unit_planner import ModulePlanner
    from trainfit.planning.planner import Planner

    small = small_steps()
    larger = trainfit.StepOptions(batch=4, optimizer="adamw-fused") if name in LARGER_BATCH else None
    trace = trainfit.capture(small.get(name, name), device=DEVICE, options=larger)
    costs = trainfit.price(trace, DEVICE)
    if not executors:
        costs = replace(costs, host=replace(costs.host, **dict.fromkeys(EXECUTOR, 0.0)))
    # PyTorch's planner knows of no allocator: all are compared by the bytes that are asked for.
    modules = None if executors else ModulePlanner(trace, costs, allocator=None)
    compare = _Comparison(name, trace, costs, Planner(trace, costs, allocator=None), modules)
    if executors:
        return list(compare.usual_ways())
    rows = [*compare.usual_ways(), *compare.torchs(), *compare.gaps()]
    return [*rows, *compare.exact()] if name in small else rows


@dataclass
class _Comparison:
    case: str
    trace: Trace
    costs: CostTable
    regions: Planner
    modules: ModulePlanner | None

    def usual_ways(self) -> Iterator[Row]:
        from trainfit.planning.baselines import baselines

        seen: set[tuple[str, int]] = set()
        for share in SHARES[:2]:
            for way in baselines(self.regions.step, self._budget(share)):
                if way.regions and (way.name, way.peak_bytes) not in seen:
                    seen.add((way.name, way.peak_bytes))
                    yield self._row(way.name, way.peak_bytes, way.step_seconds)

    def torchs(self) -> Iterator[Row]:
        for seed in range(TORCH_TRIES):
            try:
                rows = list(self._torchs(seed))
            except Exception as error:
                raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
                if raised_in.parent == Path(__file__).parent or "trainfit" in raised_in.parts:
                    raise  # a mistake of ours; whatever its own code raises is its answer
                yield Row(self.case, "PyTorch", note=f"its tools fail: {type(error).__name__}: {error}")
                return
            if rows:
                yield from rows
                return
        yield Row(self.case, "PyTorch", note="its sac_milp finds no plan")

    def _torchs(self, seed: int) -> Iterator[Row]:
        import torch_sac
        from trainfit.planning.certify import certified

        planner = torch_sac.TorchPlanner(self.trace, self.costs, seed)
        found = 0
        for share in TORCH_SHARES:
            effects = planner.effects(round(share * planner.unplanned_bytes))
            if effects:
                found += 1
                plan = certified(
                    self.regions.step, effects, budget_bytes=0, bound_seconds=0.0, method="PyTorch"
                )
                yield self._row(f"PyTorch, {share:.0%}", plan.peak_bytes, plan.step_seconds)
            if found == (TORCH_PLANS if len(self.trace.modules) < MANY_MODULES else 1):
                return

    def gaps(self) -> Iterator[Row]:
        for share in SHARES:
            yield self._row(f"{share:.0%} of the way", self._budget(share), None)

    def exact(self) -> Iterator[Row]:
        from exact_plans import best_seconds, every_plan

        plans = every_plan(self.trace, self.costs)
        for share in EXACT_SHARES:
            budget = self._budget(share)
            best = best_seconds(plans, budget)
            yield self._row(f"exact, {len(plans):,} plans", budget, best, ratio=LARGEST_RATIO_TO_OPTIMUM)

    @cached_property
    def _smallest_bytes(self) -> int:
        return self.regions.smallest().peak_bytes

    @cached_property
    def _unplanned_bytes(self) -> int:
        return self.regions.nothing().peak_bytes

    def _budget(self, share: float) -> int:
        return round(self._smallest_bytes + share * (self._unplanned_bytes - self._smallest_bytes))

    def _row(self, against: str, budget: int, seconds: float | None, ratio: float = 1.0) -> Row:
        before = self.regions.step.step_seconds
        ours, modules = self.regions.plan(budget), self.modules and self.modules.plan(budget)
        other = None if seconds is None else seconds / before - 1
        added = ours.plan.added_seconds / before if ours.fits else None
        gap = ours.plan.gap if ours.fits else 1.0
        good = added is not None and gap <= LARGEST_GAP
        if added is not None and other is not None:
            good &= added <= ratio * other + ROUNDING
        return Row(
            self.case,
            against,
            budget,
            budget / self._unplanned_bytes,
            other,
            added,
            modules.plan.added_seconds / before if modules and modules.fits else None,
            gap,
            good,
        )


def in_own_process(name: str, *, executors: bool) -> list[Row]:
    """Run one case in a process of its own."""
    options = ("--executors",) if executors else ()
    try:
        return [Row(**entry) for entry in run_one(__file__, name, *options, seconds=CASE_SECONDS)]
    except CaseFailed as error:
        return [Row(name, "", good=False, note=str(error))]


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:+.2%}"


def as_line(row: Row) -> str:
    verdict = "ok  " if row.good else "MISS"
    if row.note:
        return f"{verdict} {row.case:16} {row.against} {row.note}"
    times = " ".join(
        f"{name} {percent(share):>8} "
        for name, share in (("other", row.other), ("regions", row.regions), ("modules", row.modules))
    )
    return f"{verdict} {row.case:16} {row.against:24} peak {row.peak_share:7.2%}  {times} gap {row.gap:.2%}"


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("names", nargs="*", help="steps to compare on (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="steps at a time")
    parser.add_argument("--executors", action="store_true", help="count what running regions takes the host")
    parser.add_argument("--run-one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run_one:
        report([asdict(row) for row in run_case(options.run_one, executors=options.executors)])
        return 0
    import torch_sac

    if not options.executors and (problem := torch_sac.missing()):
        print(problem, file=sys.stderr)
        return 2
    rows: list[Row] = []
    compare = partial(in_own_process, executors=options.executors)
    with ThreadPoolExecutor(options.jobs) as pool:
        for found in pool.map(compare, options.names or (*small_steps(), *built_ins())):
            rows += found
            print("\n".join(map(as_line, found)), flush=True)
    good = sum(row.good for row in rows)
    print(f"{good} of {len(rows)} comparisons as claimed")
    table = "plan_quality_executors" if options.executors else "plan_quality"
    write_rows(table, rows, options.csv, everything=not options.names)
    return 0 if good == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
