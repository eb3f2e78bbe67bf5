"""Where every block of a steady step lies: addresses, segments, and what is asked for in which order.

On a GPU the allocator is replayed from before the first step on, as for the figures of `device_memory.py`,
and the last step is kept. Elsewhere memory is taken at the lowest address that is free (`first_fit.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from trainfit.allocator import fast_core
from trainfit.allocator.allocator_options import AllocatorOptions
from trainfit.allocator.caching_allocator import new_state
from trainfit.allocator.device_memory import StepMemory
from trainfit.allocator.fast_core import MemoryBlock
from trainfit.allocator.first_fit import FirstFit
from trainfit.allocator.named_options import DEFAULT_OPTIONS
from trainfit.allocator.placed_blocks import PlacedBlock, PlacedRequest, PlacedSegment, PlacedStep
from trainfit.allocator.sequence_replay import UNLIMITED
from trainfit.allocator.training_steps import Request, TrainingSteps


def placed_step(memory: StepMemory) -> PlacedStep:
    """Replay a step until it is steady, and say where everything lies in the last one."""
    training = TrainingSteps(memory.timeline.trace, memory.libraries if memory.is_simulated else ())
    heap: _CachedHeap | FirstFit = FirstFit()
    steps = 4
    if memory.is_simulated:
        heap, steps = _CachedHeap(memory.options), memory.steps
    owner: dict[int, int] = {}
    """The storage of every block, by the number of the request."""
    # One after the other: what is known of requests is of those that were made last.
    for make in (training.before, training.first, *[training.next] * (steps - 2)):
        _run(heap, make(), training, owner)
    before = heap.segments(owner)
    placed, grown = _run(heap, training.next(), training, owner, watched=True)
    return PlacedStep(before, tuple(placed), grown, heap.segments(owner), memory.is_simulated)


def _run(
    heap: _CachedHeap | FirstFit,
    requests: Sequence[Request],
    training: TrainingSteps,
    owner: dict[int, int],
    watched: bool = False,
) -> tuple[list[PlacedRequest], dict[int, tuple[PlacedSegment, ...]]]:
    """Serve requests; if they are watched, note when the allocator takes or gives back memory."""
    found: list[PlacedRequest] = []
    grown: dict[int, tuple[PlacedSegment, ...]] = {}
    reserved = heap.reserved
    for (number, size), (op, storage) in zip(requests, training.origins, strict=True):
        stream = training.streams[number]
        if size:
            owner[number] = storage
            found.append(PlacedRequest(op, storage, heap.allocate(number, size, stream), size, stream))
        else:
            del owner[number]
            address, gone = heap.free(number, training.also_used_on.get(number, ()))
            found.append(PlacedRequest(op, storage, address, gone, stream))
        if watched and heap.reserved != reserved:
            reserved = heap.reserved
            grown[len(found) - 1] = heap.segments(owner)
    return found, grown


class _CachedHeap:
    """torch's caching allocator, with its segments; memory does not run out."""

    def __init__(self, options: AllocatorOptions | None) -> None:
        self._state = new_state(UNLIMITED, options or DEFAULT_OPTIONS)
        self._blocks: dict[int, MemoryBlock] = {}

    @property
    def reserved(self) -> int:
        return self._state.reserved

    def allocate(self, number: int, size: int, stream: int) -> int:
        block = fast_core.allocate(self._state, size, stream)
        assert block is not None, "an unlimited device has run out of memory"
        self._blocks[number] = block
        return block.address

    def free(self, number: int, also_used_on: Sequence[int]) -> tuple[int, int]:
        """Return the address and, negative, the bytes that were asked for."""
        block = self._blocks.pop(number)
        address, requested = block.address, block.requested
        for stream in also_used_on:
            fast_core.record_stream(block, stream)
        fast_core.free(self._state, block)
        return address, -requested

    def segments(self, owner: dict[int, int]) -> tuple[PlacedSegment, ...]:
        """Return all segments by address: chains of blocks, which end where no memory is mapped."""
        storage_at = {block.address: owner[number] for number, block in self._blocks.items()}
        waiting = {id(block): block for queue in self._state.queues.values() for _, block in queue}
        every = [*self._blocks.values(), *waiting.values()]
        every += [*self._state.small.in_order(), *self._state.large.in_order()]
        every.sort(key=lambda block: block.address)
        chains: list[list[MemoryBlock]] = []
        for block in every:
            if block.previous is None or not block.previous.mapped:
                chains.append([])
            chains[-1].append(block)
        return tuple(_segment(chain, storage_at) for chain in chains)


def _segment(chain: Sequence[MemoryBlock], storage_at: dict[int, int]) -> PlacedSegment:
    blocks = tuple(
        PlacedBlock(block.address, block.size, block.requested, storage_at[block.address])
        if block.address in storage_at
        else PlacedBlock(block.address, block.size, 0, None, waits=block.busy)
        for block in chain
    )
    first = chain[0]
    size = sum(block.size for block in chain)
    expandable = first.reservation is not None
    return PlacedSegment(first.address, size, first.pool.small, expandable, blocks, first.stream)
