"""One setting of FSDP's units: the step with it, planned within the budget, certified; and what to keep.

Each choice of units is captured once, with all of them resharded; units that are kept are an edit of that.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from trainfit.allocator.allocator_options import AllocatorOptions
from trainfit.allocator.named_options import DEFAULT_OPTIONS
from trainfit.api.request import Build, Request
from trainfit.applying.unit_sharding import set_units, units_of
from trainfit.basics.doing import as_part_of, unheard
from trainfit.devices.device_table import Device
from trainfit.errors import StepError
from trainfit.models.parallel.unit_grain import Grain, units_are
from trainfit.models.recipe import StepOptions
from trainfit.planning import certify
from trainfit.planning.certify import Certified
from trainfit.planning.kept_problem import JointProblem
from trainfit.planning.kept_units import UnitKeep, keep_units, unit_keeps
from trainfit.planning.planner import Planner
from trainfit.planning.queue_plans import faster_on_queues
from trainfit.planning.requests import bytes_of_budget
from trainfit.steps.step import Step
from trainfit.traces.ranks import Cluster
from trainfit.traces.trace import Trace

OWN = "own"
_GAP_SHARE = 1e-3
"""Of the step: how close to the best possible the choice of units has to be."""


@dataclass(frozen=True)
class Setting:
    """Which modules are units, which of them stay whole after forward, how many are gathered ahead."""

    grain: Grain | None = "blocks"
    """None: as the target makes them."""
    kept: tuple[str, ...] = ()
    prefetch: int = 1

    @property
    def words(self) -> str:
        """As people read it while it is tried."""
        units = "its own units" if self.grain is None else f"units {self.grain}"
        ahead = f", prefetch {self.prefetch}" if self.prefetch > 1 else ""
        return f"{units}, {len(self.kept)} kept{ahead}"


@dataclass(frozen=True)
class Proposal:
    """Units to keep, and how long a step with any of them kept takes at least, as the program sees it."""

    kept: tuple[str, ...]
    bound_seconds: float


@dataclass
class CapturedUnits:
    """The step with one choice of units, all of them resharded after forward."""

    request: Request
    trace: Trace
    units: tuple[str, ...]
    planner: Planner

    @cached_property
    def keeps(self) -> dict[str, UnitKeep]:
        """What each unit changes if it is kept, by name."""
        inside = len(self.trace.modules[self.trace.model].name) + 1
        found = unit_keeps(self.trace)
        return {self.trace.modules[module].name[inside:]: keep for module, keep in found.items()}

    @cached_property
    def problem(self) -> JointProblem:
        """Which units to keep and what to checkpoint, in one program."""
        regions = self.planner.problem
        return JointProblem.of(
            self.planner.step.replay, regions.options, regions.exclusive, tuple(self.keeps.values())
        )


@dataclass(frozen=True)
class Trial:
    """A setting, and what the step needs with it."""

    setting: Setting
    units: tuple[str, ...]
    trace: Trace = field(repr=False)
    plan: Certified = field(repr=False)
    free_seconds: float
    """How long the step takes with every activation kept, whether it fits or not."""
    computing_seconds: float
    """How long the device computes in it, with nothing beside that."""
    exposed_seconds: float
    """Of the step with its plan."""
    communication_seconds: float
    device: Device = field(repr=False)

    @property
    def fits(self) -> bool:
        """Whether it runs within the budget."""
        return self.plan.fits

    @property
    def seconds(self) -> float:
        """The step with its plan."""
        return self.plan.step_seconds


@dataclass
class UnitTrials:
    """One step with many settings; each is tried once."""

    target: str | Build
    device: Device
    options: StepOptions
    task: str | None
    cluster: Cluster
    budget: int | str | None = None
    allocator: AllocatorOptions | None = DEFAULT_OPTIONS
    seconds_limit: float = 10.0
    found: dict[Setting, Trial] = field(default_factory=dict)
    captured: dict[Setting, CapturedUnits] = field(default_factory=dict)
    """By setting, of which nothing is kept where that can be worked out."""

    def trial(self, setting: Setting) -> Trial:
        """Return the step with a setting, with the fastest plan that was found for it."""
        if setting not in self.found:
            with as_part_of(setting.words):
                self.found[setting] = self._tried(setting)
        return self.found[setting]

    def propose(self, setting: Setting, less_bytes: int = 0) -> Proposal | None:
        """Return which units to keep with these units and this prefetch; None if the solver has no answer.

        `less_bytes` is how much less than the budget the bytes asked for may be, for the allocator's sake.
        """
        one = self._captured(replace(setting, kept=()))
        keeps = tuple(one.keeps)
        budget = certify.peak_within(one.trace, bytes_of_budget(self.budget, one.request.device) - less_bytes)
        answer = one.problem.solve(
            budget,
            seconds_limit=self.seconds_limit,
            gap_seconds=_GAP_SHARE * one.planner.step.step_seconds,
        )
        if not answer.feasible:
            return None
        return Proposal(tuple(keeps[number] for number in answer.kept), answer.bound)

    def _captured(self, setting: Setting) -> CapturedUnits:
        if setting in self.captured:
            return self.captured[setting]
        names: list[str] = []
        request = Request(
            self.target,
            self.device,
            self.options,
            self.task,
            cluster=self.cluster,
            changed=partial(_set, setting, names),
        )
        with units_are(setting.grain or "blocks"), warnings.catch_warnings():
            # It is about what a caller may do in place with a unit's result, and said for each unit.
            warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
            trace = request.trace()
        planner = Planner(trace, request.price(trace), self.allocator)
        self.captured[setting] = CapturedUnits(request, trace, tuple(names), planner)
        return self.captured[setting]

    def _with_kept(self, setting: Setting) -> CapturedUnits:
        """Return the step with units that are kept: worked out, or captured if that is not known."""
        base = self._captured(replace(setting, kept=()))
        if not setting.kept:
            return base
        if not base.keeps.keys() >= set(setting.kept):
            return self._captured(setting)
        trace = keep_units(base.trace, [base.keeps[name] for name in setting.kept])
        planner = Planner(trace, base.request.price(trace), self.allocator)
        return CapturedUnits(base.request, trace, base.units, planner)

    def _tried(self, setting: Setting) -> Trial:
        one = self._with_kept(setting)
        planner, trace = one.planner, one.trace
        budget = bytes_of_budget(self.budget, one.request.device)
        with unheard():
            plan = planner.plan(budget, seconds_limit=self.seconds_limit)
            if plan.plan.regions:
                plan = faster_on_queues(planner, plan, budget, self.seconds_limit)
        free = planner.step.replay.times
        times = plan.times
        return Trial(
            setting,
            one.units,
            trace,
            replace(plan, plan=plan.promised()),
            free.step_seconds,
            free.computing_seconds,
            times.exposed_communication_seconds,
            times.communication_seconds,
            one.request.device,
        )


def _set(setting: Setting, names: list[str], step: Step) -> Step:
    """Set the units of a step that was built; remember their names."""
    units = units_of(step.model)
    if not units and setting.grain != "whole":
        raise StepError(
            "the step has no units of FSDP2 (fully_shard) besides its model, so there is nothing to decide "
            "about them: shard it, by --mesh dp=8 for a built-in or hf: model."
        )
    names[:] = units
    set_units(step.model, units, setting.kept, setting.prefetch)
    return step
