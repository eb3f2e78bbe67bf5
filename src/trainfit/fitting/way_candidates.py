"""One combination of changes: its step captured, and planned if it does not fit otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from trainfit.allocator.allocator_options import AllocatorOptions
from trainfit.allocator.device_memory import StepMemory
from trainfit.changes.accumulation import CAPTURED_PASSES
from trainfit.changes.change import StepChange
from trainfit.changes.kinds.allocator_segments import EXPANDABLE
from trainfit.costs.host_link import link_seconds
from trainfit.costs.schedule import Schedule, schedule
from trainfit.costs.table import CostTable
from trainfit.devices.device_table import Device
from trainfit.fitting.guessed_times import StepParts, repeats_of, runs_of_ops
from trainfit.fitting.lent_plans import LentPlans
from trainfit.fitting.shallow_steps import Outlook, ShallowSteps, forward_ops, least_planned_bytes
from trainfit.planning.certify import Certified, Unplanned, promised_peak
from trainfit.planning.host_copies import HostLink
from trainfit.planning.known_options import KnownOptions
from trainfit.planning.planner import Planner
from trainfit.plans.plan import Plan
from trainfit.plans.ways import Way
from trainfit.traces.simulate import simulate
from trainfit.traces.trace import Trace

_GAP_SHARE = 5e-4
"""Of the step's time: ways that are less apart are not told apart (`way_ranking.py`)."""
_LEAST_COMPUTED = 0.8
"""Of forward and backward: what they take at least when something in them is changed, such as the loss."""
_LEAST_ADDED = 0.95
"""Of what the best plan adds that frees as much in a step with the same forward."""
_MOST_PLANNERS = 6
"""How many are kept: each has all curves of a step."""

Capture = Callable[[Sequence[StepChange]], tuple[Trace, CostTable] | None]
"""Captures and prices the step with changes; None if they cannot be made."""


@dataclass
class Candidates:
    """Judges combinations of changes for one device and budget; nothing is captured twice."""

    capture: Capture
    budget_bytes: int
    allocator: AllocatorOptions | None
    budget_for: Callable[[Device], int] | None = None
    """The budget on a device of which something else takes a part, as NCCL does."""
    shallow: ShallowSteps | None = None
    """Works steps out before they are captured, where the model has many layers."""
    _traces: dict[tuple[str, ...], tuple[Trace, CostTable] | None] = field(default_factory=dict)
    _unplanned: dict[tuple[str, ...], Way] = field(default_factory=dict)
    _outlooks: dict[tuple[str, ...], Outlook] = field(default_factory=dict)
    _planners: dict[tuple[str, ...], Planner] = field(default_factory=dict)
    _options: KnownOptions = field(default_factory=KnownOptions)
    _plans: LentPlans = field(default_factory=LentPlans)

    def know(self, changes: Sequence[StepChange], trace: Trace, costs: CostTable) -> None:
        """Remember what was captured elsewhere."""
        self._traces[_key(changes)] = (trace, costs)

    def unplanned(self, changes: Sequence[StepChange]) -> Way | None:
        """Return the step with changes and without a plan; None if they cannot be made."""
        if (known := self._unplanned.get(_key(changes))) is not None:
            return known
        found = self._captured(changes)
        if found is None:
            return None
        trace, costs = found
        timeline = simulate(trace)
        memory = StepMemory(timeline, costs.device, self._allocator(changes))
        reserve = promised_peak(trace, timeline, has_regions=False) - timeline.peak_bytes
        needed = memory.smallest_bytes + reserve + self._taken(costs)
        peak = timeline.peak_bytes + reserve
        times = schedule(trace, costs)
        parts = StepParts.of(times, runs_of_ops(times, repeats_of(changes)))
        self._outlooks[_key(changes)] = Outlook(peak, needed, parts, least_planned_bytes(trace))
        way = self._unplanned[_key(changes)] = _way(changes, times, peak, needed)
        return way

    def is_captured(self, changes: Sequence[StepChange]) -> bool:
        """Whether the step with changes has been captured whole, or cannot be."""
        return _key(_own(changes)) in self._traces

    def outlook(self, changes: Sequence[StepChange]) -> Outlook | None:
        """Return what the step with changes needs without a plan: worked out, or captured if it has to be.

        None if the changes cannot be made. A setting of the allocator counts only if it is captured.
        """
        key, own = _key(changes), _own(changes)
        if key not in self._outlooks and not self.is_captured(changes) and self.shallow is not None:
            alone = all(change.cluster is None for change in own)
            worked_out = self._outlooks.get(_key(own)) or (self.shallow.outlook(own) if alone else None)
            if worked_out is not None:
                self._outlooks[key] = self._outlooks[_key(own)] = worked_out
        if key not in self._outlooks and self.unplanned(changes) is None:
            return None
        return self._outlooks[key]

    def known_outlook(self, changes: Sequence[StepChange]) -> Outlook | None:
        """Return what is known of the step with changes so far."""
        return self._outlooks.get(_key(changes))

    def least_planned_seconds(self, changes: Sequence[StepChange]) -> float:
        """Return what a step may take at least with a plan, by those of steps with the same forward."""
        outlook = self._outlooks[_key(changes)]
        if not self._has_same_forward(changes):
            return outlook.step_seconds
        captured = self._traces.get(_key(_own(changes)))
        budget = self.budget_bytes - (self._taken(captured[1]) if captured is not None else 0)
        added = self._plans.least_added_seconds(int(outlook.peak_bytes) - budget)
        return outlook.step_seconds + _LEAST_ADDED * added

    def _has_same_forward(self, changes: Sequence[StepChange]) -> bool:
        """Whether the operators of forward are those of the step as it is."""
        captured = self._traces.get(_key(_own(changes)))
        if captured is None:
            return self.shallow is not None and self.shallow.has_same_forward(_own(changes))
        base = self._captured(())
        return base is not None and forward_ops(base[0]) == forward_ops(captured[0])

    def planned(
        self, changes: Sequence[StepChange], seconds_limit: float, *, anew: bool = True
    ) -> Way | None:
        """Return the step with changes and the fastest plan that fits; None if none does.

        If it is not to be planned anew, only plans are tried that were made for other steps.
        """
        found = self._captured(changes)
        if found is None:
            return None
        taken = self._taken(found[1])
        if least_planned_bytes(found[0]) > self.budget_bytes - taken:
            return None
        budget = self.budget_bytes - taken
        certified = self._borrowed(changes, *found, budget)
        if certified is None and anew:
            certified = self._planned(changes, *found, budget, seconds_limit)
        if certified is None or not certified.fits:
            return None
        plan = certified.promised()
        kept = plan if plan.regions else None
        return _way(changes, certified.times, plan.peak_bytes, plan.memory_bytes + taken, kept)

    def _borrowed(
        self, changes: Sequence[StepChange], trace: Trace, costs: CostTable, budget_bytes: int
    ) -> Certified | None:
        """Return a plan that was made for a like step, if it does as well here."""
        if _key(_own(changes)) in self._planners:
            return None
        step = Unplanned.of(trace, costs, self._allocator(changes))
        return self._plans.borrowed(step, budget_bytes, _link(costs))

    def _planned(
        self,
        changes: Sequence[StepChange],
        trace: Trace,
        costs: CostTable,
        budget_bytes: int,
        seconds_limit: float,
    ) -> Certified:
        """Return the fastest plan for this step, and keep it for others."""
        planner = self._planner(changes, trace, costs).with_allocator(self._allocator(changes))
        found = planner.plan(budget_bytes, seconds_limit=seconds_limit)
        if found.fits:
            self._plans.remember(found)
        return found

    def _planner(self, changes: Sequence[StepChange], trace: Trace, costs: CostTable) -> Planner:
        """Return the planner of a captured step, which all settings of the allocator have in common."""
        key = _key(_own(changes))
        if key not in self._planners:
            while len(self._planners) >= _MOST_PLANNERS:
                self._planners.pop(next(iter(self._planners)))
            self._planners[key] = Planner(
                trace, costs, self.allocator, _link(costs), _GAP_SHARE, self._options
            )
        return self._planners[key]

    def _taken(self, costs: CostTable) -> int:
        """Return what communication takes of the memory that the budget is of."""
        return 0 if self.budget_for is None else max(self.budget_bytes - self.budget_for(costs.device), 0)

    def least_seconds(self, changes: Sequence[StepChange]) -> dict[str, float]:
        """Return what a step takes at least with a change, by its name, whatever else is changed.

        Nothing overlaps with what is copied over the link; and where no other format of numbers is offered,
        forward and backward take no less than they do.
        """
        found = self._captured(())
        assert found is not None, "the step as it is"
        trace, costs = found
        seconds = schedule(trace, costs).phase_seconds
        computes = _LEAST_COMPUTED * (seconds["forward"] + seconds["backward"])
        computes *= all(change.kind != "dtype" for change in changes)
        copied = [(change.name, change.least_copied_bytes) for change in changes if change.least_copied_bytes]
        return {name: link_seconds(costs.device, size) + computes for name, size in copied}

    def fits(self, way: Way) -> bool:
        """Whether it runs within the budget."""
        return way.memory_bytes <= self.budget_bytes

    def _captured(self, changes: Sequence[StepChange]) -> tuple[Trace, CostTable] | None:
        own = _own(changes)
        key = _key(own)
        if key not in self._traces:
            self._traces[key] = self.capture(own)
        return self._traces[key]

    def _allocator(self, changes: Sequence[StepChange]) -> AllocatorOptions | None:
        expandable = any(change.made.value == EXPANDABLE for change in changes)
        if self.allocator is None or not expandable:
            return self.allocator
        return replace(self.allocator, expandable_segments=True)


def _link(costs: CostTable) -> HostLink | None:
    # A CPU computes in the host's memory: there is nowhere else to copy to.
    return HostLink.of(costs.device) if costs.device.pcie_bytes_per_second else None


def _own(changes: Sequence[StepChange]) -> list[StepChange]:
    """Return the changes of the step itself: the allocator's setting is not one."""
    return [change for change in changes if not change.is_setting]


def _key(changes: Sequence[StepChange]) -> tuple[str, ...]:
    return tuple(sorted(change.name for change in changes))


def _way(
    changes: Sequence[StepChange],
    times: Schedule,
    peak_bytes: int,
    memory_bytes: int,
    plan: Plan | None = None,
) -> Way:
    return Way(
        target=times.trace.target,
        device=times.costs.device.name,
        changes=tuple(change.made for change in changes),
        plan=plan,
        peak_bytes=peak_bytes,
        memory_bytes=memory_bytes,
        step_seconds=float((times.op_seconds * runs_of_ops(times, repeats_of(changes))).sum()),
        samples=_times(times.trace.samples, changes),
        tokens=_times(times.trace.tokens, changes),
    )


def _times(count: int | None, changes: Sequence[StepChange]) -> int | None:
    """Return the samples or tokens of the whole step, of which two passes, or one copy, were captured."""
    repeats, copies = repeats_of(changes), max((change.copies for change in changes), default=1)
    if count is None:
        return None
    return count * copies if repeats == 1 else count * copies * repeats // CAPTURED_PASSES
