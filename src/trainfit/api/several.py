"""Several estimates or plans: of a list of batches, the largest among them, on a list of devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from trainfit.api.choose import plan_step
from trainfit.api.predict import estimate_step
from trainfit.api.request import Request
from trainfit.api.size_judge import SizeQuestion
from trainfit.api.sizes import largest_size, unused_size
from trainfit.basics.doing import in_turn
from trainfit.costs.estimates import Estimate
from trainfit.errors import BudgetTooSmall, OptionError, TargetError
from trainfit.planning.plan_results import PlanResult
from trainfit.sizing.trace_growth import TraceGrowth

Result = TypeVar("Result", Estimate, PlanResult)


@dataclass(frozen=True)
class AskedStep:
    """A step of which something is asked; with `largest`, with the largest batch that fits."""

    request: Request
    largest: bool = False

    def single(self) -> Request:
        """Return the step, where looking for the largest makes no sense."""
        if self.largest:
            raise OptionError("--batch max does not look for steps with --compile; name a batch.")
        return self.request


def estimate_asked(asked: AskedStep) -> Estimate:
    """Estimate a step, or the one with the largest batch that fits."""
    if not asked.largest:
        return estimate_step(asked.request)
    result = largest_size(asked.request, SizeQuestion("batch")).result
    assert isinstance(result, Estimate)
    return result


def plan_asked(asked: AskedStep, budget: int | str | None = None, **solver: Any) -> PlanResult:
    """Plan a step, or the one with the largest batch that a plan makes fit."""
    if not asked.largest:
        return plan_step(asked.request, budget=budget, **solver)
    if solver.get("solver", "regions") != "regions":
        raise OptionError("--batch max looks for plans of the solver `regions`; leave --solver out.")
    if solver.get("offload"):
        raise OptionError("--batch max looks for plans without --offload; leave one of the two out.")
    seconds = solver.get("seconds_limit", 30.0)
    result = largest_size(asked.request, SizeQuestion("batch", True, budget, 1, seconds)).result
    assert isinstance(result, PlanResult)
    return result


def one_by_one(steps: Sequence[AskedStep], find: Callable[[AskedStep], Result]) -> list[Result]:
    """Return a result for each; where not even the smallest batch fits, that of the smallest."""
    found = []
    for asked in in_turn("step", steps):
        try:
            found.append(find(asked))
        except BudgetTooSmall:
            if not asked.largest:
                raise
            found.append(find(AskedStep(asked.request.at(batch=1))))
    _refuse_ignored(steps, found)
    return found


def _refuse_ignored(steps: Sequence[AskedStep], found: Sequence[Estimate | PlanResult]) -> None:
    """Refuse a list of batches where the step is the same with all: its throughput would be made up."""
    by_device: dict[str, TraceGrowth] = {}
    sizes: set[int] = set()
    for asked, result in zip(steps, found):
        if asked.largest or (size := asked.request.options.batch) is None:
            continue
        sizes.add(size)
        by_device.setdefault(result.device.name, TraceGrowth("batch")).learn(size, result.trace)
    if any(growth.is_flat for growth in by_device.values()):
        raise TargetError(unused_size("batch", min(sizes), max(sizes)))
