"""`ShownStep`: what the exports take of a result. One step in memory and, where costs are known, in time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from trainfit.allocator.device_memory import StepMemory
from trainfit.costs.estimates import Estimate
from trainfit.costs.op_times import OpTimes, op_times
from trainfit.costs.schedule import Schedule, schedule
from trainfit.errors import OptionError
from trainfit.planning.plan_results import PlanResult
from trainfit.traces.simulate import Timeline


@dataclass(frozen=True)
class ShownStep:
    """A step: of a plan, the one that runs it."""

    timeline: Timeline
    memory: StepMemory
    times: Schedule | None
    """None if nothing is known about the device's speed."""

    @classmethod
    def of(cls, result: Estimate | PlanResult) -> ShownStep:
        """Return the step of a result."""
        memory = StepMemory(result.timeline, result.device, result.allocator)
        if isinstance(result, PlanResult):
            return cls(result.timeline, memory, result.times)
        times = None if result.costs is None else schedule(result.trace, result.costs)
        return cls(result.timeline, memory, times)

    @cached_property
    def op_times(self) -> OpTimes | None:
        """When each op runs; None if nothing is known about the device's speed."""
        return None if self.times is None else op_times(self.times)


def shown_step(result: object) -> ShownStep:
    """Return the step of a result; `OptionError` if it is not about one step."""
    if not isinstance(result, Estimate | PlanResult):
        raise OptionError(
            "a snapshot or a trace is made of what `trainfit.estimate` or the planner returns, got "
            f"{type(result).__name__}."
        )
    return ShownStep.of(result)
