"""Which queue each operator runs on, and what it waits for.

A stream of the program is a queue, and so is each communication group. A collective begins when what its
stream did before it is done, and its stream goes on meanwhile: until the program waits for the collective, or
uses what it makes. What one queue waits for is noted once: a queue runs in order.

Steps follow each other: what was issued in the run before has a negative number, counted from that run's end,
and stands for the same op of the step before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from trainfit.capturing.ledger import Ledger, LiveStorage


@dataclass(frozen=True, slots=True)
class QueueMoment:
    """What has to be done before something may begin: the last op of each queue that matters."""

    recording: int = 0
    ops: tuple[int, ...] = ()


@dataclass(slots=True)
class _Exchange:
    """A collective that the program has not waited for."""

    number: int
    makes: list[LiveStorage]
    holds: list[torch.Tensor]
    """What it keeps until then: an asynchronous collective of NCCL has its inputs stashed."""


class Queues:
    """Follows streams and communication groups while a step is recorded."""

    def __init__(self, ledger: Ledger) -> None:
        """Begin on the compute queue; `ledger` knows on which stream the program is."""
        self._ledger = ledger
        self.waits_are_seen = False
        """Whether it is noticed that the program waits for a collective; else it waits for each at once."""
        self._recording = 0
        self._queue_of: list[str] = []
        self.restart()

    def restart(self) -> None:
        """Begin a new recording."""
        self._recording += 1
        self._earlier: list[str] = self._queue_of
        """The queue of each op of the recording before."""
        self._queue_of = []
        size = len(self._earlier)
        self._last = {queue: number - size for number, queue in enumerate(self._earlier)}
        self._to_wait_for: dict[str, set[int]] = {}
        self._waited: dict[tuple[str, str], int] = {}
        """The last op of the second queue that the first has waited for."""
        self._pending: dict[int, _Exchange] = {}
        """Collectives that were not waited for, by id of what they make."""

    def issue(self, group: str | None, used: Iterable[LiveStorage]) -> tuple[str, tuple[int, ...]]:
        """Return the queue of the next op, and what it waits for; `group` is that of a collective."""
        stream = self._ledger.stream
        queue = stream if group is None else f"group {group}"
        waits = {self._pending[id(live)].number for live in used if id(live) in self._pending}
        waits.update(self._to_wait_for.pop(queue, ()))
        if group is not None:
            waits.update(self._before_now(stream))
        number = len(self._queue_of)
        self._queue_of.append(queue)
        self._last[queue] = number
        return queue, self._new(queue, waits)

    def moment(self, stream: str) -> QueueMoment:
        """Return what has to be done for everything that a stream was given so far to be done."""
        return QueueMoment(self._recording, tuple(self._before_now(stream)))

    def wait(self, moment: QueueMoment, stream: str) -> None:
        """Let a stream wait before it goes on; what was recorded before the last run is done anyway."""
        if moment.recording == self._recording:
            self._let_wait(moment.ops, stream)
        elif moment.recording == self._recording - 1:
            size = len(self._earlier)
            self._let_wait((number - size for number in moment.ops if number >= 0), stream)

    def makes(self, lives: Iterable[LiveStorage], holds: Iterable[torch.Tensor] = ()) -> None:
        """The last op is a collective that makes these storages, and holds tensors until it is waited for."""
        exchange = _Exchange(len(self._queue_of) - 1, list(lives), list(holds))
        if self.waits_are_seen:
            self._pending.update({id(live): exchange for live in exchange.makes})
        else:
            self._let_wait((exchange.number,), self._ledger.stream)

    def wait_for(self, lives: Iterable[LiveStorage]) -> None:
        """The program waits for the collectives that make these storages."""
        found = [self._pending.pop(id(live), None) for live in lives]
        for one in found:
            if one is not None:
                one.holds.clear()
                self._let_wait((one.number,), self._ledger.stream)

    def of_steady_step(self, waits_for: tuple[int, ...]) -> tuple[int, ...]:
        """Return what an op waits for, if the step before was like this one.

        A first step, which makes optimizer state, has other ops: then it is the last op of the same queue.
        """
        if not waits_for or waits_for[0] >= 0 or self._earlier == self._queue_of:
            return waits_for
        found = (self._last[self._name(n)] - len(self._queue_of) if n < 0 else n for n in waits_for)
        return tuple(number for number in found if number >= -len(self._queue_of))

    def _before_now(self, stream: str) -> set[int]:
        last = self._last.get(stream)
        return {*self._to_wait_for.get(stream, ()), *(() if last is None else (last,))}

    def _let_wait(self, numbers: Iterable[int], stream: str) -> None:
        self._to_wait_for.setdefault(stream, set()).update(numbers)

    def _new(self, queue: str, waits: Iterable[int]) -> tuple[int, ...]:
        """Keep of the ops to wait for the last of each other queue, if it was not waited for before."""
        latest: dict[str, int] = {}
        for number in sorted(waits):
            latest[self._name(number)] = number
        latest.pop(queue, None)
        found = {
            other: number
            for other, number in latest.items()
            if number > self._waited.get((queue, other), -math.inf)
        }
        self._waited.update({(queue, other): number for other, number in found.items()})
        return tuple(sorted(found.values()))

    def _name(self, number: int) -> str:
        return self._queue_of[number] if number >= 0 else self._earlier[number]
