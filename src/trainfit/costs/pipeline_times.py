"""How long a step of a pipeline takes: the stages wait for each other, which no single stage shows.

Each stage is scheduled for itself, as if what it receives were always there. Its time line is then cut where
it sends and where it first needs what it receives, and the stages run against each other: what is needed
cannot be used before the other stage has sent it and the link has carried it. Two steps in a row, so that a
stage begins the next step while others still finish this one. What a stage stands still for is its bubble.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainfit.costs.schedule import Schedule, Seconds, with_device_seconds
from trainfit.traces.trace import Trace

_SENT, _RECEIVED = "send", "recv"


@dataclass(frozen=True)
class PipelineTimes:
    """A step of all stages."""

    step_seconds: float
    busy_seconds: tuple[float, ...]
    """How long each stage would take if it never waited for another one."""

    def bubble_seconds(self, stage: int) -> float:
        """How long a stage stands still in each step."""
        return max(self.step_seconds - self.busy_seconds[stage], 0.0)

    @property
    def bubble_share(self) -> float:
        """The share of all stages' time in which they stand still."""
        whole = self.step_seconds * len(self.busy_seconds)
        return 1.0 - sum(self.busy_seconds) / whole if whole else 0.0


@dataclass(frozen=True)
class _StageEvent:
    """When a stage sends, or needs what it receives, in seconds of its own undisturbed time line."""

    at: float
    sends: bool
    peer: int
    """The rank on the other side."""
    seconds: float
    """Of the link."""


@dataclass(frozen=True)
class _Stage:
    rank: int
    moments: tuple[_StageEvent, ...]
    seconds: float


def is_pipeline(trace: Trace) -> bool:
    """Whether the step sends to other ranks, or receives from them."""
    return any(
        signature.collective is not None and signature.collective.kind in (_SENT, _RECEIVED)
        for signature in trace.signatures
    )


def pipeline_times(stages: Sequence[Schedule]) -> PipelineTimes:
    """Return the step of stages that send to each other; each is of another rank of one pipeline.

    What a stage exchanges with a rank that is none of them is taken to be there.
    """
    cut = [_cut(stage) for stage in stages]
    ends: list[float] = []
    clocks = [0.0] * len(cut)
    for _ in range(2):
        clocks = _run(cut, clocks)
        ends.append(max(clocks, default=0.0))
    step = max(ends[1] - ends[0], max((stage.seconds for stage in cut), default=0.0))
    return PipelineTimes(step, tuple(stage.seconds for stage in cut))


def _run(stages: Sequence[_Stage], begins: Sequence[float]) -> list[float]:
    """Run every stage once, from when it is free; return when each is done."""
    numbers = {stage.rank: number for number, stage in enumerate(stages)}
    sent: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    received: defaultdict[tuple[int, int], int] = defaultdict(int)
    late, at = list(begins), [0] * len(stages)
    moved = True
    while moved:
        moved = False
        for number, stage in enumerate(stages):
            while at[number] < len(stage.moments):
                moment = stage.moments[at[number]]
                now = late[number] + moment.at
                if moment.sends:
                    sent[stage.rank, moment.peer].append(now + moment.seconds)
                elif moment.peer in numbers:
                    pair = moment.peer, stage.rank
                    if received[pair] == len(sent[pair]):
                        break  # the other stage has not got so far
                    late[number] += max(sent[pair][received[pair]] - now, 0.0)
                    received[pair] += 1
                at[number] += 1
                moved = True
    return [begin + stage.seconds for begin, stage in zip(late, stages)]


def _cut(times: Schedule) -> _Stage:
    """Return where a stage sends and where it needs what it receives."""
    trace = times.trace
    kinds = [_kind(trace, number) for number in range(len(trace.ops))]
    exchanges = np.array([kind in (_SENT, _RECEIVED) for kind in kinds], dtype=np.bool_)
    alone = with_device_seconds(times, np.where(exchanges, 0.0, times.device_seconds))
    reached: Seconds = np.cumsum(alone.op_seconds)
    first_use: dict[int, int] = {}
    for number, op in enumerate(trace.ops):
        for other in op.waits_for:
            first_use.setdefault(other, number)
    moments: list[tuple[int, _StageEvent]] = []
    for number in np.flatnonzero(exchanges).tolist():
        sends = kinds[number] == _SENT
        place = number if sends else _needed(trace, number, first_use)
        # An op's own time is behind the moment at which it can begin.
        at = float(reached[place] - (0.0 if sends else alone.op_seconds[place]))
        moment = _StageEvent(at, sends, _peer(trace, number), float(times.device_seconds[number]))
        moments.append((place, moment))
    moments.sort(key=lambda pair: (pair[0], not pair[1].sends))
    rank = trace.cluster.rank if trace.cluster is not None else 0
    return _Stage(rank, tuple(moment for _, moment in moments), alone.step_seconds)


def _needed(trace: Trace, received: int, first_use: dict[int, int]) -> int:
    """Return the first op that cannot begin before something has been received."""
    queue, last = trace.ops[received].queue, len(trace.ops) - 1
    # A queue runs in order: waiting for a later op of it is waiting for this one.
    later = (number for other, number in first_use.items() if _behind(trace, other, received, queue))
    return min(later, default=last)


def _behind(trace: Trace, other: int, received: int, queue: str) -> bool:
    return other >= received and trace.ops[other].queue == queue


def _kind(trace: Trace, number: int) -> str:
    collective = trace.signatures[trace.ops[number].signature].collective
    return "" if collective is None else collective.kind


def _peer(trace: Trace, number: int) -> int:
    """Return the rank on the other side of a send or receive; -1 if it is not known."""
    signature = trace.signatures[trace.ops[number].signature]
    assert signature.collective is not None
    arguments = json.loads(signature.arguments)[0]
    whole = [value for value in arguments if type(value) is int]
    members = list(signature.collective.members)
    return members[whole[0]] if whole and 0 <= whole[0] < len(members) else -1
