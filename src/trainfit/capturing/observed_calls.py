"""What an observation notes of module calls: exact moments, and what they are given and return."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainfit.capturing.ledger import Ledger, LiveStorage
from trainfit.capturing.recorder import Recorder
from trainfit.capturing.rows import BackwardNode


@dataclass(frozen=True)
class Instant:
    """A moment between two ops: how many ops had run, and how many storages had been freed by then."""

    time: int
    freed: int


@dataclass
class ObservedCall:
    """When a module call began and ended, and the storages that it was given and has returned."""

    entered: Instant
    given: tuple[LiveStorage, ...]
    has_tensors: bool
    """Whether it was given any, of whatever storages."""
    left: Instant | None = None
    returned: tuple[LiveStorage, ...] = ()
    backward_began: Instant | None = None
    backward_ended: Instant | None = None


class ObservingRecorder(Recorder):
    """Also notes at what moments the backward of a call begins and ends, not only before which op."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self.observed: list[ObservedCall] = []
        self._freed = self._looked_at = 0
        self._ending = -1
        """The call whose node was the last that ran."""

    def now(self) -> Instant:
        """Return the present moment."""
        with self.ledger.lock:
            new = self.ledger.releases[self._looked_at :]
            self._looked_at += len(new)
            # What is only made smaller is still held, and what counts nothing is left out of a trace.
            self._freed += sum(1 for live in new if live.holders == 0 and (live.nbytes or live.resizes))
            return Instant(self.ledger.clock, self._freed)

    def enter_node(self, info: BackwardNode) -> None:
        self._end_backward()
        super().enter_node(info)
        for call in self._calls_around(info.call):
            call.backward_began = call.backward_began or self.now()

    def leave_node(self, info: BackwardNode) -> None:
        super().leave_node(info)
        self._ending = info.call

    def leave_context(self) -> None:
        self._end_backward()
        super().leave_context()

    def _end_backward(self) -> None:
        """The engine has let go of what the last node needed: only now it is over."""
        for call in self._calls_around(self._ending):
            call.backward_ended = self.now()
        self._ending = -1

    def _calls_around(self, number: int) -> Iterator[ObservedCall]:
        while number >= 0:
            if number < len(self.observed):
                yield self.observed[number]
            number = self.calls[number].parent
