"""What would lower the peak of a step, with the bytes and seconds that are left; each says how sure it is.

`captured`: a capture of the changed step. `computed`: the peak of this trace if just these storages were not
there. `bound`: no plan gets below it. `about`: derived from this trace (`changed_steps.py`), not captured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from trainfit.basics.units import format_bytes, format_seconds
from trainfit.memory.changed_steps import in_sixteen_bits, with_half_batch
from trainfit.operators.families import list_kind
from trainfit.traces.simulate import Timeline, simulate
from trainfit.traces.trace import Storage, Trace

_LEAST_SHARE = 0.01
"""What frees less of the peak than this is not worth saying."""
HAS_FUSED = ("Adam", "AdamW", "SGD", "Adagrad")
"""torch's optimizers with a fused kernel."""


@dataclass(frozen=True)
class Advice:
    """One thing that would lower the peak."""

    kind: str
    """`plan`, `optimizer kernels`, `optimizer state`, `dtype` or `batch`."""
    text: str
    freed_bytes: int
    """What of the peak it is about."""
    peak_bytes: int
    """The peak that is left."""
    certainty: str
    """`captured`, `computed`, `bound` or `about`."""
    changes_results: bool
    step_seconds: float | None = None
    """How long the changed step takes; None if that is not predicted. At most, for a plan (as far as it
    computes) and for another optimizer."""


@dataclass(frozen=True)
class ChangedStep:
    """What a capture of the changed step has."""

    peak_bytes: int
    step_seconds: float | None


@dataclass(frozen=True)
class AdvisedSeconds:
    """How long the step takes, as it is and changed."""

    step: float
    forward: float
    """What the device computes in forward."""
    half_batch: float
    sixteen_bits: float | None
    """Roughly; None if nothing is known about the device's speed in 16 bits."""


def advice(
    timeline: Timeline,
    *,
    planned: bool = False,
    seconds: AdvisedSeconds | None = None,
    sixteen_bits: ChangedStep | None = None,
) -> tuple[Advice, ...]:
    """Return what would lower the peak, the most first. If the step is planned, recomputation is used up.

    `sixteen_bits` is a capture of the step with 16-bit parameters, where there is one.
    """
    now = None if seconds is None else seconds.step
    found = [
        _kernels(timeline, now, planned=planned),
        _state(timeline, now),
        _dtype(timeline, seconds, sixteen_bits),
        _batch(timeline, seconds),
    ]
    if not planned:
        found.append(_plan(timeline, seconds))
    least = _LEAST_SHARE * timeline.peak_bytes
    worth = [one for one in found if one is not None and timeline.peak_bytes - one.peak_bytes >= least]
    return tuple(sorted(worth, key=lambda one: one.peak_bytes))


def _plan(timeline: Timeline, seconds: AdvisedSeconds | None) -> Advice | None:
    """What autograd alone keeps alive could be recomputed."""
    now = timeline.peak_op
    spans = _kept_for_backward(timeline)
    freed = sum(size for start, end, size in spans if start <= now and (end is None or now < end))
    if not freed:
        return None
    least = _peak_without(timeline, spans)
    most = None if seconds is None else seconds.step + seconds.forward
    adds = "" if seconds is None else f", nor computes more than {format_seconds(seconds.forward)} again"
    text = (
        f"plan: {format_bytes(freed)} of it are kept for backward and could be recomputed; trainfit plan "
        f"finds the fastest way. No plan gets below {format_bytes(least)}{adds}."
    )
    return Advice("plan", text, freed, least, "bound", changes_results=False, step_seconds=most)


def _kept_for_backward(timeline: Timeline) -> list[_Span]:
    return [
        span
        for storage in timeline.trace.storages
        if storage.category == "activation"
        for span in _held_by_autograd_alone(timeline.trace, storage)
    ]


def _kernels(timeline: Timeline, step_seconds: float | None, *, planned: bool) -> Advice | None:
    """A foreach optimizer makes results of all parameters at once; a fused one makes none.

    The fused kernel's own counts of steps, a block for each parameter, are not in the figure. A plan that
    was made beside these results saves no more than they leave it reason to: without them another may.
    """
    trace = timeline.trace
    made = [storage for storage in trace.storages if _is_of_foreach(trace, storage)]
    alive = [storage for storage in made if storage.alive_at(timeline.peak_op)]
    if not alive:
        return None
    names = Counter[str]()
    for storage in alive:
        names[trace.op_name(storage.producer)] += trace.memory.occupied(storage.bytes)
    freed = sum(names.values())
    fused = any(name in HAS_FUSED for name in (trace.settings.optimizer_class or "").split("+"))
    # One parameter at a time makes its results one after another; a fused kernel makes none at all.
    spans = [_span(trace, storage) for storage in made]
    left = _peak_without(timeline, spans + (_kept_for_backward(timeline) if planned else []))
    left += 0 if fused else trace.memory.occupied(max(storage.bytes for storage in alive))
    way = "fused=True" if fused else "foreach=False"
    leaves = "lets a plan get lower, not below" if planned else "leaves a peak of"
    text = (
        f"optimizer kernels: {format_bytes(freed)} of it are temporaries of {names.most_common(1)[0][0]}, "
        f"which works on all parameters at once; the optimizer's {way} {leaves} {format_bytes(left)}"
        f"{_no_longer(step_seconds if fused else None)}."
    )
    certainty = "bound" if planned else "computed"
    most = step_seconds if fused else None  # one parameter at a time takes many more kernels
    return Advice("optimizer kernels", text, freed, left, certainty, changes_results=False, step_seconds=most)


def _state(timeline: Timeline, step_seconds: float | None) -> Advice | None:
    trace = timeline.trace
    state = [storage for storage in trace.storages if storage.category == "optimizer_state"]
    freed = timeline.peak_by_category["optimizer_state"]
    if not freed:
        return None
    left = _peak_without(timeline, [_span(trace, storage) for storage in state])
    # Moments are stored as the parameters are.
    smaller = {"fp32": 4, "bf16-autocast": 4, "fp16-autocast": 4, "bf16": 2}.get(trace.settings.dtype or "")
    eight_bit = f", 8-bit moments about {format_bytes(left + freed // smaller)}" if smaller else ""
    text = (
        f"optimizer state: {format_bytes(freed)}; an optimizer without state (SGD without momentum) leaves "
        f"{format_bytes(left)}{eight_bit}{_no_longer(step_seconds)}."
    )
    return Advice(
        *("optimizer state", text, freed, left, "computed"), changes_results=True, step_seconds=step_seconds
    )


def _dtype(timeline: Timeline, seconds: AdvisedSeconds | None, captured: ChangedStep | None) -> Advice | None:
    """Parameters in 16 bits halve what goes with them, and mostly activations too."""
    if timeline.trace.settings.dtype not in ("fp32", "bf16-autocast", "fp16-autocast"):
        return None
    if captured is not None:
        left, step_seconds, certainty = captured.peak_bytes, captured.step_seconds, "captured"
        takes = "" if step_seconds is None else f" and takes {format_seconds(step_seconds)}"
        leaves = f"leaves {format_bytes(left)}{takes}, captured so"
    else:
        left = simulate(in_sixteen_bits(timeline.trace)).peak_bytes
        step_seconds, certainty = None if seconds is None else seconds.sixteen_bits, "about"
        takes = "" if step_seconds is None else f" and takes about {format_seconds(step_seconds)}"
        leaves = f"leaves about {format_bytes(left)}{takes}, more if it casts to float32 itself (as logits)"
    freed = timeline.peak_bytes - left
    text = f"dtype: the model in bf16 {leaves}; at the cost of precision."
    return Advice("dtype", text, freed, left, certainty, changes_results=True, step_seconds=step_seconds)


def _batch(timeline: Timeline, seconds: AdvisedSeconds | None) -> Advice | None:
    """Half of what is made of the batch; twice in a row, if gradients are accumulated."""
    batch = timeline.trace.settings.batch
    if batch == 1:
        return None
    left = simulate(with_half_batch(timeline.trace)).peak_bytes
    step_seconds = None if seconds is None else seconds.half_batch
    takes = "" if step_seconds is None else f" and takes about {format_seconds(step_seconds)}"
    half = f" ({batch // 2} instead of {batch})" if batch is not None else ""
    text = (
        f"batch: half of it{half} leaves about {format_bytes(left)}{takes}; accumulate gradients over two of "
        "them to train on as many samples."
    )
    freed = timeline.peak_bytes - left
    return Advice("batch", text, freed, left, "about", changes_results=False, step_seconds=step_seconds)


def _no_longer(step_seconds: float | None) -> str:
    return (
        "" if step_seconds is None else f"; the step takes at most the {format_seconds(step_seconds)} of now"
    )


def _held_by_autograd_alone(trace: Trace, storage: Storage) -> Iterator[_Span]:
    """Yield when the program has let go of a storage: between forward and its use in backward."""
    free_from, size = storage.start, trace.memory.occupied(storage.bytes)
    for interval in sorted(storage.held_by("program"), key=lambda interval: interval.start):
        if interval.start > free_from:
            yield free_from, interval.start, size
        if interval.end is None:
            return
        free_from = max(free_from, interval.end)
    if storage.end is None or free_from < storage.end:
        yield free_from, storage.end, size


def _is_of_foreach(trace: Trace, storage: Storage) -> bool:
    """Whether an optimizer's foreach operator made it, for as long as the optimizer runs."""
    if storage.producer < 0 or storage.category != "temporary":
        return False
    op = trace.ops[storage.producer]
    return op.phase == "optimizer" and list_kind(trace.op_name(storage.producer)) == "foreach"


_Span = tuple[int, int | None, int]
"""From when until before when (None: to the end) how many bytes."""


def _span(trace: Trace, storage: Storage) -> _Span:
    return storage.start, storage.end, trace.memory.occupied(storage.bytes)


def _peak_without(timeline: Timeline, spans: Iterable[_Span]) -> int:
    """Return the peak of the step if these bytes were not there."""
    ops = len(timeline.used_bytes)
    steps = np.zeros(ops + 1, dtype=np.int64)
    persistent = timeline.persistent_bytes
    for start, end, size in spans:
        persistent -= size if start < 0 else 0
        steps[min(max(start, 0), ops)] += size
        steps[ops if end is None else min(end, ops)] -= size
    return int((timeline.used_bytes - np.cumsum(steps)[:ops]).max(initial=persistent))
