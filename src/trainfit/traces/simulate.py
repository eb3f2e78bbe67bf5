"""Replay a trace: bytes alive during every op, the peak, and what is alive at the peak."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainfit.basics.units import format_bytes
from trainfit.traces.trace import CATEGORIES, Trace

Bytes = NDArray[np.int64]


@dataclass(frozen=True)
class AliveStorage:
    """A storage that is alive at the peak: what made it, where, and how large it is at that moment."""

    storage: int
    bytes: int
    category: str
    producer: str
    module: str


@dataclass(frozen=True)
class Timeline:
    """Bytes over the step: what is alive while op i runs, its results included, and its kernel's workspace.

    `used_bytes` is both together; the peak is the most of it.
    """

    trace: Trace
    live_bytes: tuple[int, ...]
    by_category: Bytes
    """One row per category, one column per op."""
    workspace_bytes: Bytes
    persistent_bytes: int
    peak_bytes: int
    peak_op: int
    """The first op at which the peak is reached; -1 if nothing rises above what was there before."""

    def __repr__(self) -> str:
        """One line: there is an entry for every op."""
        return f"<Timeline of {self.trace.target}: peak {format_bytes(self.peak_bytes)} at op {self.peak_op}>"

    @cached_property
    def used_bytes(self) -> Bytes:
        """What is allocated while each op runs: the storages that are alive and the kernel's workspace."""
        used: Bytes = np.asarray(self.live_bytes, dtype=np.int64) + self.workspace_bytes
        return used

    def most_bytes(self, first: int, last: int) -> int:
        """Return the most bytes used while the ops from `first` to before `last` run; 0 if there are none."""
        return int(self.used_bytes[first:last].max(initial=0))

    @cached_property
    def peak_by_category(self) -> dict[str, int]:
        """Bytes at the peak by category; the kernel's workspace counts as temporary."""
        return self.categories_at(self.peak_op) if self.peak_op >= 0 else _persistent_by_category(self.trace)

    def categories_at(self, op: int) -> dict[str, int]:
        """Return the bytes used while an op runs by category; the kernel's workspace counts as temporary."""
        found = dict(zip(CATEGORIES, self.by_category[:, op].tolist()))
        found["temporary"] += int(self.workspace_bytes[op])
        return found

    @cached_property
    def alive_at_peak(self) -> tuple[AliveStorage, ...]:
        """Everything alive at the peak, largest first."""
        found: list[AliveStorage] = []
        for number, storage in enumerate(self.trace.storages):
            if storage.alive_at(self.peak_op):
                size = self.trace.occupied_at(number, self.peak_op)
                producer, module = "", "Global"
                if storage.producer >= 0:
                    producer = self.trace.op_name(storage.producer)
                    module = self.trace.module_name(self.trace.ops[storage.producer].module)
                found.append(AliveStorage(number, size, storage.category, producer, module))
        return tuple(sorted(found, key=lambda alive: -alive.bytes))

    @cached_property
    def peak_by_module(self) -> dict[str, int]:
        """Bytes at the peak that were made during the step, by the module whose op made them."""
        found: dict[str, int] = {}
        for alive in self.alive_at_peak:
            if self.trace.storages[alive.storage].producer >= 0:
                found[alive.module] = found.get(alive.module, 0) + alive.bytes
        return found


def simulate(trace: Trace) -> Timeline:
    """Replay the trace's allocations and frees; linear in ops and storages."""
    ops = len(trace.ops)
    by_category = _category_bytes(trace, ops)
    live = by_category.sum(axis=0)
    per_signature = np.array(trace.workspace_bytes, dtype=np.int64)
    signature = np.fromiter((op.signature for op in trace.ops), dtype=np.int64, count=ops)
    workspace: Bytes = per_signature[signature] if ops else np.zeros(0, dtype=np.int64)
    during = live + workspace
    persistent = trace.persistent_bytes
    peak = max(int(during.max(initial=0)), persistent)
    peak_op = int(during.argmax()) if peak > persistent else -1
    return Timeline(trace, tuple(live.tolist()), by_category, workspace, persistent, peak, peak_op)


def _category_bytes(trace: Trace, ops: int) -> Bytes:
    """Return bytes alive by category and op: allocations and frees as steps, then a running sum."""
    storages = trace.storages
    count = len(storages)
    row = {category: number for number, category in enumerate(CATEGORIES)}
    occupied = trace.memory.occupied
    size = np.array(trace.occupied_bytes, dtype=np.int64)
    kind = np.fromiter((row[s.category] for s in storages), dtype=np.int64, count=count)
    start = np.fromiter((max(s.start, 0) for s in storages), dtype=np.int64, count=count)
    end = np.fromiter((ops if s.end is None else s.end for s in storages), dtype=np.int64, count=count)
    steps = np.zeros((len(CATEGORIES), ops + 1), dtype=np.int64)
    np.add.at(steps, (kind, start), size)
    last = size.copy()
    for number, storage in enumerate(storages):
        for time, resized in storage.resizes:
            steps[kind[number], min(max(time, 0), ops)] += occupied(resized) - last[number]
            last[number] = occupied(resized)
    np.add.at(steps, (kind, end), -last)
    live: Bytes = np.cumsum(steps[:, :ops], axis=1)
    return live


def _persistent_by_category(trace: Trace) -> dict[str, int]:
    found = dict.fromkeys(CATEGORIES, 0)
    for storage, size in zip(trace.storages, trace.occupied_bytes):
        if storage.persistent:
            found[storage.category] += size
    return found
