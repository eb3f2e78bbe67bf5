"""Where an op of a step finds its memory: near, in the last cache, or in main memory.

An operator that is run alone, again and again, finds its inputs in the nearest cache. In a step, what was
written in forward has long left the caches when backward reads it. So each op gets a `Locality`: for each of
its inputs, and for the memory of its results, which cache still holds it. The step is played through caches
that forget what was used least recently, with results that take the memory freed last, as allocators do.
"""

from __future__ import annotations

import bisect
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from trainfit.operators.recorded_calls import nbytes
from trainfit.traces.trace import Op, Signature, Trace

Block = int | str
"""A piece of memory by number, or an operator's code by name."""
NEAR, MIDDLE, FAR = 0, 1, 2
"""In a core's own cache; in the last cache only; in none."""

_UNNOTICED_BYTES = 4096
"""Tensors below this are fetched while the call is still being dispatched."""
_CODE_BYTES = 32 << 10
"""What an operator's call runs through: its own kernel, and its path through the dispatcher."""
_CLOSE_FIT = 1.25
"""An allocator gives a freed block to a request that fills most of it; others are split or kept."""


@dataclass(frozen=True, slots=True)
class Locality:
    """Where one op finds its inputs, in the signature's order, the memory for its results, and its code."""

    inputs: tuple[int, ...]
    results: int
    warm_code: bool = False
    """Whether the operator ran so shortly before that the core's own cache still holds its code."""


@dataclass(frozen=True, slots=True)
class Caches:
    """Sizes of a core's own cache and of the last one."""

    own_bytes: int
    last_bytes: int


def this_machines_caches() -> Caches:
    """Read the cache sizes of the first core; common sizes where the system does not tell."""
    sizes: dict[int, int] = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            level, kind, size = ((folder / name).read_text().strip() for name in ("level", "type", "size"))
        except OSError:
            continue
        if kind != "Instruction" and size.endswith("K"):
            sizes[int(level)] = int(size[:-1]) * 1024
    own = sizes.get(2, 1 << 20)
    return Caches(own, max(sizes.get(3, 16 << 20), own))


def localities(trace: Trace, caches: Caches) -> list[Counter[Locality]]:
    """Return for each signature how many of its ops find their memory in which way, in steady state."""
    found: list[Counter[Locality]] = [Counter() for _ in trace.signatures]
    memory = _Memory(trace, caches)
    # The first pass only brings the caches into the state that a step leaves behind.
    memory.play()
    for number, locality in memory.play():
        found[number][locality] += 1
    return found


class _Memory:
    """The blocks of memory that storages lie in, and the caches above them."""

    def __init__(self, trace: Trace, caches: Caches) -> None:
        self._trace = trace
        self._levels = (_Cache(caches.own_bytes), _Cache(caches.last_bytes))
        self._free: list[tuple[int, int, int]] = []  # size, minus time of release, block
        self._blocks = 0
        self._clock = 0
        self._block_of = {n: self._new_block() for n, s in enumerate(trace.storages) if s.persistent}
        self._dies: dict[int, list[int]] = {}
        for number, storage in enumerate(trace.storages):
            if storage.end is not None:
                self._dies.setdefault(storage.end, []).append(number)

    def play(self) -> list[tuple[int, Locality]]:
        """Run the step through the caches; return each op's signature and locality."""
        played: list[tuple[int, Locality]] = []
        for number, op in enumerate(self._trace.ops):
            self._release(self._dies.get(number, ()))
            signature = self._trace.signatures[op.signature]
            for storage in op.creates:
                self._block_of[storage] = self._allocate(self._trace.storages[storage].bytes)
            if not signature.view:
                played.append((op.signature, self._run(op, signature)))
        self._release([s for s in self._block_of if not self._trace.storages[s].persistent])
        return played

    def _run(self, op: Op, signature: Signature) -> Locality:
        storages = self._trace.storages
        one_to_one = len(op.reads) == len(signature.inputs)
        inputs = tuple(
            self._level(self._block_of.get(op.reads[place], -1))
            if one_to_one and nbytes(spec) >= _UNNOTICED_BYTES
            else NEAR
            for place, spec in enumerate(signature.inputs)
        )
        created = [s for s in op.creates if storages[s].bytes >= _UNNOTICED_BYTES]
        results = max((self._level(self._block_of[s]) for s in created), default=NEAR)
        if one_to_one:
            self._touch((self._block_of.get(s, -1), nbytes(i)) for s, i in zip(op.reads, signature.inputs))
        self._touch((self._block_of[s], storages[s].bytes) for s in op.creates)
        warm_code = signature.name in self._levels[0]
        self._touch([(signature.name, _CODE_BYTES)])
        return Locality(inputs, results, warm_code)

    def _level(self, block: Block) -> int:
        return next((level for level, cache in enumerate(self._levels) if block in cache), FAR)

    def _touch(self, blocks: Iterable[tuple[Block, int]]) -> None:
        for block, size in blocks:
            for cache in self._levels:
                cache.touch(block, size)

    def _allocate(self, size: int) -> int:
        place = bisect.bisect_left(self._free, (size,))
        if place < len(self._free) and self._free[place][0] <= _CLOSE_FIT * size:
            return self._free.pop(place)[2]
        return self._new_block()

    def _release(self, storages: Iterable[int]) -> None:
        for storage in storages:
            block = self._block_of.get(storage)
            if block is not None and not self._trace.storages[storage].persistent:
                self._clock += 1
                bisect.insort(self._free, (self._trace.storages[storage].bytes, -self._clock, block))
                del self._block_of[storage]

    def _new_block(self) -> int:
        self._blocks += 1
        return self._blocks


class _Cache:
    """Keeps the blocks used last, as many as fit."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: OrderedDict[Block, int] = OrderedDict()
        self._bytes = 0

    def __contains__(self, block: Block) -> bool:
        return block in self._held

    def touch(self, block: Block, size: int) -> None:
        """Bring a block in and let the ones unused for longest go. What does not fit whole is not kept."""
        self._bytes -= self._held.pop(block, 0)
        if size > self._capacity:
            return
        self._held[block] = size
        self._bytes += size
        while self._bytes > self._capacity:
            self._bytes -= self._held.popitem(last=False)[1]
