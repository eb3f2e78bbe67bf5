"""A steady step as columns of numbers, and what an allocator is asked for in training, made of them at once.

The same requests as `training_steps.py` makes one by one, many times faster: planning asks for those of
hundreds of plans. A later step asks for the same as the one before, so that its events are made once. Blocks
of one step and of the next are in different slots, because a step may free what the one before has left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainfit.allocator.event_sequence import AllocationSequence
from trainfit.allocator.replay_loop import ALLOCATE, FREE
from trainfit.allocator.training_steps import stream_numbers
from trainfit.devices.library_handles import LibraryWorkspace
from trainfit.traces.trace import COMPUTE, Trace

Numbers = NDArray[np.int64]

NEVER = 1 << 40
"""The end of what is still there after the step; a time that no step has."""
_RELEASE, _GROW, _CREATE, _WORKSPACE = range(4)
"""What comes first at one time, as in `trace_events.py`."""
_ORDER_BITS = 24


@dataclass(frozen=True)
class StepColumns:
    """The storages of a step, one entry for each in every column, and the workspaces of its kernels.

    Times are those of the trace: -1 for what was there before, `NEVER` for what stays. A storage that is
    empty before and after the step, and has memory for a while in it (FSDP gathers parameters so), is an
    entry without bytes; the times for which it has some are entries of their own, behind all storages.
    """

    start: Numbers
    end: Numbers
    sizes: Numbers
    born: Numbers
    """When the first step makes what later ones find; -1 for everything else."""
    turn: Numbers
    """Of what is freed at the same time, the order."""
    workspace_ops: Numbers
    workspace_sizes: Numbers
    streams: Numbers
    """The stream that each storage is allocated on; 0, the compute queue, is that of workspaces."""
    fillings: tuple[int, int] = (0, 0)
    """From which entry and before which one: storages that were empty and become so again."""
    kept: tuple[tuple[int, int], ...] = ()
    """What libraries keep: the op of the first step that they need it in, and bytes."""

    def sequence(self, steps: int) -> AllocationSequence:
        """Return what is asked for before the first step and in so many, with a mark after each part."""
        before, first = self._first
        parts = [before, first, *(self._later[number % 2] for number in range(1, steps))]
        found = AllocationSequence()
        for kinds, slots, sizes in parts:
            found.extend(kinds, slots, sizes, self._streams_of(slots))
            found.mark()
        found.names = list(range(2 * self._count + 1))
        return found

    def _streams_of(self, slots: list[int]) -> list[int]:
        if not self.streams.any():
            return [0] * len(slots)
        half = np.concatenate([self.streams, np.zeros(len(self.kept), dtype=np.int64)])
        found: list[int] = np.concatenate([half, half, [0]])[np.array(slots, dtype=np.int64)].tolist()
        return found

    @property
    def least_peak_bytes(self) -> int:
        """The most bytes of storages that are alive at once: no step needs less."""
        last = int(max(self.start.max(initial=0), np.where(self.end == NEVER, 0, self.end).max(initial=0)))
        change = np.bincount(np.maximum(self.start, 0), self.sizes, last + 2)
        change -= np.bincount(np.minimum(self.end, last + 1), self.sizes, last + 2)
        return int(np.cumsum(change).max(initial=0))

    @property
    def _count(self) -> int:
        return len(self.start) + len(self.kept)

    @cached_property
    def _left(self) -> dict[int, int]:
        """What a step leaves, and which storage of a steady step it is in the next one, which frees it."""
        freed: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        kind = list(zip(self.sizes.tolist(), self.streams.tolist()))
        for number in np.flatnonzero((self.start < 0) & (self.end < NEVER) & (self.sizes > 0))[::-1].tolist():
            freed[kind[number]].append(number)
        left = np.flatnonzero((self.start >= 0) & (self.end == NEVER)).tolist()
        return {number: freed[kind[number]].pop() for number in left if freed[kind[number]]}

    @cached_property
    def _first(self) -> tuple[_Events, _Events]:
        """What is asked for before the first step, and in it."""
        sizes = self.sizes.copy()
        sizes[list(self._left.values())] = 0  # of the step before, which there is none
        start = np.where(self.born >= 0, self.born, self.start)
        end, turn = self.end, self.turn
        if self.kept:
            ops, more = np.array(self.kept, dtype=np.int64).T
            start, sizes = np.concatenate([start, ops]), np.concatenate([sizes, more])
            end = np.concatenate([end, np.full(len(ops), NEVER)])
            turn = np.concatenate([turn, np.zeros(len(ops), dtype=np.int64)])
        times, kinds, numbers, asked = self._rows(start, end, turn, sizes)
        # Slots of the first step are those of every second one after it.
        stays = np.concatenate([self.start < 0, np.full(len(self.kept), True), [True]])
        slots = numbers + np.where(stays[numbers], 0, self._count)
        slots[numbers == self._count] = 2 * self._count
        cut = int(np.searchsorted(times, 0))
        within = (kinds[cut:].tolist(), slots[cut:].tolist(), asked[cut:].tolist())
        return (kinds[:cut].tolist(), slots[:cut].tolist(), asked[:cut].tolist()), self._ended(within, 1)

    @cached_property
    def _later(self) -> tuple[_Events, _Events]:
        """What every second step asks for, and what the others do: the same, of other slots."""
        found_before = self.start < 0
        frees_left = np.zeros(len(self.start), dtype=np.bool_)
        frees_left[list(self._left.values())] = True
        sizes = np.where(found_before & ~frees_left, 0, self.sizes)
        times, kinds, numbers, asked = self._rows(self.start, self.end, self.turn, sizes)
        inside = times >= 0
        kinds, numbers, asked = kinds[inside], numbers[inside], asked[inside]
        maker = np.arange(self._count + 1)
        for made, freed in self._left.items():
            maker[freed] = made
        of_before = np.concatenate([found_before, np.full(len(self.kept) + 1, False)])[numbers]
        found = []
        for parity in (0, 1):
            slots = maker[numbers] + np.where(of_before, 1 - parity, parity) * self._count
            slots[numbers == self._count] = 2 * self._count
            found.append(self._ended((kinds.tolist(), slots.tolist(), asked.tolist()), parity))
        return found[1], found[0]

    def _ended(self, events: _Events, parity: int) -> _Events:
        """Free what outlives a step without being there in the next: what the step returns."""
        ends = np.flatnonzero((self.start >= 0) & (self.end == NEVER) & (self.sizes > 0)).tolist()
        slots = [number + parity * self._count for number in ends if number not in self._left]
        events[0].extend([FREE] * len(slots))
        events[1].extend(slots)
        events[2].extend([0] * len(slots))
        return events

    def _rows(
        self, start: Numbers, end: Numbers, turn: Numbers, sizes: Numbers
    ) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        """Return time, kind, storage and bytes of all events in order; workspaces have the number after all.

        What would be freed before it is made, as it is in the first step where it is born late, stays.
        """
        made = np.flatnonzero(sizes > 0)
        freed = np.flatnonzero((sizes > 0) & (end < NEVER) & (end >= start))
        at_once = end[freed] == start[freed]
        used = np.repeat(self.workspace_ops, 2)
        allocates = np.tile([True, False], len(self.workspace_ops))
        times = np.concatenate([start[made], end[freed], used])
        grows = (made >= self.fillings[0]) & (made < self.fillings[1])
        part = np.concatenate(
            [
                np.where(grows, _GROW, _CREATE),
                np.where(at_once, _CREATE, _RELEASE),
                np.full(len(used), _WORKSPACE),
            ]
        )
        turns = np.concatenate([made, np.where(at_once, freed, turn[freed]), np.zeros(len(used), np.int64)])
        order = np.argsort(((times + 1) * 4 + part << _ORDER_BITS) + turns, kind="stable")
        kinds = np.concatenate(
            [np.full(len(made), ALLOCATE), np.full(len(freed), FREE), np.where(allocates, ALLOCATE, FREE)]
        )
        numbers = np.concatenate([made, freed, np.full(len(used), self._count)])
        workspaces = np.where(allocates, np.repeat(self.workspace_sizes, 2), 0)
        asked = np.concatenate([sizes[made], np.zeros(len(freed), np.int64), workspaces])
        return times[order], kinds[order], numbers[order], asked[order]


_Events = tuple[list[int], list[int], list[int]]
"""Kinds, slots and bytes."""


def columns_of(trace: Trace, kept: Sequence[LibraryWorkspace] = ()) -> StepColumns | None:
    """Return the columns of a trace; None where its storages are more than that, or too many to number.

    More is to change the size otherwise than from none and back, to be used on another stream, or to be a
    workspace on one.
    """
    storages, unseen = trace.storages, len(trace.releases)
    fillings = _fillings(trace)
    if (
        fillings is None
        or any(storage.also_used_on for storage in storages)
        or unseen + len(storages) + len(fillings) + len(kept) >= 1 << _ORDER_BITS
    ):
        return None
    turn = unseen + np.arange(len(storages))
    # The first release of each: a storage that keeps its size has only one.
    turn[list(reversed(trace.releases))] = np.arange(unseen - 1, -1, -1)
    filler, begins, ends, filled, turns = np.array(fillings, dtype=np.int64).reshape(-1, 5).T
    workspaces = [signature.workspace_bytes for signature in trace.signatures]
    used = [(number, size) for number, op in enumerate(trace.ops) if (size := workspaces[op.signature])]
    if any(trace.ops[number].queue != COMPUTE for number, _ in used):
        return None
    ops, sizes = np.array(used, dtype=np.int64).reshape(-1, 2).T
    numbered = stream_numbers(trace)
    stream = np.array([numbered[storage.stream] for storage in storages], dtype=np.int64)
    return StepColumns(
        start=np.array([*(storage.start for storage in storages), *begins], dtype=np.int64),
        end=np.array([*(NEVER if s.end is None else s.end for s in storages), *ends], dtype=np.int64),
        sizes=np.array([*(storage.bytes for storage in storages), *filled], dtype=np.int64),
        born=np.array([*(storage.born for storage in storages), *[-1] * len(fillings)], dtype=np.int64),
        turn=np.concatenate([turn, turns]),
        workspace_ops=ops,
        workspace_sizes=sizes,
        streams=np.concatenate([stream, stream[filler]]),
        fillings=(len(storages), len(storages) + len(fillings)),
        kept=tuple((block.first_op, block.bytes) for block in kept),
    )


def filling_rows(trace: Trace) -> dict[tuple[int, int], int]:
    """Return the entries of storages that were empty and get memory, by storage and time."""
    found = enumerate(_fillings(trace) or (), start=len(trace.storages))
    return {(number, begin): entry for entry, (number, begin, *_) in found}


def _fillings(trace: Trace) -> list[tuple[int, int, int, int, int]] | None:
    """Return which storages that are empty have memory when: from, until, bytes, the turn of the release.

    None where some storage changes its size in another way.
    """
    resized = {number: storage for number, storage in enumerate(trace.storages) if storage.resizes}
    turns: defaultdict[int, list[int]] = defaultdict(list)
    for turn in range(len(trace.releases) - 1, -1, -1):
        if trace.releases[turn] in resized:
            turns[trace.releases[turn]].append(turn)
    found: list[tuple[int, int, int, int, int]] = []
    for number, storage in resized.items():
        resizes = list(dict(storage.resizes).items())
        alternates = all(bool(size) != place % 2 for place, (_, size) in enumerate(resizes))
        if not storage.persistent or storage.bytes or storage.end is not None or not alternates:
            return None
        if len(resizes) % 2 or resizes[0][0] < 0:
            return None
        for (begin, size), (end, _) in zip(resizes[::2], resizes[1::2]):
            turn = turns[number].pop() if turns[number] else len(trace.releases) + number
            found.append((number, begin, end, size, turn))
    return found
