"""One setting of FSDP's units: the step captured with it, planned within the budget, certified."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from trainfit.allocator.allocator_options import AllocatorOptions
from trainfit.allocator.named_options import DEFAULT_OPTIONS
from trainfit.api.request import Build, Request
from trainfit.applying.unit_sharding import set_units, units_of
from trainfit.basics.doing import as_part_of, unheard
from trainfit.costs.schedule import schedule
from trainfit.devices.device_table import Device
from trainfit.errors import StepError
from trainfit.models.parallel.unit_grain import Grain, units_are
from trainfit.models.recipe import StepOptions
from trainfit.planning.certify import Certified
from trainfit.planning.planner import Planner
from trainfit.planning.requests import bytes_of_budget
from trainfit.steps.step import Step
from trainfit.traces.ranks import Cluster
from trainfit.traces.trace import Trace

OWN = "own"


@dataclass(frozen=True)
class Setting:
    """Which modules are units, how many of the last stay whole after forward, how many are gathered ahead."""

    grain: Grain | None = "blocks"
    """None: as the target makes them."""
    kept: int = 0
    prefetch: int = 1

    @property
    def words(self) -> str:
        """As people read it while it is tried."""
        units = "its own units" if self.grain is None else f"units {self.grain}"
        ahead = f", prefetch {self.prefetch}" if self.prefetch > 1 else ""
        return f"{units}, {self.kept} kept{ahead}"


@dataclass(frozen=True)
class Trial:
    """A setting, and what the step needs with it."""

    setting: Setting
    units: tuple[str, ...]
    trace: Trace = field(repr=False)
    plan: Certified = field(repr=False)
    free_seconds: float
    """How long the step takes with every activation kept, whether it fits or not."""
    unexposed_seconds: float
    """The same if collectives took no time."""
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

    @property
    def kept(self) -> tuple[str, ...]:
        """The units that stay whole after forward: the last ones, which backward needs first."""
        return self.units[len(self.units) - self.setting.kept :]


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

    def trial(self, setting: Setting) -> Trial:
        """Capture the step with a setting, and plan it."""
        if setting not in self.found:
            with as_part_of(setting.words):
                self.found[setting] = self._tried(setting)
        return self.found[setting]

    def _tried(self, setting: Setting) -> Trial:
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
        device = request.device
        planner = Planner(trace, request.price(trace), self.allocator)
        budget = bytes_of_budget(self.budget, device)
        with unheard():
            plan = planner.plan(budget, seconds_limit=self.seconds_limit)
        free = schedule(trace, planner.costs)
        times = plan.times
        return Trial(
            setting,
            tuple(names),
            trace,
            replace(plan, plan=plan.promised()),
            free.step_seconds,
            free.step_seconds - free.exposed_communication_seconds,
            times.exposed_communication_seconds,
            times.communication_seconds,
            device,
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
    kept = units[len(units) - setting.kept :]
    set_units(step.model, units, kept, setting.prefetch)
    return step


Try = Callable[[Setting], Trial]
