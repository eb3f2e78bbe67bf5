"""Memory of an order as inductor's code has it: released buffers are kept for later ones of their kind.

When inductor writes the code, a buffer that is released goes into a pool, and a later one of the same size
and dtype takes it over, if keeping it until then does not raise the peak above the one that inductor counted
for the whole graph. In between it stays allocated, which a timeline of lifetimes alone does not show.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence

from trainfit.ordering.graph import BufferGraph
from trainfit.ordering.order_timeline import order_timeline


def live_bytes_with_reuse(
    planned: BufferGraph,
    precise: BufferGraph,
    steps: Sequence[int],
    allocated: Mapping[str, Hashable],
    released: Mapping[str, Hashable],
) -> list[int]:
    """Return memory while each step runs.

    `planned` is the graph as inductor counts it, `precise` with what the code allocates. `allocated` are the
    buffers that the code allocates itself, `released` those that it may hand on, each with its kind.
    """
    live = list(order_timeline(precise, steps).after_alloc)
    for between, size in _kept_for_later(planned, precise, steps, allocated, released):
        for place in between:
            live[place] += size
    return live


def _kept_for_later(
    planned: BufferGraph,
    precise: BufferGraph,
    steps: Sequence[int],
    allocated: Mapping[str, Hashable],
    released: Mapping[str, Hashable],
) -> Iterator[tuple[range, int]]:
    """Yield for each buffer that stays allocated for a later one the steps in between, and the bytes."""
    counted = list(order_timeline(planned, steps).live_bytes)
    most = max(counted)
    starting: list[list[str]] = [[] for _ in steps]
    ending: list[list[str]] = [[] for _ in steps]
    size = {}
    for life in order_timeline(precise, steps).lifetimes:
        if life.size_free:
            size[life.buffer] = life.size_free
            if life.end is not None:
                ending[life.end].append(life.buffer)
        if life.size_alloc:
            starting[life.start].append(life.buffer)
    pool: dict[Hashable, list[int]] = {}
    for step in range(len(steps)):
        for name in starting[step]:
            waiting = pool.get(allocated.get(name))
            if not waiting:
                continue
            between = range(waiting[-1] + 1, step)
            if all(counted[place] + size.get(name, 0) <= most for place in between):
                waiting.pop()
                for place in between:
                    counted[place] += size.get(name, 0)
                yield between, size.get(name, 0)
        for name in ending[step]:
            if name in released:
                pool.setdefault(released[name], []).append(step)
