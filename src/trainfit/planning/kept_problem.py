"""Which units of FSDP stay whole after forward, and what is checkpointed, in one program.

The master problem of regions (`master.py`), with another set of choices and another objective:

Sets        units u of FSDP that could stay whole
Data        held[u,b]        what a kept unit changes in bucket b: its parameters stay there from forward to
                             its backward, and the buffer of its gather is not there
Variables   kept[u]          whether a unit stays whole (binary)
Constraints fits             of the master problem, plus the sum of held[u,b] x kept[u]
            gathered_once    no region that gathers a unit again, as it is around it, if the unit is kept
            follows          queues and what they wait for (`queue_model.py`)
            host_keeps_up    the step takes at least as long as the host is busy with it
Objective   minimise the period of the step, with a very small weight on `most` to break ties

Buckets also end where a unit is emptied, gathered or filled, so that the sums are exact.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from trainfit.planning import master
from trainfit.planning.highs import Answer, Program, Term
from trainfit.planning.kept_units import UnitKeep
from trainfit.planning.master import MasterProblem, Option
from trainfit.planning.queue_model import QueueModel
from trainfit.planning.replay import Replay
from trainfit.traces.trace import Trace


@dataclass(frozen=True)
class JointSolution:
    """What the solver chose, and what it proved."""

    options: list[int]
    kept: list[int]
    """Numbers of units."""
    seconds: float
    """Of the step, as the program sees it."""
    bound: float
    feasible: bool


@dataclass
class JointProblem:
    """The data of the problem; solved for as many budgets as wanted."""

    regions: MasterProblem
    keeps: tuple[UnitKeep, ...]
    queues: QueueModel
    held: list[dict[int, int]]
    """For each bucket: unit -> by how many bytes it changes what is alive if it is kept."""
    conflicts: list[tuple[int, int]]
    """Options and units that do not go together."""
    host_seconds: float
    """How long the host is busy with the step as it is."""
    kept_host_seconds: tuple[float, ...]
    """How much less, with each unit that is kept."""

    @classmethod
    def of(
        cls, step: Replay, options: list[Option], exclusive: list[list[int]], keeps: Sequence[UnitKeep]
    ) -> JointProblem:
        """Work the data out of options and of units."""
        timeline, times = step.timeline, step.times
        trace = timeline.trace
        changes = [_changes(trace, keep) for keep in keeps]
        edges = {time for one in changes for time, _ in one if time < len(trace.ops)}
        regions = master.build(timeline, options, exclusive, other_edges=edges)
        held: list[dict[int, int]] = []
        for begin in regions.begins:
            sums = (sum(size for time, size in one if time <= begin) for one in changes)
            held.append({unit: total for unit, total in enumerate(sums) if total})
        conflicts = [
            (number, unit)
            for number, option in enumerate(options)
            for unit, keep in enumerate(keeps)
            if any(effect.moved.ops.keys() & keep.ops for effect in option.effects)
        ]
        occupied = times.occupied_seconds
        return cls(
            regions,
            tuple(keeps),
            QueueModel.of(times, keeps),
            held,
            conflicts,
            float(occupied.sum()),
            tuple(float(occupied[list(keep.ops)].sum()) for keep in keeps),
        )

    def solve(
        self,
        budget_bytes: int,
        *,
        seconds_limit: float,
        gap_seconds: float,
        kept: Collection[int] | None = None,
    ) -> JointSolution:
        """Return the choice with the shortest step whose modelled peak is within the budget.

        `kept` says which units are, if that is not to be chosen.
        """
        program, problem = Program(), self.regions
        for _ in problem.options:
            program.binary()
        units = [program.binary() for _ in self.keeps]
        whole = sum(option.seconds for option in problem.options)
        tie_break = master.TIE_SHARE * whole / max(budget_bytes / master.MIB, 1.0)
        most = program.continuous(0.0, budget_bytes / master.MIB, tie_break)
        more = [[(units[u], size / master.MIB) for u, size in one.items()] for one in self.held]
        problem.constrain(program, most, more)
        for option, unit in self.conflicts:
            program.at_most("gathered_once", [(option, 1.0), (units[unit], 1.0)], 1.0)
        if kept is not None:
            for unit, column in enumerate(units):
                program.equal("given", [(column, 1.0)], float(unit in kept))
        period = self.queues.write(program, self._added(), units)
        busy = [(n, option.host_seconds) for n, option in enumerate(problem.options)]
        busy += [(column, -seconds) for column, seconds in zip(units, self.kept_host_seconds)]
        program.at_most("host_keeps_up", [*busy, (period, -1.0)], -self.host_seconds)
        answer = program.minimise(seconds_limit=seconds_limit, gap=gap_seconds)
        return self._solution(answer, units, period)

    def _added(self) -> dict[int, list[Term]]:
        """Return what options add to which runs: they are recomputed before an op of backward."""
        found: dict[int, list[Term]] = {}
        for number, option in enumerate(self.regions.options):
            share = option.seconds / len(option.effects)
            for effect in option.effects:
                found.setdefault(self.queues.run_of[effect.insert], []).append((number, share))
        return found

    def _solution(self, answer: Answer, units: list[int], period: int) -> JointSolution:
        if not answer.feasible:
            return JointSolution([], [], 0.0, answer.bound, feasible=False)
        values = answer.values
        return JointSolution(
            [number for number in range(len(self.regions.options)) if values[number] > 0.5],
            [number for number, column in enumerate(units) if values[column] > 0.5],
            values[period],
            answer.bound,
            feasible=True,
        )


def _changes(trace: Trace, keep: UnitKeep) -> list[tuple[int, int]]:
    """Return when a kept unit changes what is alive, and by how much."""
    found: list[tuple[int, int]] = []
    for _, emptied, filled, size in keep.whole:
        found += [(emptied, trace.memory.occupied(size)), (filled, -trace.memory.occupied(size))]
    for number in keep.buffers:
        storage = trace.storages[number]
        found.append((storage.start, -trace.occupied_bytes[number]))
        if storage.end is not None:
            found.append((storage.end, trace.occupied_bytes[number]))
    return found
