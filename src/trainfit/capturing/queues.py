"""Which queue each operator runs on, and what it waits for.

A stream of the program is a queue, and so is each communication group. A collective begins when what its
stream did before it is done, and its stream goes on meanwhile: until the program waits for the collective, or
uses what it makes. What one queue waits for is noted once: a queue runs in order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainfit.capturing.ledger import Ledger, LiveStorage

Moment = tuple[int, ...]
"""What has to be done before something may begin: the last op of each queue that matters."""


class Queues:
    """Follows streams and communication groups while a step is recorded."""

    def __init__(self, ledger: Ledger) -> None:
        """Begin on the compute queue; `ledger` knows on which stream the program is."""
        self._ledger = ledger
        self.waits_are_seen = False
        """Whether it is noticed that the program waits for a collective; else it waits for each at once."""
        self.restart()

    def restart(self) -> None:
        """Begin a new recording."""
        self._queue_of: list[str] = []
        self._last: dict[str, int] = {}
        self._to_wait_for: dict[str, set[int]] = {}
        self._waited: dict[tuple[str, str], int] = {}
        """The last op of the second queue that the first has waited for."""
        self._pending: dict[int, tuple[LiveStorage, int]] = {}
        """What a collective makes, by id, and the collective: until it is waited for."""

    def issue(self, group: str | None, used: Iterable[LiveStorage]) -> tuple[str, Moment]:
        """Return the queue of the next op, and what it waits for; `group` is that of a collective."""
        stream = self._ledger.stream
        queue = stream if group is None else f"group {group}"
        waits = {self._pending[id(live)][1] for live in used if id(live) in self._pending}
        waits.update(self._to_wait_for.pop(queue, ()))
        if group is not None:
            waits.update(self.moment(stream))
        number = len(self._queue_of)
        self._queue_of.append(queue)
        self._last[queue] = number
        return queue, self._new(queue, waits)

    def moment(self, stream: str) -> Moment:
        """Return what has to be done for everything that a stream was given so far to be done."""
        last = self._last.get(stream)
        return tuple({*self._to_wait_for.get(stream, ()), *(() if last is None else (last,))})

    def wait(self, moment: Iterable[int], stream: str | None = None) -> None:
        """Let a stream wait before it goes on: the one that the program is on, unless another is given."""
        self._to_wait_for.setdefault(stream or self._ledger.stream, set()).update(moment)

    def makes(self, lives: Iterable[LiveStorage]) -> None:
        """The last op is a collective that makes these storages."""
        number = len(self._queue_of) - 1
        if self.waits_are_seen:
            self._pending.update({id(live): (live, number) for live in lives})
        else:
            self.wait((number,))

    def wait_for(self, lives: Iterable[LiveStorage]) -> None:
        """The program waits for the collectives that make these storages."""
        found = [self._pending.pop(id(live), None) for live in lives]
        self.wait({one[1] for one in found if one is not None})

    def _new(self, queue: str, waits: Iterable[int]) -> Moment:
        """Keep of the ops to wait for the last of each other queue, if it was not waited for before."""
        latest: dict[str, int] = {}
        for number in waits:
            other = self._queue_of[number]
            latest[other] = max(number, latest.get(other, -1))
        latest.pop(queue, None)
        found = [number for other, number in latest.items() if number > self._waited.get((queue, other), -1)]
        self._waited.update({(queue, self._queue_of[number]): number for number in found})
        return tuple(sorted(found))
