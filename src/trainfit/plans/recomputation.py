"""Which ops of a region run again in backward, and which storages are kept for it. Plain data, no torch.

The executor asks this about what it saw in forward, the planner about what it reads off a trace.

A storage changes when an op writes to it in place, so what is needed is a *version* of it: version 0 is what
its creator left, each write makes the next one. A kept storage is restored with its last version, and nothing
that wrote to it runs again; if an earlier version is needed as well, it cannot be restored and is recomputed
like the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from trainfit.plans.decisions import Decision

NOBODY = -1
Version = tuple[int, int]
"""A storage and one of its versions."""


@dataclass(slots=True)
class FlowOp:
    """What one op does to the storages of a region."""

    reads: Sequence[Version] = ()
    writes: Sequence[Version] = ()
    """What it writes to in place, with the version that it makes. It also needs the version before."""
    creates: Sequence[int] = ()
    must_run: bool = False
    """Whether it has to run again whoever needs its results."""
    stream: int = NOBODY
    """The generator it draws random numbers from, by number."""
    starts_stream: bool = False
    """Whether the generator's state before it is remembered; if not, the draw before it must run first."""


@dataclass(slots=True)
class Flow:
    """The ops of one region in order, its storages, and what backward needs of them."""

    ops: list[FlowOp] = field(default_factory=list)
    makers: list[list[int]] = field(default_factory=list)
    """For each storage the op that made each version; `NOBODY` for what was there before the region."""
    permanent: set[int] = field(default_factory=set)
    """Storages from outside of the region that are still there, as it left them, when it runs again."""
    needed: list[Version] = field(default_factory=list)
    unseen_writes: bool = False
    """Whether something filled memory without being one of the ops: then none can be left out."""

    def storage(self, maker: int) -> int:
        """Enter a storage that the op `maker` creates; returns its number."""
        self.makers.append([maker])
        return len(self.makers) - 1

    def version(self, storage: int) -> int:
        """Return the present version of a storage."""
        return len(self.makers[storage]) - 1


@dataclass(frozen=True, slots=True)
class Rerun:
    """The answer: for each op whether it runs again, and the storages that are restored instead."""

    runs: tuple[bool, ...]
    restored: frozenset[int]


def rerun(flow: Flow, kept: Iterable[int]) -> Rerun:
    """Return which ops run again when the storages in `kept` were kept.

    A kept storage that nothing needs, or that cannot be restored, is not among the restored ones.
    """
    if flow.unseen_writes:
        return Rerun((True,) * len(flow.ops), frozenset())
    usable = set(kept) - flow.permanent
    while True:
        attempt = _Attempt(flow, usable)
        if attempt.conflict is None:
            return Rerun(tuple(attempt.runs), frozenset(attempt.restored))
        # Some op has to run again that writes to it, or a version is needed that is gone.
        usable.discard(attempt.conflict)


class _Attempt:
    """One walk from what is needed back to what has to run."""

    def __init__(self, flow: Flow, usable: set[int]) -> None:
        self.runs = [False] * len(flow.ops)
        self.restored: set[int] = set()
        self.conflict: int | None = None
        self._flow = flow
        self._usable = usable
        self._pending: list[int] = []
        self._draw_before = _draws_before(flow)
        for version in flow.needed:
            self._need(version)
        for number, op in enumerate(flow.ops):
            if op.must_run:
                self._run(number)
        while self._pending and self.conflict is None:
            op = flow.ops[self._pending.pop()]
            for version in op.reads:
                self._need(version)
            for storage, made in op.writes:
                self._need((storage, made - 1))

    def _need(self, version: Version) -> None:
        storage, number = version
        if storage in self._flow.permanent:
            return
        makers = self._flow.makers[storage]
        if storage in self._usable:
            if number == len(makers) - 1:
                self.restored.add(storage)
            else:
                self.conflict = storage
            return
        if makers[number] != NOBODY:
            self._run(makers[number])

    def _run(self, number: int) -> None:
        if self.runs[number]:
            return
        self.runs[number] = True
        op = self._flow.ops[number]
        for storage in (*op.creates, *(storage for storage, _ in op.writes)):
            if storage in self._usable:
                self.conflict = storage
        self._pending.append(number)
        if op.stream != NOBODY and not op.starts_stream:
            before = self._draw_before[number]
            if before != NOBODY:
                self._run(before)


def _draws_before(flow: Flow) -> dict[int, int]:
    """Return, for each op that draws, the op that drew from the same generator before it."""
    last: dict[int, int] = {}
    found: dict[int, int] = {}
    for number, op in enumerate(flow.ops):
        if op.stream != NOBODY:
            found[number] = last.get(op.stream, NOBODY)
            last[op.stream] = number
    return found


def starts_stream(decision: Decision, decision_of_draw_before: Decision | None) -> bool:
    """Whether the generator's state is remembered before a draw.

    It is for the first draw of a region, and where the draw before will not run again to lead up to it.
    """
    if decision_of_draw_before is None:
        return True
    return decision.behaviour.runs_again and not decision_of_draw_before.behaviour.runs_again


def copied_before_write(*, was_read: bool, makes_more: bool) -> bool:
    """Whether what was there before the region is copied before an op of the region overwrites it.

    It is where an op that read it may run again, or the writing op itself, because it makes more than that.
    """
    return was_read or makes_more
