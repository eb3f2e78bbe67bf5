"""The invariants of a trace, each stated in words and checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from trainfit.errors import OptionError
from trainfit.traces.assumptions import ASSUMPTION_KINDS, Assumption
from trainfit.traces.settings import is_sound
from trainfit.traces.trace import (
    CATEGORIES,
    EXCHANGES,
    HOLDERS,
    PHASES,
    TF32_KINDS,
    WORK_SOURCES,
    WORKSPACE_SOURCES,
    Module,
    ModuleCall,
    Op,
    Signature,
    Storage,
    Trace,
)

LARGEST_TOTAL_BYTES = (1 << 63) - 1
"""The simulator counts in 64 bits."""


def largest_total_bytes(trace: Trace) -> int:
    """Return what all storages and the largest workspace take together: no moment needs more."""
    workspace = max((signature.workspace_bytes for signature in trace.signatures), default=0)
    sizes = (max((s.bytes, *(size for _, size in s.resizes))) for s in trace.storages)
    return workspace + sum(map(trace.memory.occupied, sizes))


class BrokenTrace(AssertionError):
    """An invariant does not hold: a mistake of whoever made the trace."""


def check(trace: Trace) -> None:
    """Raise `BrokenTrace` with the first invariant that does not hold."""
    orders = (trace.forward_post_order, trace.backward_pre_order, trace.backward_post_order)
    tables: list[tuple[str, Sequence[Any], Callable[[Trace, int, Any], None]]] = [
        ("signature", trace.signatures, _signature),
        ("module", trace.modules, partial(_module, set())),
        ("call", trace.calls, _call),
        ("op", trace.ops, _op),
        ("storage", trace.storages, _storage),
        ("order", orders, _order),
        ("assumption", trace.assumptions, _assumption),
    ]
    for what, table, family in tables:
        for number, entry in enumerate(table):
            try:
                family(trace, number, entry)
            except BrokenTrace as error:
                error.args = (f"{what} {number}: {error}",)
                raise
    _steps(trace)
    _totals(trace)


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise BrokenTrace(sentence)


def _in_table(number: int, table: tuple[object, ...]) -> bool:
    return 0 <= number < len(table)


def _in_table_or_none(number: int, table: tuple[object, ...]) -> bool:
    return -1 <= number < len(table)


def _signature(trace: Trace, number: int, signature: Signature) -> None:
    _require(bool(signature.name), "every signature has a name")
    _require(signature.workspace_bytes >= 0, "workspaces are not negative")
    known = signature.workspace_source in WORKSPACE_SOURCES
    _require(known, "the source of a workspace is none, formula, measured or unknown")
    _require(min(signature.flops, signature.moved_bytes) >= 0, "work is not negative")
    known = signature.work_source in WORK_SOURCES
    _require(known, "work is counted by nobody, the registry, a formula or its traffic")
    exchanged = signature.collective
    sound = exchanged is None or (
        bool(exchanged.kind and exchanged.group) and exchanged.group_size > 0 <= exchanged.bytes
    )
    _require(sound, "a collective has a kind, a group of at least one, and bytes from zero on")
    if exchanged is not None and exchanged.ranks:
        sizes = [
            (last - first) // step + 1 if first >= 0 and step > 0 else 0
            for first, last, step in exchanged.ranks
        ]
        sound = min(sizes) > 0 and sum(sizes) == exchanged.group_size
        _require(sound, "a collective's group has as many ranks as are listed")


def _module(names: set[str], trace: Trace, number: int, module: Module) -> None:
    _require(module.name not in names, "module names are unique")
    names.add(module.name)
    _require(-1 <= module.parent < number, "a parent comes before its children")
    owns = (*module.parameters, *module.buffers, *module.gathered)
    owned = (_in_table(storage, trace.storages) for storage in owns)
    _require(all(owned), "what it owns is in the table of storages")


def _call(trace: Trace, number: int, call: ModuleCall) -> None:
    end = len(trace.ops)
    _require(_in_table(call.module, trace.modules), "every call is the call of a module")
    _require(-1 <= call.parent < number, "the calling module's call comes first")
    forward = 0 <= call.forward_start <= call.forward_end <= end
    _require(forward, "forward begins before it ends, within the step")
    backward = -1 <= call.backward_start <= call.backward_end <= end
    backward = backward and (call.backward_start < 0) == (call.backward_end < 0)
    _require(backward, "backward begins before it ends, within the step")
    hooks = (call.body_start < 0) == (call.body_end < 0)
    body = call.body
    hooks = hooks and call.forward_start <= body.start <= body.stop <= call.forward_end
    _require(hooks, "what a module does itself lies between what its hooks do")
    if call.parent >= 0:
        parent = trace.calls[call.parent]
        inside = parent.forward_start <= call.forward_start and call.forward_end <= parent.forward_end
        _require(inside, "a call lies within the call that made it")


def _op(trace: Trace, number: int, op: Op) -> None:
    _require(_in_table(op.signature, trace.signatures), "every op has a signature")
    _require(op.phase in PHASES, "the phase is forward, backward or optimizer")
    _require(_in_table_or_none(op.module, trace.modules), "its module is in the table")
    _require(_in_table_or_none(op.call, trace.calls), "its module call is in the table")
    _require(-1 <= op.forward_op < number, "what it differentiates ran before it")
    _require(op.phase == "backward" or not op.recompute, "recomputation happens in backward")
    only_reads = not op.creates and not op.writes
    _require(only_reads or not op.reads_value, "what shows values to Python does nothing else")
    _require(bool(op.queue), "its queue has a name")
    _require(op.exchange in EXCHANGES, "a unit gathers, fills, reduces, or has other hooks")
    _require(min(op.wrapped, op.converted) >= 0, "a number of calls is not negative")
    for other in op.waits_for:
        before = -len(trace.ops) <= other < number and trace.ops[other].queue != op.queue
        _require(before, "what it waits for is on another queue, and was issued before it")
    for storage in (*op.reads, *op.writes, *op.creates):
        _require(_in_table(storage, trace.storages), "its storages are in the table")
        _require(trace.storages[storage].alive_at(number), "what it uses is alive while it runs")
    for storage in op.creates:
        _require(trace.storages[storage].producer == number, "it is the producer of what it creates")


def _storage(trace: Trace, number: int, storage: Storage) -> None:
    end = len(trace.ops)
    _require(storage.bytes >= 0, "its bytes are not negative")
    _require(storage.category in CATEGORIES, "its category is one of the eight")
    _require(-1 <= storage.start <= end, "it begins within the step or before")
    ends = storage.end is None or max(storage.start, 0) <= storage.end <= end
    _require(ends, "it ends after it begins, within the step")
    produced = storage.producer == -1 or 0 <= storage.producer == storage.start < end
    _require(produced, "it begins when its producer runs")
    born = storage.born == -1 or (storage.persistent and 0 <= storage.born <= end)
    _require(born, "what the first step makes is there before the others, and made within the step")
    if storage.resizes:
        times = [time for time, _ in storage.resizes]
        times = [max(storage.start, 0), *times, end if storage.end is None else storage.end]
        _require(times == sorted(times), "it is resized during the step, while it is alive, in order")
        _require(min(size for _, size in storage.resizes) >= 0, "its new sizes are not negative")
    _require(storage.category == "parameter" or not storage.gathered, "what is gathered is a parameter")
    _require(bool(storage.stream), "its stream has a name")
    _require(storage.stream not in storage.also_used_on, "what else uses it are other streams")
    _require(bool(storage.holders), "somebody holds every storage")
    last = 0.0
    for interval in storage.holders:
        known = interval.holder in HOLDERS
        _require(known, "a holder is the program, autograd, a gradient or an optimizer")
        let_go = math.inf if interval.end is None else interval.end
        begins = storage.start <= interval.start <= let_go
        _require(begins, "a holder begins with the storage or later, and ends after it begins")
        last = max(last, let_go)
    freed = math.inf if storage.end is None else storage.end
    _require(last == freed, "it is free when its last holder lets go")


def _order(trace: Trace, number: int, order: tuple[int, ...]) -> None:
    _require(len(set(order)) == len(order), "every call occurs at most once")
    _require(all(_in_table(call, trace.calls) for call in order), "its calls are in the table")


def _assumption(trace: Trace, number: int, assumption: Assumption) -> None:
    known = assumption.kind in ASSUMPTION_KINDS and bool(assumption.text)
    _require(known, "it has a text, and is of a kind that is known")


def _steps(trace: Trace) -> None:
    steps = trace.steps
    run = f"run {steps.recorded}:"
    _require(_in_table_or_none(trace.model, trace.modules), f"model {trace.model}: it is in the table")
    _require(1 <= steps.first <= steps.recorded, f"{run} the recorded run is one of those that count")
    seen = not steps.peaks or steps.recorded <= len(steps.peaks)
    _require(seen, f"{run} the recorded run is one of those that were looked at")
    _require(min(steps.peaks, default=0) >= 0, f"{run} peaks are not negative")
    _require(steps.kinds >= 1, f"{run} runs take at least one course")
    grows = all(growth.bytes_per_step > 0 for growth in steps.grows)
    _require(grows, f"{run} what grows, grows by something")


def _is_sound_cluster(trace: Trace) -> bool:
    try:
        if trace.cluster is not None:
            trace.cluster.check()
    except OptionError:
        return False
    return True


def _totals(trace: Trace) -> None:
    from trainfit.traces.simulate import simulate

    known = all(_in_table(storage, trace.storages) for storage in trace.releases)
    _require(known, f"release {len(trace.releases)}: what is freed is in the table")
    same = set(trace.backward_pre_order) == set(trace.backward_post_order)
    _require(same, "order 1: a call whose backward begins also ends it")
    largest = largest_total_bytes(trace)
    _require(largest <= LARGEST_TOTAL_BYTES, f"total {largest}: all bytes can be counted in 64 bits")
    for count in (trace.samples, trace.tokens):
        sound = count is None or count > 0
        _require(sound, f"count {count or 0}: samples and tokens are above zero or unknown")
    _require(_is_sound_cluster(trace), "cluster 0: its rank is one of its world, which its mesh divides")
    sound = is_sound(trace.settings)
    _require(sound, "settings 0: counts are from zero on, sizes above, and values are JSON text")
    kinds = set(trace.tf32) <= set(TF32_KINDS) and len(set(trace.tf32)) == len(trace.tf32)
    allowed = f"TF32 is allowed for some of {', '.join(TF32_KINDS)}, once each"
    _require(kinds, f"kinds {len(trace.tf32)}: {allowed}")
    replayed = max(simulate(trace).live_bytes, default=trace.persistent_bytes)
    observed = trace.observed_peak_bytes
    same = observed is None or replayed == observed
    _require(same, f"peak {replayed}: the replay equals what the recorder saw ({observed})")
