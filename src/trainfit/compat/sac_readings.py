"""From a trace to the statistics of selective checkpointing, as PyTorch lists them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from trainfit.compat.sac_records import MSPS, SACGreedyOrderMeta, SACStats
from trainfit.errors import OptionError
from trainfit.operators.fused_attention import draws_random_numbers
from trainfit.planning.modules.sac_stats import OpStats, SacStats, units_of
from trainfit.traces.trace import ModuleCall, Op, Storage, Trace

_SKIPPED = ("aten.detach.default", "aten.lift_fresh.default")


def stats_of(
    trace: Trace, call: ModuleCall, runtimes: Sequence[float], returned: frozenset[int], *, has_tensors: bool
) -> SACStats:
    """Return the statistics of one call of a module: milliseconds and bytes of each op of its forward.

    What the module returns is alive anyway: storing it takes nothing.
    """
    inside = range(call.forward_start, call.forward_end)
    numbers = [number for number in inside if not _is_autograds_own(trace, number)]
    made: dict[int, int] = {}
    """The first op that each storage is a result of."""
    stats = SACStats([], [], [], [], [], [], [], force_store_random=not has_tensors)
    for place, number in enumerate(numbers):
        op = trace.ops[number]
        signature = trace.signatures[op.signature]
        results = _results(op, view=signature.view)
        stats.func_names.append(signature.name.split(".")[1])
        stats.runtimes.append(runtimes[number])
        stats.memory.append(sum(trace.occupied_bytes[s] for s in op.creates if s not in returned))
        if signature.view:
            stats.view_like_ops.append(place)
        if draws_random_numbers(signature):
            stats.rand_ops.append(place)
        if results and all(_is_saved(trace.storages[s], call.forward_end) for s in results):
            stats.saved_autograd_ops.append(place)
        if op.writes and not signature.view:
            stats.inplace_ops.append((place, made.get(op.writes[0], place)))
        for storage in results:
            made.setdefault(storage, place)
    return stats


def _is_autograds_own(trace: Trace, number: int) -> bool:
    """Whether autograd calls an op for itself, so that a recomputation cannot tell it apart."""
    name = trace.op_name(number)
    if name == "aten.clone.default":  # what an in-place operator overwrites, for its backward
        readers = (reader for s in trace.ops[number].creates for reader in trace.readers[s])
        return not any(trace.ops[reader].phase == "forward" for reader in readers)
    return name in _SKIPPED


def _is_saved(storage: Storage, forward_end: int) -> bool:
    """Whether autograd has saved a storage before the module was done."""
    return any(hold.start < forward_end for hold in storage.held_by("autograd"))


def _results(op: Op, *, view: bool) -> tuple[int, ...]:
    """Return the storages that an op's results lie over."""
    return op.creates or op.writes or (op.reads[:1] if view else ())


def op_table(given: SACStats) -> SacStats:
    """Return statistics, torch's or ours, as the planner knows them."""
    count = len(given.func_names)
    if not len(given.runtimes) == len(given.memory) == count:
        raise OptionError(
            f"SACStats has {count} names, {len(given.runtimes)} runtimes and {len(given.memory)} sizes; "
            "there must be one of each per op."
        )
    pairs = [number for pair in given.inplace_ops for number in pair]
    for number in (*given.view_like_ops, *given.rand_ops, *pairs):
        if not 0 <= number < count:
            raise IndexError(f"SACStats names op {number}, but has {count} ops")
    leader = _leaders(count, given.inplace_ops)
    stored = {op for op, parent in given.inplace_ops if op == parent}
    # An op that overwrites a view's storage goes with the view, which is never saved.
    again = {leader[view] for view in given.view_like_ops}
    views, random = set(given.view_like_ops), set(given.rand_ops)
    ops = [
        OpStats(
            name=name,
            seconds=given.runtimes[number] / 1e3,
            bytes=given.memory[number],
            view=number in views,
            random=number in random,
            parent=leader[number] if leader[number] != number else None,
            storable=leader[number] not in again,
            repeatable=number not in stored,
        )
        for number, name in enumerate(given.func_names)
    ]
    return SacStats(tuple(ops), store_random=given.force_store_random)


def _leaders(count: int, pairs: Sequence[tuple[int, int]]) -> list[int]:
    """Return for each op the first of those that it shares a storage with."""
    leader = list(range(count))
    for one, other in pairs:
        first, second = sorted((leader[one], leader[other]))
        leader = [first if number == second else number for number in leader]
    return leader


def greedy_order_of(stats: SACStats) -> SACGreedyOrderMeta:
    """Return what is always recomputed or stored, and the rest in the order of bytes per millisecond."""
    table = op_table(stats)
    units = units_of(table)
    in_place = {op for op, _ in stats.inplace_ops}
    random = set(stats.rand_ops)
    order = SACGreedyOrderMeta(set(), set(), {}, {}, [])
    for unit in units:
        head, ops = unit.ops[0], set(unit.ops)
        if ops & in_place:
            order.inplace_op_groups[head] = ops
        if ops & random:
            order.random_ops_group[head] = ops & random
        must_store = any(not table.ops[op].repeatable for op in ops) or (
            stats.force_store_random and bool(ops & random)
        )
        if must_store:
            order.stored_ops.add(head)
        elif unit.always == "recompute":
            order.recomputed_ops.add(head)
        else:
            runtime = sum(stats.runtimes[op] for op in ops)
            rate = unit.bytes / runtime if runtime > 0 else sys.float_info.max
            order.msps_meta.append(
                MSPS({stats.func_names[op] for op in ops}, head, unit.bytes, runtime, rate)
            )
    order.msps_meta.sort(key=lambda one: one.msps, reverse=True)
    return order
