"""Lifetimes and peaks of inductor's scheduler nodes in a given order, under torch's names. Sizes are bytes.

Figures come from `ordering/order_timeline.py`. A step that does not exist is an `IndexError`, as in torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch._inductor.memory import FreeableInputBuffer

from trainfit.compat.planning_info import PlanningError, graph_of_nodes
from trainfit.errors import GraphError
from trainfit.order_fronts.scheduler_graph import Nodes
from trainfit.ordering.graph import BufferGraph
from trainfit.ordering.order_timeline import (
    Lifetime,
    OrderTimeline,
    allocated_and_freed,
    memory_over,
    order_timeline,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch._inductor.scheduler import BaseSchedulerNode, SchedulerBuffer
    from torch.utils._ordered_set import OrderedSet

_NEVER = -1
"""The `end_step` of what is never released."""


@dataclass
class BufferInfo:
    """A buffer's life: allocated when `start_step` begins, released when `end_step` has run; -1 is never."""

    buffer: SchedulerBuffer | FreeableInputBuffer
    size_alloc: int
    size_free: int
    start_step: int
    end_step: int


@dataclass
class SNodeMemory:
    """Bytes that a node allocates and releases."""

    size_alloc: int
    size_free: int


def compute_memory_timeline(
    nodes: list[BaseSchedulerNode],
    name_to_freeable_input_buf: dict[str, FreeableInputBuffer],
    graph_outputs: OrderedSet[str],
) -> tuple[
    list[BufferInfo],
    dict[BaseSchedulerNode, int],
    dict[FreeableInputBuffer | SchedulerBuffer, BaseSchedulerNode],
]:
    """Return the life of every buffer, the step of every node, and the last user of what is released."""
    timeline = _timeline(nodes, name_to_freeable_input_buf, graph_outputs)
    buffers = _buffers(nodes, name_to_freeable_input_buf)
    infos = [
        BufferInfo(
            buffers[life.buffer],
            life.size_alloc,
            life.size_free,
            life.start,
            _NEVER if life.end is None else life.end,
        )
        for life in timeline.lifetimes
    ]
    return infos, {node: step for step, node in enumerate(nodes)}, _last_users(timeline, nodes, buffers)


def peak_memory_from_buf_info_list(
    buf_info_list: list[BufferInfo],
    num_steps: int,
) -> tuple[int, list[int]]:
    """Return the peak, and memory while each step runs and after the last."""
    live = [memory for memory, _ in _memory_of(buf_info_list, num_steps)]
    return max(live), live


def live_memory_before_steps_from_buf_info_list(
    buf_info_list: list[BufferInfo],
    num_steps: int,
) -> list[int]:
    """Return memory before each step and after the last; inputs are there before the first."""
    inputs = [info.size_alloc for info in buf_info_list if isinstance(info.buffer, FreeableInputBuffer)]
    return [sum(inputs), *(memory for _, memory in _memory_of(buf_info_list, num_steps))][: num_steps + 1]


def estimate_peak_memory(
    nodes: list[BaseSchedulerNode],
    name_to_freeable_input_buf: dict[str, FreeableInputBuffer],
    graph_outputs: OrderedSet[str],
) -> tuple[int, list[int]]:
    """Return the peak of the nodes in this order, and memory while each runs and after the last."""
    timeline = _timeline(nodes, name_to_freeable_input_buf, graph_outputs)
    return timeline.peak_bytes, list(timeline.live_bytes)


def estimate_peak_memory_allocfree(
    nodes: list[BaseSchedulerNode],
    name_to_freeable_input_buf: dict[str, FreeableInputBuffer],
    graph_outputs: OrderedSet[str],
) -> tuple[
    int,
    list[tuple[int, int]],
    dict[BaseSchedulerNode, SNodeMemory],
    dict[FreeableInputBuffer | SchedulerBuffer, BaseSchedulerNode],
]:
    """Return the peak, memory after each node's allocation and release, both per node, and last users."""
    timeline = _timeline(nodes, name_to_freeable_input_buf, graph_outputs)
    buffers = _buffers(nodes, name_to_freeable_input_buf)
    return (
        timeline.peak_bytes,
        list(zip(timeline.after_alloc, timeline.after_free)),
        {node: SNodeMemory(*sizes) for node, sizes in zip(nodes, timeline.allocated_and_freed)},
        _last_users(timeline, nodes, buffers),
    )


def estimate_region_peak_memory(
    nodes_in_window: Iterable[BaseSchedulerNode],
    *,
    region_start: int,
    region_end: int,
    step_of: Callable[[BaseSchedulerNode], int],
    graph_outputs: OrderedSet[str],
    cur_memory: int = 0,
) -> int:
    """Return the peak within some steps, in which the given nodes run at `step_of`.

    `cur_memory` is alive when the first of the steps begins. Nodes may share a step.
    """
    steps = range(region_start, region_end + 1)
    window: Nodes = list(nodes_in_window)
    at: Callable[[Any], int] = step_of
    lives: dict[str, Lifetime] = {}
    for node in window:
        if at(node) not in steps:
            raise PlanningError(
                f"node {node.get_name()!r} runs at step {at(node)}, "
                f"which is not between {region_start} and {region_end}."
            )
        # What the window does not make is alive when it begins, and counts when it is released.
        made = [(buffer, at(node), buffer.mpi_buffer.size_alloc) for buffer in node.get_outputs()]
        read = [(buffer, region_start, 0) for buffer in node.mpi_node.pred_buffers]
        for buffer, start, size_alloc in (*made, *read):
            end = max([start, *map(at, buffer.mpi_buffer.succ_nodes)])
            kept = buffer.get_name() in graph_outputs or end not in steps
            life = Lifetime(
                buffer.get_name(),
                size_alloc,
                buffer.mpi_buffer.size_free,
                start - region_start,
                None if kept else end - region_start,
                None,
            )
            if size_alloc or life.buffer not in lives:
                lives[life.buffer] = life
    memory = memory_over(allocated_and_freed(lives.values(), len(steps)), cur_memory)
    return max([cur_memory, *(after_alloc for after_alloc, _ in memory)])


def timeline_of(graph: BufferGraph, steps: Sequence[int]) -> OrderTimeline:
    """Return the timeline of an order of a graph's nodes; refuse what cannot run."""
    try:
        return order_timeline(graph, steps)
    except GraphError as error:
        raise PlanningError(str(error)) from None


def _timeline(nodes: Nodes, inputs: Mapping[str, Any], outputs: Collection[str]) -> OrderTimeline:
    return timeline_of(graph_of_nodes(nodes, inputs, outputs), range(len(nodes)))


def _buffers(nodes: Nodes, inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {**inputs, **{buffer.get_name(): buffer for node in nodes for buffer in node.get_outputs()}}


def _last_users(timeline: OrderTimeline, nodes: Nodes, buffers: dict[str, Any]) -> dict[Any, Any]:
    return {buffers[life.buffer]: nodes[life.end] for life in timeline.lifetimes if life.end is not None}


def _memory_of(infos: list[BufferInfo], steps: int) -> list[tuple[int, int]]:
    """Return memory after allocation and after release of each step, and once more after all of them."""
    if steps < 0:
        raise IndexError(f"there cannot be {steps} steps.")
    lives = []
    for info in infos:
        start, end = info.start_step, info.end_step
        if not 0 <= start < max(steps, 1) or not _NEVER <= end < steps or _NEVER < end < start:
            raise IndexError(f"a buffer lives from step {start} to step {end}, but there are {steps} steps.")
        last = None if end == _NEVER else end
        lives.append(Lifetime("", info.size_alloc, info.size_free, start, last, None))
    return memory_over(allocated_and_freed(lives, steps + 1))
