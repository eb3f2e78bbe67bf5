"""How long a step takes on queues that wait for each other, as constraints of a linear program.

What is recomputed makes computing longer, and may be hidden behind an exchange that computing would have
waited for; a unit of FSDP that stays whole takes its gather from the queue of its group, and whatever waited
for that goes on earlier. Neither is a sum.

Sets        runs n of ops on one queue, between two places where something waits
Data        seconds[n]       what a run takes without any choice
            more[n,c]        what choice c adds to it; negative for what a kept unit leaves out
            before[n]        runs that are done before n begins: the one before it on its queue, and those
                             that it waits for; of the step before where the trace says so
            dropped[n,m]     kept units, if any, with which n does not wait for m
Variables   end[n]           when a run is done
            period           from the beginning of a step to the beginning of the next
Constraints follows          end[n] >= end[m] + seconds[n] + sum of more[n,c] x chosen[c] for m in before[n],
                             minus `period` where m is of the step before, minus everything if it is dropped
Objective   minimise period

The step is one of many that are alike, so that the period is what each takes. The host, and what ops that run
at once take from each other, are left to the replay.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trainfit.costs.schedule import Schedule
from trainfit.planning.highs import Program, Term
from trainfit.planning.kept_units import UnitKeep


@dataclass(frozen=True, slots=True)
class Wait:
    """A run begins when another is done."""

    run: int
    other: int
    earlier: bool = False
    """Whether the other is of the step before."""
    dropped: frozenset[int] = frozenset()
    """Units with any of which, if they are kept, this is not so."""


@dataclass(frozen=True)
class QueueModel:
    """The runs of one step; what choices change about them is added when it is written down."""

    run_of: tuple[int, ...]
    """For each op of the trace its run."""
    seconds: tuple[float, ...]
    waits: tuple[Wait, ...]
    kept_seconds: tuple[Mapping[int, float], ...]
    """For each unit that can be kept: what its gathers take, by run."""
    most: float
    """More than any run ever waits for another."""

    @classmethod
    def of(cls, times: Schedule, keeps: Sequence[UnitKeep]) -> QueueModel:
        """Cut the ops of a step into runs."""
        trace = times.trace
        total = len(trace.ops)
        awaited = {other % total for op in trace.ops for other in op.waits_for}
        keep_of = {op: number for number, keep in enumerate(keeps) for op in keep.ops}
        run_of: list[int] = []
        current: dict[str, int] = {}
        first: dict[str, int] = {}
        waits: list[Wait] = []
        ended: set[str] = set()
        for number, op in enumerate(trace.ops):
            queue = op.queue
            if queue not in current or op.waits_for or queue in ended:
                run = len(first) + len(waits)
                if queue in current:
                    waits.append(Wait(run, current[queue]))
                first.setdefault(queue, run)
                current[queue] = run
                ended.discard(queue)
            run_of.append(current[queue])
            if number in awaited:
                ended.add(queue)
        count = len(first) + len(waits)
        waits += [Wait(run, current[queue], earlier=True) for queue, run in first.items()]
        for number, one in enumerate(trace.ops):
            for other in one.waits_for:
                ends = (number, other % total)
                dropped = frozenset(keep_of[op] for op in ends if op in keep_of)
                waits.append(Wait(run_of[number], run_of[other % total], other < 0, dropped))
        seconds = np.bincount(run_of, weights=times.device_seconds, minlength=count)
        kept = tuple(_by_run(run_of, times, keep.ops) for keep in keeps)
        most = times.communication_seconds + float(sum(sum(one.values()) for one in kept))
        return cls(tuple(run_of), tuple(seconds.tolist()), tuple(waits), kept, most)

    def write(
        self, program: Program, added: Mapping[int, Iterable[Term]], keep_columns: Sequence[int]
    ) -> int:
        """Add variables and constraints; return the column of the period.

        `added` says for each run which choices, by column, make it longer, and by how much.
        """
        period = program.continuous(0.0, np.inf, 1.0)
        ends = [program.continuous(-np.inf, np.inf) for _ in self.seconds]
        longer: dict[int, list[Term]] = defaultdict(list)
        for run, terms in added.items():
            longer[run] += terms
        for column, saved in zip(keep_columns, self.kept_seconds):
            for run, seconds in saved.items():
                longer[run].append((column, -seconds))
        for wait in self.waits:
            terms = [(ends[wait.other], 1.0), (ends[wait.run], -1.0), *longer[wait.run]]
            terms += [(period, -1.0)] if wait.earlier else []
            terms += [(keep_columns[unit], -self.most) for unit in wait.dropped]
            program.at_most("follows", _summed(terms), -self.seconds[wait.run])
        return period


def _by_run(run_of: Sequence[int], times: Schedule, ops: Iterable[int]) -> dict[int, float]:
    found: dict[int, float] = defaultdict(float)
    for op in ops:
        found[run_of[op]] += float(times.device_seconds[op])
    return dict(found)


def _summed(terms: Iterable[Term]) -> list[Term]:
    """Return the terms with one for each column."""
    found: dict[int, float] = defaultdict(float)
    for column, value in terms:
        found[column] += value
    return [(column, value) for column, value in found.items() if value]
