"""The master problem: choose regions and a point of each one's curve, so that memory fits everywhere.

Sets        regions r (module calls), points k of each region's curve, buckets b of the step's time
Data        seconds[r,k]     what the device needs to compute it again (on a CPU: all that it adds)
            host[r,k]        what the host needs for that, and to run the region under a plan
            spare            how long the host is idle in a step without a plan
            peak[b]          most bytes in the bucket if nothing is checkpointed
            inside[r,k,b]    most bytes in a bucket that lies in the region's own forward or backward
            away[r,k,b]      change at b of the bytes alive between its forward and its backward
            share[r,k,w]     of the link to the host, where its copies run at the moment w
Variables   chosen[r,k]      whether the region is checkpointed with this point (binary)
            waiting          how long the device waits for the host's additional work
            most             the peak, at most the budget
            carried[b]       sum of `away` until b over the regions that are between forward and backward
Constraints one_point        each region has at most one point, and no region lies within a chosen one
            one_link         what is copied at any moment takes no more than the whole link
            host_keeps_up    the host's additional work, less the device's, is at most spare plus waiting
            carry            carried[b] follows from the bucket before
            fits             peak or inside, plus carried, is at most `most` in every bucket
Objective   minimise seconds and waiting, with a very small weight on `most` to break ties (or, to find the
            smallest reachable peak, `most` alone)

Buckets end where a region's forward or backward begins or ends, and where it changes anything in between, so
that within a bucket only the region that covers it changes anything: all sums are exact.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from trainfit.planning.byte_changes import byte_changes
from trainfit.planning.effects import Effect
from trainfit.planning.highs import Answer, Program, Term
from trainfit.planning.link_shares import link_rows
from trainfit.traces.simulate import Timeline

Bytes = NDArray[np.int64]

_GAP_SHARE = 0.003
"""Of the seconds that a plan adds: one that is this close to the best possible is good enough."""
TIE_SHARE = 1e-6
"""Of the seconds of all options: what the whole budget may weigh against time."""
MIB = float(1 << 20)
"""Bytes are counted in MiB inside the solver, whose tolerances are made for figures of this size."""


@dataclass(frozen=True)
class Option:
    """One point of one region's curve."""

    region: int
    effects: tuple[Effect, ...]
    """One for each pass over the model in the step: they are all checkpointed, or none."""
    seconds: float
    host_seconds: float = 0.0


@dataclass
class Solution:
    """What the solver chose, and what it proved."""

    options: list[int]
    seconds: float
    bound: float
    feasible: bool
    optimal: bool


@dataclass
class MasterProblem:
    """The data of the problem; solved for as many budgets as wanted."""

    options: list[Option]
    exclusive: list[list[int]]
    """Options of which at most one may be chosen."""
    spare_seconds: float = np.inf
    begins: list[int] = field(default_factory=list)
    """For each bucket: the op that it begins with."""
    peak: list[int] = field(default_factory=list)
    covering: list[dict[int, int]] = field(default_factory=list)
    """For each bucket: option -> most bytes in it if that option is chosen."""
    entering: list[dict[int, int]] = field(default_factory=list)
    """For each bucket: option -> by how much `carried` changes at its beginning."""
    freed: list[int] = field(default_factory=list)
    """For each option: what is no longer alive between forward and backward."""
    link_rows: list[dict[int, float]] = field(default_factory=list)
    """Options that copy at the same time, and what share of the link to the host each takes."""

    def solve(
        self, budget_bytes: int, *, seconds_limit: float, gap_seconds: float, link_is_shared: bool = True
    ) -> Solution:
        """Return a choice whose modelled peak is within the budget.

        It adds at most `gap_seconds` more than the best, or, if that is not 0, a small share of what it adds.
        Among plans that take the same time it prefers a small peak. If the link is not shared, what copies
        has all of it.
        """
        program = Program()
        for option in self.options:
            program.binary(option.seconds)
        whole = sum(option.seconds for option in self.options)
        tie_break = TIE_SHARE * whole / max(budget_bytes / MIB, 1.0)
        self.constrain(program, program.continuous(0.0, budget_bytes / MIB, tie_break))
        for shares in [] if link_is_shared else self.link_rows:
            program.at_most("link_alone", [(number, 1.0) for number in shares], 1.0)
        if self.spare_seconds < np.inf:
            waiting = program.continuous(0.0, np.inf, 1.0)
            more = [(n, option.host_seconds - option.seconds) for n, option in enumerate(self.options)]
            program.at_most("host_keeps_up", [*more, (waiting, -1.0)], self.spare_seconds)
        answer = program.minimise(
            seconds_limit=seconds_limit, gap=gap_seconds, gap_share=_GAP_SHARE if gap_seconds else 0.0
        )
        return self._solution(answer, bound=answer.bound - TIE_SHARE * whole)

    def smallest_peak(self, *, seconds_limit: float) -> Solution:
        """Return a choice with about the smallest modelled peak."""
        program = Program()
        for _ in self.options:
            program.binary()
        self.constrain(program, program.continuous(0.0, np.inf, 1.0))
        gap = 1e-3 * max(self.peak) / MIB
        return self._solution(program.minimise(seconds_limit=seconds_limit, gap=gap), bound=0.0)

    def constrain(self, program: Program, most: int, others: Sequence[list[Term]] | None = None) -> None:
        """Add the constraints; memory is nowhere above the variable `most`.

        `others` says for each bucket what other choices than regions change in it.
        """
        for group in self.exclusive:
            program.at_most("one_point", [(number, 1.0) for number in group], 1.0)
        for shares in self.link_rows:
            program.at_most("one_link", list(shares.items()), 1.0)
        before: list[Term] = []
        others = others or [[] for _ in self.peak]
        for peak, covering, entering, more in zip(self.peak, self.covering, self.entering, others):
            carried = program.continuous(-np.inf, np.inf)
            changes = [(number, -change / MIB) for number, change in entering.items()]
            program.equal("carry", [(carried, 1.0), *before, *changes], 0.0)
            inside = [(number, (size - peak) / MIB) for number, size in covering.items()]
            program.at_most("fits", [(carried, 1.0), *inside, *more, (most, -1.0)], -peak / MIB)
            before = [(carried, -1.0)]

    def seconds_of(self, chosen: Sequence[int]) -> float:
        """Return what options add to the step, as the problem sees it."""
        return self.added_by([self.options[number] for number in chosen])

    def added_by(self, options: Sequence[Option]) -> float:
        """Return what options add to the step, as the problem sees it."""
        seconds = sum(option.seconds for option in options)
        return self.added_seconds(seconds, sum(option.host_seconds for option in options))

    def added_seconds(self, seconds: float, host_seconds: float) -> float:
        """Return what so much more work of the device and of the host adds to the step."""
        return seconds + max(host_seconds - seconds - self.spare_seconds, 0.0)

    def _solution(self, answer: Answer, *, bound: float) -> Solution:
        if not answer.feasible:
            return Solution([], 0.0, max(bound, 0.0), feasible=False, optimal=answer.proven)
        chosen = [number for number in range(len(self.options)) if answer.values[number] > 0.5]
        seconds = self.seconds_of(chosen)
        return Solution(chosen, seconds, min(max(bound, 0.0), seconds), feasible=True, optimal=answer.proven)


def build(
    timeline: Timeline,
    options: list[Option],
    exclusive: list[list[int]],
    spare_seconds: float = np.inf,
    other_edges: Collection[int] = (),
) -> MasterProblem:
    """Work the data of the master problem out of the options' effects; buckets end at other edges, too."""
    during = timeline.used_bytes
    ops = len(during)
    changes = [
        (number, effect, _steps(timeline, effect))
        for number, option in enumerate(options)
        for effect in option.effects
    ]
    found = {0, ops, *other_edges}
    for _, effect, steps in changes:
        found |= {effect.region.start, effect.region.end, effect.insert, _last(effect, ops)}
        found.update(_away(effect, steps))
    edges = sorted(found)
    problem = MasterProblem(options, exclusive, spare_seconds)
    problem.begins = edges[:-1]
    problem.peak = [timeline.most_bytes(first, last) for first, last in pairwise(edges)]
    problem.covering = [{} for _ in problem.peak]
    problem.entering = [{} for _ in problem.peak]
    problem.freed = [0] * len(options)
    problem.link_rows = link_rows(timeline.trace, [option.effects for option in options])
    for number, effect, steps in changes:
        change = _summed(steps, ops)
        after = during + change
        region = effect.region
        for first, last in ((region.start, region.end), (effect.insert, _last(effect, ops))):
            for bucket in range(bisect_left(edges, first), bisect_left(edges, last)):
                problem.covering[bucket][number] = int(after[edges[bucket] : edges[bucket + 1]].max())
        inserted = problem.covering[bisect_left(edges, effect.insert)]
        _add_segment(timeline, effect, change, inserted, number)
        away = _away(effect, steps)
        problem.freed[number] += _most_freed(away)
        for time, step in away.items():
            entering = problem.entering[bisect_left(edges, time)]
            entering[number] = entering.get(number, 0) + step
    return problem


def freed_bytes(timeline: Timeline, option: Option) -> int:
    """Return what is no longer alive between forward and backward if an option is chosen."""
    return sum(_most_freed(_away(effect, _steps(timeline, effect))) for effect in option.effects)


def _most_freed(away: dict[int, int]) -> int:
    """Return the most that is freed at once; what goes to the host is free when the copy is done."""
    return -min(accumulate(away[time] for time in sorted(away)), default=0)


def _away(effect: Effect, steps: dict[int, int]) -> dict[int, int]:
    """Return when the bytes between a region's forward and its backward change, and by how much.

    Mostly once, when forward is over; but an input that would have died on the way is held from then on.
    """
    first, last = effect.region.end, effect.insert
    if first >= last:
        return {}
    found = {first: sum(step for time, step in steps.items() if time <= first)}
    found |= {time: step for time, step in steps.items() if first < time < last and step}
    found[last] = -sum(found.values())
    return found


def _last(effect: Effect, ops: int) -> int:
    """Return the time after which a region changes nothing any more."""
    return min(max(effect.region.release, effect.insert + 1), ops)


def _steps(timeline: Timeline, effect: Effect) -> dict[int, int]:
    """Return at which ops of the original trace the bytes alive change, and by how much."""
    steps: dict[int, int] = {}
    for moment, size in byte_changes(timeline.trace, effect):
        steps[moment.time] = steps.get(moment.time, 0) + size
    return steps


def _summed(steps: dict[int, int], ops: int) -> Bytes:
    """Return by how much the bytes alive at each op of the original trace change."""
    changes = np.zeros(ops + 1, dtype=np.int64)
    changes[list(steps)] = list(steps.values())
    summed: Bytes = np.cumsum(changes[:ops])
    return summed


def _add_segment(
    timeline: Timeline, effect: Effect, change: Bytes, covering: dict[int, int], number: int
) -> None:
    """Let the recomputation count in the bucket that it is inserted before."""
    trace = timeline.trace
    if not effect.segment:
        return
    insert, length = effect.insert, len(effect.segment)
    base = timeline.live_bytes[insert] - sum(trace.occupied_bytes[s] for s in trace.ops[insert].creates)
    base += int(change[insert - 1]) if insert else 0
    steps = np.zeros(length + 1, dtype=np.int64)
    for moment, size in byte_changes(trace, effect):
        if moment.time == insert and moment.position >= 0:
            steps[min(moment.position, length)] += size
    alive = np.cumsum(steps[:length])
    workspaces = [trace.workspace_bytes[trace.ops[op].signature] for op in effect.segment]
    covering[number] = max(covering.get(number, 0), base + int((alive + np.array(workspaces)).max()))
