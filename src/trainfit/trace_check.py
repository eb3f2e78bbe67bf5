"""The invariants of a trace, each stated in words and checked."""

from __future__ import annotations

from collections.abc import Callable

from trainfit.trace import CATEGORIES, HOLDERS, PHASES, WORKSPACE_SOURCES, Op, Storage, Trace


class BrokenTrace(AssertionError):
    """An invariant does not hold: a mistake of whoever made the trace."""


def check(trace: Trace) -> None:
    """Raise `BrokenTrace` with the first invariant that does not hold."""
    for family in (_signatures, _modules, _calls, _ops, _storages, _orders, _totals):
        family(trace)


def _require(condition: bool, sentence: Callable[[], str]) -> None:
    if not condition:
        raise BrokenTrace(sentence())


def _in_table(number: int, table: tuple[object, ...], allow_none: bool = True) -> bool:
    return (-1 if allow_none else 0) <= number < len(table)


def _signatures(trace: Trace) -> None:
    for number, signature in enumerate(trace.signatures):
        where = f"signature {number} ({signature.name})"
        _require(bool(signature.name), lambda w=where: f"{w}: every signature has a name")
        _require(signature.workspace_bytes >= 0, lambda w=where: f"{w}: workspaces are not negative")
        _require(
            signature.workspace_source in WORKSPACE_SOURCES,
            lambda w=where: f"{w}: the source of a workspace is one of {WORKSPACE_SOURCES}",
        )


def _modules(trace: Trace) -> None:
    names: set[str] = set()
    for number, module in enumerate(trace.modules):
        where = f"module {number} ({module.name})"
        _require(module.name not in names, lambda w=where: f"{w}: module names are unique")
        names.add(module.name)
        _require(-1 <= module.parent < number, lambda w=where: f"{w}: a parent comes before its children")
        sizes = min(module.parameter_bytes, module.buffer_bytes)
        _require(sizes >= 0, lambda w=where: f"{w}: bytes are not negative")


def _calls(trace: Trace) -> None:
    end = len(trace.ops)
    for number, call in enumerate(trace.calls):
        where = f"call {number}"
        _require(
            _in_table(call.module, trace.modules, allow_none=False),
            lambda w=where: f"{w}: every call is the call of a module",
        )
        _require(-1 <= call.parent < number, lambda w=where: f"{w}: the calling module's call comes first")
        _require(
            0 <= call.forward_start <= call.forward_end <= end,
            lambda w=where: f"{w}: forward begins before it ends, within the step",
        )
        _require(
            -1 <= call.backward_start <= call.backward_end <= end,
            lambda w=where: f"{w}: backward begins before it ends, within the step",
        )
        if call.parent >= 0:
            parent = trace.calls[call.parent]
            _require(
                parent.forward_start <= call.forward_start and call.forward_end <= parent.forward_end,
                lambda w=where: f"{w}: a call lies within the call that made it",
            )


def _ops(trace: Trace) -> None:
    for number, op in enumerate(trace.ops):
        where = f"op {number}"
        _require(
            _in_table(op.signature, trace.signatures, allow_none=False),
            lambda w=where: f"{w}: every op has a signature",
        )
        _require(op.phase in PHASES, lambda w=where: f"{w}: the phase is one of {PHASES}")
        _require(_in_table(op.module, trace.modules), lambda w=where: f"{w}: its module is in the table")
        _require(_in_table(op.call, trace.calls), lambda w=where: f"{w}: its module call is in the table")
        _require(
            -1 <= op.forward_op < number, lambda w=where: f"{w}: what it differentiates ran before it"
        )
        _require(
            op.phase == "backward" or not op.recompute,
            lambda w=where: f"{w}: recomputation happens in backward",
        )
        _op_storages(trace, number, op)


def _op_storages(trace: Trace, number: int, op: Op) -> None:
    for storage in (*op.reads, *op.writes, *op.creates):
        _require(
            _in_table(storage, trace.storages, allow_none=False),
            lambda: f"op {number}: its storages are in the table",
        )
        entry = trace.storages[storage]
        _require(
            entry.start <= number and (entry.end is None or number < entry.end),
            lambda s=storage: f"op {number}: storage {s} is alive while the op uses it",
        )
    for storage in op.creates:
        _require(
            trace.storages[storage].producer == number,
            lambda s=storage: f"op {number}: it is the producer of storage {s} that it creates",
        )


def _storages(trace: Trace) -> None:
    end = len(trace.ops)
    for number, storage in enumerate(trace.storages):
        where = f"storage {number}"
        _require(storage.bytes >= 0, lambda w=where: f"{w}: bytes are not negative")
        _require(
            storage.category in CATEGORIES, lambda w=where: f"{w}: the category is one of {CATEGORIES}"
        )
        _require(-1 <= storage.start <= end, lambda w=where: f"{w}: it begins within the step or before")
        _require(
            storage.end is None or storage.start <= storage.end <= end,
            lambda w=where: f"{w}: it ends after it begins, within the step",
        )
        _require(
            -1 <= storage.producer < end and (storage.producer < 0 or storage.start == storage.producer),
            lambda w=where: f"{w}: it begins when its producer runs",
        )
        _holders(trace, where, storage)


def _holders(trace: Trace, where: str, storage: Storage) -> None:
    _require(bool(storage.holders), lambda: f"{where}: somebody holds every storage")
    ends: list[float] = []
    for interval in storage.holders:
        _require(interval.holder in HOLDERS, lambda: f"{where}: the holder is one of {HOLDERS}")
        _require(
            storage.start <= interval.start and (interval.end is None or interval.start <= interval.end),
            lambda: f"{where}: a holder begins with the storage or later, and ends after it begins",
        )
        ends.append(float("inf") if interval.end is None else interval.end)
    last = float("inf") if storage.end is None else storage.end
    _require(max(ends) == last, lambda: f"{where}: it is free when its last holder lets go")


def _orders(trace: Trace) -> None:
    for name in ("forward_post_order", "backward_pre_order", "backward_post_order"):
        order: tuple[int, ...] = getattr(trace, name)
        _require(len(set(order)) == len(order), lambda n=name: f"{n}: every call occurs at most once")
        _require(
            all(_in_table(call, trace.calls, allow_none=False) for call in order),
            lambda n=name: f"{n}: its calls are in the table",
        )
    _require(
        set(trace.backward_pre_order) == set(trace.backward_post_order),
        lambda: "a call whose backward begins also ends it",
    )


def _totals(trace: Trace) -> None:
    from trainfit.simulate import simulate

    _require(
        max(simulate(trace).live_bytes, default=trace.persistent_bytes) == trace.observed_peak_bytes,
        lambda: "the replayed peak equals the peak that the recorder saw",
    )
