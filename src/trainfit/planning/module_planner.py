"""Plans by modules: AC units chosen by `module_milp`, their ops by `module_policy`, certified by replay.

`world_size` divides parameters, gradients and optimizer state, in the model and in the replay alike: the peak
is that of one of so many processes, without what FSDP gathers for the module that runs.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from trainfit.costs.schedule import schedule
from trainfit.costs.table import CostTable
from trainfit.errors import OptionError
from trainfit.planning import certify
from trainfit.planning.certify import Unplanned
from trainfit.planning.effects import effect_of
from trainfit.planning.module_milp import ModuleProblem, ModuleSolution, ModuleUnit, Moment
from trainfit.planning.module_policy import optimal_policy
from trainfit.planning.module_sac_stats import (
    SacStats,
    TradeOff,
    choice_of,
    only_saved,
    sac_stats,
    trade_off,
)
from trainfit.planning.regions import RegionGraph, candidate_calls, region_graph
from trainfit.planning.rewrite import rewritten
from trainfit.planning.solve import Infeasible
from trainfit.plans import Plan
from trainfit.simulate import Timeline, simulate
from trainfit.store import content_hash
from trainfit.trace import CATEGORIES, Trace
from trainfit.units import format_bytes

_STATES = ("parameter", "gradient", "optimizer_state")
"""What data-parallel processes divide among themselves."""
_MOST_ROUNDS = 8
_GAP_SHARE = 0.001
"""Of the step's time, for the program over modules; storing whole ops adds to it."""


@dataclass
class ModulePlanner:
    """Everything about one trace that does not depend on the budget; solved for as many as wanted."""

    whole_trace: Trace
    costs: CostTable
    ac_units: Sequence[str] | None = None
    """Names of the modules that may be checkpointed; without them, all that are not leaves."""
    fsdp_units: Sequence[str] = ()
    """Names of the modules that FSDP shards as a unit: no AC unit lies around one."""
    world_size: int = 1
    trace: Trace = field(init=False)
    """The step of one process."""
    step: Unplanned = field(init=False)
    problem: ModuleProblem = field(init=False)
    baseline_peak_bytes: int = field(init=False)
    baseline_seconds: float = field(init=False)
    warnings: tuple[str, ...] = ()
    _candidates: list[_Candidate] = field(default_factory=list)
    _policies: dict[tuple[int, float], list[int]] = field(default_factory=dict)
    _timelines: dict[Plan, Timeline] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the names, and read the statistics of every module off the trace."""
        if self.world_size < 1:
            raise OptionError(f"the world size must be at least 1, got {self.world_size}.")
        allowed = _allowed(self.whole_trace, self.ac_units, self.fsdp_units)
        self.trace = divided(self.whole_trace, self.world_size)
        timeline = simulate(self.trace)
        times = schedule(self.trace, self.costs)
        self.baseline_peak_bytes = timeline.peak_bytes
        self.baseline_seconds = times.step_seconds
        self.step = Unplanned(
            self.trace,
            self.costs,
            content_hash(self.whole_trace),
            timeline.peak_bytes,
            times.step_seconds,
            self.world_size,
        )
        self._candidates = _candidates(self.trace, times.marginal_seconds.tolist(), allowed)
        units = _units(self.trace, self._candidates)
        self.problem = ModuleProblem(units, _moments(simulate(self.whole_trace), units), self.world_size)
        if self.world_size > 1:
            self.warnings += (_what_is_divided(self.whole_trace, self.fsdp_units, self.world_size),)

    def plan(self, budget_bytes: int, *, seconds_limit: float = 30.0) -> Plan | Infeasible:
        """Return the fastest certified plan within the budget, or the one with the smallest peak."""
        if self.baseline_peak_bytes <= budget_bytes:
            return self._certified({}, budget_bytes, 0.0)
        deadline = time.monotonic() + seconds_limit
        bound = self._solve(self._relaxed, budget_bytes, deadline).bound_seconds
        found = self._solve(self.problem, budget_bytes, deadline)
        plan = self._certified(found.shares, budget_bytes, bound)
        modelled = budget_bytes
        too_small, too_large = 0, self.baseline_peak_bytes
        for _ in range(_MOST_ROUNDS if found.feasible else 0):
            if plan.peak_bytes <= budget_bytes:
                return plan
            found = self._solve(self._with_rebuilding, modelled, deadline)
            if found.feasible:
                plan = self._certified(found.shares, budget_bytes, bound)
                # The replay is the truth: ask the model for as much less as it was wrong by.
                too_large, modelled = modelled, modelled - max(plan.peak_bytes - budget_bytes, 0)
            else:
                too_small = modelled
            if modelled <= too_small:
                modelled = (too_small + too_large) // 2
        smallest = self.smallest(budget_bytes, bound_seconds=bound)
        return smallest if smallest.peak_bytes <= budget_bytes else Infeasible(budget_bytes, smallest)

    def smallest(
        self, budget_bytes: int = 0, *, bound_seconds: float = 0.0, seconds_limit: float = 10.0
    ) -> Plan:
        """Return the plan with the smallest peak that was found."""
        found = [
            self._certified(solution.shares, budget_bytes, bound_seconds)
            for problem in (self.problem, self._with_rebuilding)
            for solution in [problem.smallest_peak(seconds_limit=seconds_limit)]
        ]
        return min(found, key=lambda plan: plan.peak_bytes)

    def _solve(self, problem: ModuleProblem, budget_bytes: int, deadline: float) -> ModuleSolution:
        return problem.solve(
            budget_bytes,
            seconds_limit=max(deadline - time.monotonic(), 1.0),
            gap_seconds=_GAP_SHARE * self.baseline_seconds,
        )

    @cached_property
    def _relaxed(self) -> ModuleProblem:
        """The problem in which every plan needs at most what it really needs, so that its bound holds."""
        relaxed: dict[int, TradeOff] = {}
        for candidate in self._candidates:
            if id(candidate.stats) not in relaxed:
                relaxed[id(candidate.stats)] = trade_off(only_saved(candidate.stats))
        units = [
            replace(unit, curve=relaxed[id(candidate.stats)])
            for unit, candidate in zip(self.problem.units, self._candidates)
        ]
        return replace(self.problem, units=units)

    @cached_property
    def _with_rebuilding(self) -> ModuleProblem:
        """The problem with the working sets of units that store nothing; modules that are alike done once."""
        rebuilt: dict[int, int] = {}
        for candidate in self._candidates:
            if id(candidate.stats) not in rebuilt:
                rebuilt[id(candidate.stats)] = _rebuilt_bytes(self.trace, candidate)
        units = [
            replace(unit, rebuilt_bytes=rebuilt[id(candidate.stats)])
            for unit, candidate in zip(self.problem.units, self._candidates)
        ]
        return replace(self.problem, units=units)

    def timeline_of(self, plan: Plan) -> Timeline:
        """Return the memory of the step with a plan that this planner made."""
        return self._timelines[plan]

    def _certified(self, shares: dict[int, float], budget_bytes: int, bound_seconds: float) -> Plan:
        effects = [
            effect_of(self.trace, candidate.region, choice_of(candidate.region, policy))
            for number, share in shares.items()
            for candidate in [self._candidates[number]]
            for policy in [self._policy(candidate, share)]
        ]
        plan, timeline = certify.certified(
            self.step, effects, budget_bytes=budget_bytes, bound_seconds=bound_seconds, method="modules"
        )
        self._timelines[plan] = timeline
        return plan

    def _policy(self, candidate: _Candidate, share: float) -> list[int]:
        """Return the policy of a module that discards a share; modules that are alike share one."""
        key = (id(candidate.stats), round(share, 9))
        if key not in self._policies:
            self._policies[key] = optimal_policy(candidate.stats, 1.0 - share)
        return self._policies[key]


@dataclass(frozen=True)
class _Candidate:
    region: RegionGraph
    stats: SacStats
    curve: TradeOff


def divided(trace: Trace, world_size: int) -> Trace:
    """Return the step of one of several processes that divide parameters, gradients and optimizer state."""
    if world_size == 1:
        return trace

    def part(size: int) -> int:
        return -(-size // world_size)

    return replace(
        trace,
        storages=tuple(
            replace(
                storage,
                bytes=part(storage.bytes),
                resizes=tuple((when, part(size)) for when, size in storage.resizes),
            )
            if storage.category in _STATES
            else storage
            for storage in trace.storages
        ),
    )


def _candidates(trace: Trace, seconds: list[float], allowed: set[int]) -> list[_Candidate]:
    """Return the calls that may be units, each stretch of ops once; alike ones share their statistics."""
    alike: dict[SacStats, tuple[SacStats, TradeOff]] = {}
    seen: set[tuple[int, int]] = set()
    found: list[_Candidate] = []
    for number in candidate_calls(trace):
        call = trace.calls[number]
        if call.module not in allowed or (call.forward_start, call.forward_end) in seen:
            continue
        region = region_graph(trace, number, seconds)
        # A call whose backward follows at once is never away: checkpointing it frees nothing.
        if region is None or region.end >= region.backward_start:
            continue
        if not any(group.needed and group.bytes for group in region.groups):
            continue
        stats = sac_stats(trace, region, seconds)
        if stats not in alike:
            alike[stats] = (stats, trade_off(stats))
        found.append(_Candidate(region, *alike[stats]))
        seen.add((region.start, region.end))
    return found


def _units(trace: Trace, candidates: list[_Candidate]) -> list[ModuleUnit]:
    number_of = {candidate.region.call: number for number, candidate in enumerate(candidates)}
    units: list[ModuleUnit] = []
    for candidate in candidates:
        region = candidate.region
        around: list[int] = []
        call = region.call
        while (call := trace.calls[call].parent) >= 0:
            if call in number_of:
                around.append(number_of[call])
        units.append(
            ModuleUnit(
                around=tuple(around),
                away_from=region.end,
                away_until=region.backward_start,
                curve=candidate.curve,
                held_bytes=_held_bytes(trace, region),
                rebuilt_until=trace.calls[region.call].backward_end,
            )
        )
    return units


def _held_bytes(trace: Trace, region: RegionGraph) -> int:
    """Return the inputs that a unit keeps alive for its recomputation and that nobody else does."""
    inputs = (trace.storages[number] for number in region.inputs)
    return sum(s.bytes for s in inputs if s.end is not None and s.end <= region.backward_start)


def _rebuilt_bytes(trace: Trace, candidate: _Candidate) -> int:
    """Return what backward of a unit that stores nothing needs more than without checkpointing."""
    region = candidate.region
    policy = optimal_policy(candidate.stats, 0.0)
    effect = effect_of(trace, region, choice_of(region, policy))
    before, after = simulate(trace), simulate(rewritten(trace, [effect]))
    call, moved = trace.calls[region.call], after.trace.calls[region.call]
    rebuilding = moved.backward_start - len(effect.segment)
    return max(
        _most_bytes(after, rebuilding, moved.backward_end)
        - _most_bytes(before, call.backward_start, call.backward_end),
        0,
    )


def _most_bytes(timeline: Timeline, first: int, last: int) -> int:
    during = (
        np.asarray(timeline.live_bytes[first:last], dtype=np.int64) + timeline.workspace_bytes[first:last]
    )
    return int(during.max(initial=0))


def _moments(timeline: Timeline, units: Sequence[ModuleUnit]) -> list[Moment]:
    """Return the worst op of every stretch in which the same units are away."""
    ops = len(timeline.trace.ops)
    states = timeline.by_category[[CATEGORIES.index(name) for name in _STATES]].sum(axis=0)
    during = np.asarray(timeline.live_bytes, dtype=np.int64) + timeline.workspace_bytes
    edges = sorted({0, ops, *(unit.away_from for unit in units), *(unit.away_until for unit in units)})
    found: list[Moment] = []
    for first, last in pairwise(edges):
        op = first + int(during[first:last].argmax())
        found.append(Moment(op, int(states[op]), int(during[op] - states[op])))
    return found


def _allowed(trace: Trace, ac_units: Sequence[str] | None, fsdp_units: Sequence[str]) -> set[int]:
    """Return the modules that may be AC units; refuse names that cannot be meant."""
    parents = {module.parent for module in trace.modules}
    above = {
        outer
        for name in fsdp_units
        for module in named(trace, name, "FSDP unit")
        for outer in _around(trace, module)
    }
    if ac_units is None:
        return {number for number in range(len(trace.modules)) if number in parents and number not in above}
    found: set[int] = set()
    for name in ac_units:
        modules = named(trace, name, "AC unit")
        inner = [module for module in modules if module in parents]
        if not inner:
            raise OptionError(
                f"AC unit {name!r} has no modules inside; this solver checkpoints modules that do. "
                f"Name the module around it{_parent_hint(trace, modules[0])}, or use the regions solver."
            )
        for module in inner:
            if module in above:
                raise OptionError(
                    f"AC unit {name!r} lies around an FSDP unit; checkpoint the FSDP unit itself or a module "
                    "inside of it, because FSDP gathers parameters again for each of its units."
                )
        found.update(inner)
    return found


def named(trace: Trace, name: str, role: str) -> list[int]:
    """Return the modules with this name; `*` is any one part of it, and the root's name may be left out."""
    pattern = name.split(".")
    found = [
        number
        for number, module in enumerate(trace.modules)
        for parts in [module.name.split(".")]
        if _matches(pattern, parts) or _matches(pattern, parts[1:])
    ]
    if not found:
        names = [module.name.partition(".")[2] for module in trace.modules if "." in module.name]
        near = difflib.get_close_matches(name, names, n=3) or names[:3]
        raise OptionError(
            f"{role} {name!r} is not in the model; it has modules such as {', '.join(near)}. "
            "`trainfit estimate` lists them, and blocks.* means all that are numbered."
        )
    return found


def _matches(pattern: list[str], parts: list[str]) -> bool:
    return len(pattern) == len(parts) and all(a in ("*", b) for a, b in zip(pattern, parts))


def _parent_hint(trace: Trace, module: int) -> str:
    parent = trace.modules[module].parent
    return f", {trace.modules[parent].name}" if parent >= 0 else ""


def _around(trace: Trace, module: int) -> list[int]:
    found: list[int] = []
    while (module := trace.modules[module].parent) >= 0:
        found.append(module)
    return found


def _what_is_divided(trace: Trace, fsdp_units: Sequence[str], world_size: int) -> str:
    """Say what a world size changes here, and what it does not."""
    sharded = {module for name in fsdp_units for module in named(trace, name, "FSDP unit")}
    gathered: dict[int, int] = {}
    for number, module in enumerate(trace.modules):
        unit = next((outer for outer in (number, *_around(trace, number)) if outer in sharded), -1)
        gathered[unit] = gathered.get(unit, 0) + module.parameter_bytes
    largest = max(gathered.values(), default=0)
    return (
        f"the figures are for one of {world_size} processes: parameters, gradients and optimizer state are "
        f"divided evenly. Not in them: what FSDP gathers for the unit that runs (the largest has "
        f"{format_bytes(largest)} of parameters, and the next one may be gathered ahead), its gradients "
        "before they are reduced, and the time of communication"
    )
