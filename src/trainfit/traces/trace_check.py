"""The invariants of a trace, each stated in words and checked."""

from __future__ import annotations

from trainfit.traces.assumptions import ASSUMPTION_KINDS
from trainfit.traces.settings import is_sound
from trainfit.traces.trace import (
    CATEGORIES,
    HOLDERS,
    PHASES,
    TF32_KINDS,
    WORK_SOURCES,
    WORKSPACE_SOURCES,
    Op,
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
    for family in (_signatures, _modules, _calls, _ops, _storages, _orders, _steps, _totals):
        family(trace)


def _require(condition: bool, what: str, number: int, sentence: str) -> None:
    """Raise unless `condition`; the message is put together only then, because nearly all hold."""
    if not condition:
        raise BrokenTrace(f"{what} {number}: {sentence}")


def _in_table(number: int, table: tuple[object, ...]) -> bool:
    return 0 <= number < len(table)


def _in_table_or_none(number: int, table: tuple[object, ...]) -> bool:
    return -1 <= number < len(table)


def _signatures(trace: Trace) -> None:
    for number, signature in enumerate(trace.signatures):
        here = ("signature", number)
        _require(bool(signature.name), *here, "every signature has a name")
        _require(signature.workspace_bytes >= 0, *here, "workspaces are not negative")
        known = signature.workspace_source in WORKSPACE_SOURCES
        _require(known, *here, "the source of a workspace is none, formula, measured or unknown")
        _require(min(signature.flops, signature.moved_bytes) >= 0, *here, "work is not negative")
        known = signature.work_source in WORK_SOURCES
        _require(known, *here, "work is counted by nobody, the registry, a formula or its traffic")
        exchanged = signature.collective
        sound = exchanged is None or (
            bool(exchanged.kind and exchanged.group) and exchanged.group_size > 0 <= exchanged.bytes
        )
        _require(sound, *here, "a collective has a kind, a group of at least one, and bytes from zero on")


def _modules(trace: Trace) -> None:
    names: set[str] = set()
    for number, module in enumerate(trace.modules):
        here = ("module", number)
        _require(module.name not in names, *here, "module names are unique")
        names.add(module.name)
        _require(-1 <= module.parent < number, *here, "a parent comes before its children")
        owned = (_in_table(storage, trace.storages) for storage in (*module.parameters, *module.buffers))
        _require(all(owned), *here, "what it owns is in the table of storages")


def _calls(trace: Trace) -> None:
    end = len(trace.ops)
    for number, call in enumerate(trace.calls):
        here = ("call", number)
        _require(_in_table(call.module, trace.modules), *here, "every call is the call of a module")
        _require(-1 <= call.parent < number, *here, "the calling module's call comes first")
        forward = 0 <= call.forward_start <= call.forward_end <= end
        _require(forward, *here, "forward begins before it ends, within the step")
        backward = -1 <= call.backward_start <= call.backward_end <= end
        backward = backward and (call.backward_start < 0) == (call.backward_end < 0)
        _require(backward, *here, "backward begins before it ends, within the step")
        if call.parent >= 0:
            parent = trace.calls[call.parent]
            inside = parent.forward_start <= call.forward_start and call.forward_end <= parent.forward_end
            _require(inside, *here, "a call lies within the call that made it")


def _ops(trace: Trace) -> None:
    for number, op in enumerate(trace.ops):
        here = ("op", number)
        _require(_in_table(op.signature, trace.signatures), *here, "every op has a signature")
        _require(op.phase in PHASES, *here, "the phase is forward, backward or optimizer")
        _require(_in_table_or_none(op.module, trace.modules), *here, "its module is in the table")
        _require(_in_table_or_none(op.call, trace.calls), *here, "its module call is in the table")
        _require(-1 <= op.forward_op < number, *here, "what it differentiates ran before it")
        _require(op.phase == "backward" or not op.recompute, *here, "recomputation happens in backward")
        only_reads = not op.creates and not op.writes
        _require(only_reads or not op.reads_value, *here, "what shows values to Python does nothing else")
        _require(bool(op.queue), *here, "its queue has a name")
        for other in op.waits_for:
            before = 0 <= other < number and trace.ops[other].queue != op.queue
            _require(before, *here, "what it waits for is on another queue, and was issued before it")
        _op_storages(trace, number, op)


def _op_storages(trace: Trace, number: int, op: Op) -> None:
    here = ("op", number)
    for storage in (*op.reads, *op.writes, *op.creates):
        _require(_in_table(storage, trace.storages), *here, "its storages are in the table")
        entry = trace.storages[storage]
        alive = entry.start <= number and (entry.end is None or number < entry.end)
        _require(alive, *here, "what it uses is alive while it runs")
    for storage in op.creates:
        _require(trace.storages[storage].producer == number, *here, "it is the producer of what it creates")


def _storages(trace: Trace) -> None:
    end = len(trace.ops)
    for number, storage in enumerate(trace.storages):
        here = ("storage", number)
        _require(storage.bytes >= 0, *here, "its bytes are not negative")
        _require(storage.category in CATEGORIES, *here, "its category is one of the eight")
        _require(-1 <= storage.start <= end, *here, "it begins within the step or before")
        ends = storage.end is None or max(storage.start, 0) <= storage.end <= end
        _require(ends, *here, "it ends after it begins, within the step")
        produced = storage.producer == -1 or (
            0 <= storage.producer < end and storage.start == storage.producer
        )
        _require(produced, *here, "it begins when its producer runs")
        if storage.resizes:
            _resizes(number, storage, end)
        _holders(number, storage)
    known = all(_in_table(storage, trace.storages) for storage in trace.releases)
    _require(known, "release", len(trace.releases), "what is freed is in the table")


def _resizes(number: int, storage: Storage, end: int) -> None:
    here = ("storage", number)
    times = [time for time, _ in storage.resizes]
    first, last = max(storage.start, 0), end if storage.end is None else storage.end
    ordered = [first, *times, last] == sorted([first, *times, last])
    _require(ordered, *here, "it is resized during the step, while it is alive, in order")
    _require(min(size for _, size in storage.resizes) >= 0, *here, "its new sizes are not negative")


def _holders(number: int, storage: Storage) -> None:
    here = ("storage", number)
    _require(bool(storage.holders), *here, "somebody holds every storage")
    last = 0.0
    for interval in storage.holders:
        known = interval.holder in HOLDERS
        _require(known, *here, "a holder is the program, autograd, a gradient or an optimizer")
        end = float("inf") if interval.end is None else interval.end
        begins = storage.start <= interval.start <= end
        _require(begins, *here, "a holder begins with the storage or later, and ends after it begins")
        last = max(last, end)
    freed = float("inf") if storage.end is None else storage.end
    _require(last == freed, *here, "it is free when its last holder lets go")


def _orders(trace: Trace) -> None:
    orders = (trace.forward_post_order, trace.backward_pre_order, trace.backward_post_order)
    for number, order in enumerate(orders):
        here = ("order", number)
        _require(len(set(order)) == len(order), *here, "every call occurs at most once")
        _require(all(_in_table(call, trace.calls) for call in order), *here, "its calls are in the table")
    same = set(trace.backward_pre_order) == set(trace.backward_post_order)
    _require(same, "order", 1, "a call whose backward begins also ends it")


def _steps(trace: Trace) -> None:
    steps = trace.steps
    here = ("run", steps.recorded)
    _require(_in_table_or_none(trace.model, trace.modules), "model", trace.model, "it is in the table")
    _require(1 <= steps.first <= steps.recorded, *here, "the recorded run is one of those that count")
    seen = not steps.peaks or steps.recorded <= len(steps.peaks)
    _require(seen, *here, "the recorded run is one of those that were looked at")
    _require(min(steps.peaks, default=0) >= 0, *here, "peaks are not negative")
    _require(steps.kinds >= 1, *here, "runs take at least one course")
    grows = all(growth.bytes_per_step > 0 for growth in steps.grows)
    _require(grows, *here, "what grows, grows by something")


def _totals(trace: Trace) -> None:
    from trainfit.traces.simulate import simulate

    largest = largest_total_bytes(trace)
    _require(largest <= LARGEST_TOTAL_BYTES, "total", largest, "all bytes can be counted in 64 bits")
    replayed = max(simulate(trace).live_bytes, default=trace.persistent_bytes)
    for count in (trace.samples, trace.tokens):
        _require(
            count is None or count > 0, "count", count or 0, "samples and tokens are above zero or unknown"
        )
    sound = is_sound(trace.settings)
    _require(sound, "settings", 0, "counts are from zero on, sizes above, and values are JSON text")
    kinds = set(trace.tf32) <= set(TF32_KINDS) and len(set(trace.tf32)) == len(trace.tf32)
    _require(
        kinds, "kinds", len(trace.tf32), f"TF32 is allowed for some of {', '.join(TF32_KINDS)}, once each"
    )
    for number, assumption in enumerate(trace.assumptions):
        known = assumption.kind in ASSUMPTION_KINDS and bool(assumption.text)
        _require(known, "assumption", number, "it has a text, and is of a kind that is known")
    observed = trace.observed_peak_bytes
    same = observed is None or replayed == observed
    _require(same, "peak", replayed, f"the replay equals what the recorder saw ({observed})")
