"""The data of the program over modules, read off a trace: who may be a unit, and what each stretch needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from trainfit.planning.effects import effect_of
from trainfit.planning.model_calls import candidate_calls
from trainfit.planning.modules.milp import ModuleProblem, ModuleUnit, Stretch
from trainfit.planning.modules.policy import optimal_policy
from trainfit.planning.modules.sac_stats import (
    SacStats,
    TradeOff,
    choice_of,
    only_saved,
    sac_stats,
    trade_off,
)
from trainfit.planning.modules.sharding import STATES
from trainfit.planning.regions import RegionGraph, region_graph
from trainfit.planning.rewrite import rewritten
from trainfit.traces.simulate import Timeline, simulate
from trainfit.traces.trace import CATEGORIES, Trace


@dataclass(frozen=True)
class Candidate:
    """A module call that may be a unit, with its statistics; calls that are alike share one object."""

    region: RegionGraph
    stats: SacStats


@dataclass(frozen=True)
class Reading:
    """One way to count what a unit stores: the program, and the statistics that its shares refer to.

    PyTorch's formulation counts everything that is stored. What nobody needs is not held, though, so that
    counting only what autograd keeps is the other extreme: no plan does with less.
    """

    problem: ModuleProblem
    stats: tuple[SacStats, ...]
    """Of each unit."""

    def with_working_sets(self, rebuilt_bytes: Sequence[int]) -> Reading:
        """Return the same with what rebuilding each unit needs."""
        units = [replace(unit, rebuilt_bytes=size) for unit, size in zip(self.problem.units, rebuilt_bytes)]
        return replace(self, problem=replace(self.problem, units=units))


def readings(trace: Trace, candidates: Sequence[Candidate], processes: int) -> tuple[Reading, Reading]:
    """Return the two readings: everything that is stored counts, or only what autograd keeps."""
    everything = tuple(candidate.stats for candidate in candidates)
    alike = {stats: only_saved(stats) for stats in set(everything)}
    saved = tuple(alike[stats] for stats in everything)
    timeline = simulate(trace)
    found: list[Reading] = []
    for stats in (everything, saved):
        curves = {one: trade_off(one) for one in set(stats)}
        units = [_unit(trace, candidates, number, curves[one]) for number, one in enumerate(stats)]
        found.append(Reading(ModuleProblem(units, _stretches(timeline, units), processes), stats))
    return found[0], found[1]


def candidates_of(trace: Trace, seconds: list[float], allowed: set[int]) -> list[Candidate]:
    """Return the calls that may be units, each stretch of ops once; alike ones share their statistics."""
    alike: dict[SacStats, SacStats] = {}
    seen: set[tuple[int, int]] = set()
    found: list[Candidate] = []
    for number in candidate_calls(trace):
        call = trace.calls[number]
        if call.module not in allowed or (call.body.start, call.body.stop) in seen:
            continue
        region = region_graph(trace, number, seconds)
        # A call whose backward follows at once is never away: checkpointing it frees nothing.
        if region is None or region.end >= region.backward_start:
            continue
        if not any(group.needed and group.bytes for group in region.groups):
            continue
        stats = sac_stats(trace, region, seconds)
        found.append(Candidate(region, alike.setdefault(stats, stats)))
        seen.add((region.start, region.end))
    return found


def _unit(trace: Trace, candidates: Sequence[Candidate], number: int, curve: TradeOff) -> ModuleUnit:
    region = candidates[number].region
    outer: set[int] = set()
    call = region.call
    while (call := trace.calls[call].parent) >= 0:
        outer.add(call)
    around = tuple(other for other, candidate in enumerate(candidates) if candidate.region.call in outer)
    rebuilt_until, held = trace.calls[region.call].backward_end, _held_bytes(trace, region)
    return ModuleUnit(around, region.end, region.backward_start, curve, held, rebuilt_until)


def _held_bytes(trace: Trace, region: RegionGraph) -> int:
    """Return the inputs that a unit keeps alive for its recomputation and that nobody else does."""
    ends = ((number, trace.storages[number].end) for number in region.inputs)
    gone = [number for number, end in ends if end is not None and end <= region.backward_start]
    return sum(trace.occupied_bytes[number] for number in gone)


def rebuilt_bytes(trace: Trace, candidates: Sequence[Candidate]) -> list[int]:
    """Return the working set of each unit; of those that are alike one is replayed."""
    one_of_a_kind = {candidate.stats: candidate for candidate in reversed(candidates)}
    found = {stats: _rebuilt_bytes(trace, candidate) for stats, candidate in one_of_a_kind.items()}
    return [found[candidate.stats] for candidate in candidates]


def _rebuilt_bytes(trace: Trace, candidate: Candidate) -> int:
    """Return what backward of a unit that stores nothing needs more than without checkpointing."""
    region = candidate.region
    policy = optimal_policy(candidate.stats, 0.0)
    effect = effect_of(trace, region, choice_of(region, policy))
    after = simulate(rewritten(trace, [effect]))
    call, moved = trace.calls[region.call], after.trace.calls[region.call]
    rebuilding = after.most_bytes(moved.backward_start - len(effect.segment), moved.backward_end)
    return max(rebuilding - simulate(trace).most_bytes(call.backward_start, call.backward_end), 0)


def _stretches(timeline: Timeline, units: Sequence[ModuleUnit]) -> list[Stretch]:
    """Return the worst op of every stretch in which the same units are away."""
    ops = len(timeline.trace.ops)
    states = timeline.by_category[[CATEGORIES.index(name) for name in STATES]].sum(axis=0)
    during = timeline.used_bytes
    edges = sorted({0, ops, *(unit.away_from for unit in units), *(unit.away_until for unit in units)})
    found: list[Stretch] = []
    for first, last in pairwise(edges):
        op = first + int(during[first:last].argmax())
        found.append(Stretch(op, int(states[op]), int(during[op] - states[op])))
    return found
