"""From what the recorder collected to a `Trace`: numbers instead of objects, a category for each storage."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from trainfit.capturing.categories import (
    Recording,
    categories_now,
    category_by_origin,
    lives_of,
    with_gathered,
    with_visitors,
)
from trainfit.capturing.describing import described, on_the_host
from trainfit.capturing.exchanges import CommunicationGroup, collective_of
from trainfit.capturing.ledger import LiveStorage
from trainfit.capturing.metadata import Call, NewTensor
from trainfit.capturing.recorder import BACKWARD, FORWARD
from trainfit.capturing.rows import Row
from trainfit.steps.step import Step
from trainfit.traces import arguments
from trainfit.traces import trace as t

if TYPE_CHECKING:
    from trainfit.capturing.session import Session


def assemble(session: Session, step: Step, target: str) -> t.Trace:
    """Make the trace of the step that the session has recorded."""
    # A step may replace tensors (`parameter.data = ...`, `zero_grad()` first): both ends are looked at.
    labels = categories_now(session, step) | session.categories_at_start
    trace = trace_of(session, labels, target)
    return replace(
        trace if session.cluster is None else with_gathered(trace, session),
        architecture=session.gpu.device.architecture if session.gpu.architecture_mattered else "",
        samples=step.samples,
        tokens=step.tokens,
        model=session.modules.index(step.model),
        cluster=session.cluster,
        settings=described(session.settings, step, session),
        assumptions=(*session.gpu.assumptions(), *on_the_host(step, session), *session.values.assumptions),
    )


def trace_of(recording: Recording, labels: dict[int, str], target: str) -> t.Trace:
    """Make the trace of what was recorded; `labels` has the categories that are known, by id of the entry."""
    recorder = recording.recorder
    rows = recorder.rows
    lives = recording.ledger.created
    for number, live in enumerate(lives):
        live.index = number
    signatures, signature_of = _signatures(rows)
    labels = with_visitors(labels, rows)
    categories = [labels.get(id(live)) or category_by_origin(live, rows) for live in lives]
    births = _births(lives, categories, rows)
    ops = tuple(
        t.Op(
            signature=signature_of[id(row.call)],
            phase=row.phase,
            module=row.module,
            call=row.module_call,
            recompute=row.recompute,
            forward_op=forward_op,
            reads=_numbers(row.reads),
            writes=_numbers(row.writes),
            creates=_numbers(row.creates),
            queue=row.queue,
            waits_for=recorder.queues.of_steady_step(row.waits_for),
            host_waits=row.host_waits,
            reads_value=row.reads_value,
            exchange=row.exchange,
            wrapped=row.wrapped,
            converted=row.converted,
        )
        for row, forward_op in zip(rows, _forward_ops(rows))
    )
    return t.Trace(
        target=target,
        device=recording.device,
        torch=torch.__version__,
        signatures=signatures,
        ops=ops,
        storages=tuple(
            _storage(live, category, born) for live, category, born in zip(lives, categories, births)
        ),
        modules=_modules(recording),
        calls=tuple(_call(call, len(rows)) for call in recorder.calls),
        forward_post_order=tuple(recorder.forward_post_order),
        backward_pre_order=tuple(recorder.backward_pre_order),
        backward_post_order=tuple(recorder.backward_post_order()),
        observed_peak_bytes=max((row.live_bytes for row in rows), default=recorder.start_bytes),
        releases=_numbers(live for live in recording.ledger.releases if live.nbytes or live.resizes),
        tf32=_tf32(),
    )


def _tf32() -> tuple[str, ...]:
    """Return which float32 products the step's own settings let a GPU round to TF32."""
    backends: dict[str, Any] = {"matmul": torch.backends.cuda.matmul, "convolution": torch.backends.cudnn}
    return tuple(kind for kind, backend in backends.items() if backend.allow_tf32)


def _numbers(lives: Iterable[LiveStorage]) -> tuple[int, ...]:
    return tuple([live.index for live in lives])


def _forward_ops(rows: list[Row]) -> Iterator[int]:
    """Yield for each op the forward op that made its autograd node, by sequence numbers, which only grow."""
    forward = [n for n, row in enumerate(rows) if row.phase is FORWARD or row.recompute]
    sequences = [rows[n].sequence for n in forward]
    for number, row in enumerate(rows):
        found = -1
        if row.phase is BACKWARD and not row.recompute and row.sequence >= 0:
            # A node takes its number just before its op is dispatched: the first op that sees a larger one.
            position = bisect.bisect_right(sequences, row.sequence)
            found = forward[position] if position < len(forward) else -1
        # Sequence numbers belong to a thread: a node of another thread is not found by them.
        yield found if found < number else -1


def _signatures(rows: list[Row]) -> tuple[tuple[t.Signature, ...], dict[int, int]]:
    table: dict[t.Signature, int] = {}
    number_of: dict[int, int] = {}
    for row in rows:
        if id(row.call) not in number_of:
            number_of[id(row.call)] = table.setdefault(signature_of(row.call), len(table))
    return tuple(table), number_of


def signature_of(call: Call) -> t.Signature:
    """Write a distinct operator call as plain data."""
    inputs: list[t.TensorSpec] = []
    positional: list[Any] = []
    keyword: dict[str, Any] = {}
    for part in call.key[1:]:
        if isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], str):
            keyword[part[0]] = _argument(part[1], inputs)
        else:
            positional.append(_argument(part, inputs))
    operator = call.operator
    return t.Signature(
        name=operator.name,
        inputs=tuple(inputs),
        outputs=tuple(_output_specs(call.outputs)),
        arguments=arguments.encode(positional, keyword),
        view=operator.is_view,
        in_place=bool(operator.mutated),
        random=operator.random,
        collective=collective_of(operator.name, call.key[1:]),
        workspace_bytes=call.workspace_bytes or 0,
        workspace_source="none" if call.workspace_bytes is None else "measured",
        over_link=call.over_link,
    )


def _argument(part: Any, inputs: list[t.TensorSpec]) -> Any:
    """Encode one part of a call's key as `arguments.py` describes."""
    if isinstance(part, tuple):
        if len(part) == 3 and isinstance(part[0], torch.dtype) and isinstance(part[1], torch.Size):
            stride = part[2] if isinstance(part[2], tuple) else ()
            inputs.append(t.TensorSpec(_dtype_name(part[0]), tuple(part[1]), stride))
            return {"tensor": len(inputs) - 1}
        if len(part) == 2 and isinstance(part[0], type):
            return _argument(part[1], inputs)
        return [_argument(item, inputs) for item in part]
    for kind in ("dtype", "layout", "memory_format", "device"):
        if isinstance(part, getattr(torch, kind)):
            return {kind: str(part).removeprefix("torch.")}
    if isinstance(part, CommunicationGroup):
        return {"group": part.name}
    if part is None or isinstance(part, bool | int | str):
        return part
    if isinstance(part, float | complex):
        return arguments.encode_number(part)
    return {"other": repr(part)}


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _output_specs(outputs: Iterable[Any]) -> Iterator[t.TensorSpec]:
    for output in outputs:
        if isinstance(output, NewTensor):
            yield t.TensorSpec(_dtype_name(output.dtype), tuple(output.size), output.stride)
        elif isinstance(output, list):
            yield from _output_specs(output)


def _births(lives: list[LiveStorage], categories: list[str], rows: list[Row]) -> Iterator[int]:
    """Yield for each storage before which op of a first step it would be made; -1: before that, or in it.

    The run in which it was made had the same ops, and those that made what has stayed since. A gradient that
    is never dropped was made where it is added to now.
    """
    stays = [live.start < 0 and live.end is None and live.born is not None for live in lives]
    made = {live.born for live, there in zip(lives, stays) if there and live.born is not None}
    extra = {phase: sorted(n for other, n in made if other == phase) for phase in t.PHASES}
    ops = {phase: [n for n, row in enumerate(rows) if row.phase == phase] for phase in t.PHASES}
    first_write: dict[int, int] = {}
    for number, row in enumerate(rows):
        for live in row.writes:
            first_write.setdefault(live.index, number)
    for number, (live, category) in enumerate(zip(lives, categories)):
        if not stays[number] or live.born is None:
            yield -1
        elif category == "gradient" and number in first_write:
            yield first_write[number]
        else:
            phase, before = live.born
            place = before - bisect.bisect_left(extra[phase], before)
            yield ops[phase][place] if place < len(ops[phase]) else max(ops[phase], default=-1) + 1


def _storage(live: LiveStorage, category: str, born: int) -> t.Storage:
    holders = [t.Interval("program", hold.start, hold.end) for hold in live.program]
    holders += [t.Interval("autograd", hold.start, hold.end) for hold in live.saved]
    if category == "gradient":
        since = live.start if live.gradient_since is None else live.gradient_since
        holders.append(t.Interval("gradient", since, live.end))
    if category == "optimizer_state":
        holders.append(t.Interval("optimizer", live.start, live.end))
    return t.Storage(
        bytes=live.initial_bytes,
        category=category,
        producer=live.producer_op,
        start=live.start,
        end=live.end,
        holders=tuple(holders),
        resizes=tuple(live.resizes),
        born=born,
        stream=live.stream,
        also_used_on=tuple(live.also_used_on),
    )


def _modules(recording: Recording) -> tuple[t.Module, ...]:
    seen: set[int] = set()

    def own(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
        lives = lives_of(recording, tensors)
        found = dict.fromkeys(live.index for live in lives if live.index not in seen)
        seen.update(found)
        return tuple(found)

    counted: set[int] = set()

    def whole(parameters: Iterable[torch.Tensor]) -> int:
        new = {id(p): p for p in parameters if id(p) not in counted}
        counted.update(new)
        return sum(p.numel() * p.element_size() for p in new.values())

    return tuple(
        t.Module(
            name=entry.name,
            class_name=entry.class_name,
            parent=entry.parent,
            parameters=own(entry.own_parameters),
            buffers=own(entry.own_buffers),
            whole_parameter_bytes=whole(entry.own_parameters),
        )
        for entry in recording.modules.entries
    )


def _call(call: Any, ops: int) -> t.ModuleCall:
    return t.ModuleCall(
        module=call.module,
        parent=call.parent,
        recompute=call.recompute,
        forward_start=call.forward_start,
        forward_end=call.forward_end if call.forward_end >= 0 else ops,
        backward_start=call.backward_start,
        backward_end=call.backward_end,
        body_start=call.body_start if call.body_end >= 0 else -1,
        body_end=call.body_end,
    )
