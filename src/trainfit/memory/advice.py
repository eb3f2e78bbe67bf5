"""What would lower the peak of a step, with bytes from its own trace; each figure says how sure it is.

`computed`: the peak of this trace if just these storages were not there. `bound`: no plan gets below it.
`about`: scaled, not captured; capture the changed step to know.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from trainfit.basics.units import format_bytes
from trainfit.operators.families import list_kind
from trainfit.traces.simulate import Timeline
from trainfit.traces.trace import Storage, Trace

_LEAST_SHARE = 0.01
"""What frees less of the peak than this is not worth saying."""
_HAS_FUSED = ("Adam", "AdamW", "SGD", "Adagrad")
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
    """`computed`, `bound` or `about`."""
    changes_results: bool


def advice(timeline: Timeline, *, planned: bool = False) -> tuple[Advice, ...]:
    """Return what would lower the peak, the most first. If the step is planned, recomputation is used up."""
    found = [_kernels(timeline, planned=planned), _state(timeline), _dtype(timeline), _batch(timeline)]
    if not planned:
        found.append(_plan(timeline))
    least = _LEAST_SHARE * timeline.peak_bytes
    worth = [one for one in found if one is not None and timeline.peak_bytes - one.peak_bytes >= least]
    return tuple(sorted(worth, key=lambda one: one.peak_bytes))


def _plan(timeline: Timeline) -> Advice | None:
    """What autograd alone keeps alive could be recomputed."""
    now = timeline.peak_op
    spans = _kept_for_backward(timeline)
    freed = sum(size for start, end, size in spans if start <= now and (end is None or now < end))
    least = _peak_without(timeline, spans)
    text = (
        f"plan: {format_bytes(freed)} of it are kept for backward and could be recomputed; trainfit plan "
        f"finds the fastest way. No plan gets below {format_bytes(least)}."
    )
    return Advice("plan", text, freed, least, "bound", changes_results=False) if freed else None


def _kept_for_backward(timeline: Timeline) -> list[_Span]:
    return [
        span
        for storage in timeline.trace.storages
        if storage.category == "activation"
        for span in _held_by_autograd_alone(timeline.trace, storage)
    ]


def _kernels(timeline: Timeline, *, planned: bool) -> Advice | None:
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
    fused = any(name in _HAS_FUSED for name in (trace.settings.optimizer_class or "").split("+"))
    # One parameter at a time makes its results one after another; a fused kernel makes none at all.
    spans = [_span(trace, storage) for storage in made]
    left = _peak_without(timeline, spans + (_kept_for_backward(timeline) if planned else []))
    left += 0 if fused else trace.memory.occupied(max(storage.bytes for storage in alive))
    way = "fused=True" if fused else "foreach=False"
    leaves = "lets a plan get lower, not below" if planned else "leaves a peak of"
    text = (
        f"optimizer kernels: {format_bytes(freed)} of it are temporaries of {names.most_common(1)[0][0]}, "
        f"which works on all parameters at once; the optimizer's {way} {leaves} {format_bytes(left)}."
    )
    certainty = "bound" if planned else "computed"
    return Advice("optimizer kernels", text, freed, left, certainty, changes_results=False)


def _state(timeline: Timeline) -> Advice | None:
    trace = timeline.trace
    state = [storage for storage in trace.storages if storage.category == "optimizer_state"]
    freed = timeline.peak_by_category["optimizer_state"]
    left = _peak_without(timeline, [_span(trace, storage) for storage in state])
    # Moments are stored as the parameters are.
    smaller = {"fp32": 4, "bf16-autocast": 4, "fp16-autocast": 4, "bf16": 2}.get(trace.settings.dtype or "")
    eight_bit = f", 8-bit moments about {format_bytes(left + freed // smaller)}" if smaller else ""
    text = (
        f"optimizer state: {format_bytes(freed)}; an optimizer without state (SGD without momentum) leaves "
        f"{format_bytes(left)}{eight_bit}."
    )
    return Advice("optimizer state", text, freed, left, "computed", changes_results=True) if freed else None


def _dtype(timeline: Timeline) -> Advice | None:
    """Parameters in 16 bits halve what goes with them."""
    if timeline.trace.settings.dtype not in ("fp32", "bf16-autocast", "fp16-autocast"):
        return None
    by_category = timeline.peak_by_category
    freed = sum(by_category[name] for name in ("parameter", "gradient", "optimizer_state")) // 2
    left = timeline.peak_bytes - freed
    text = (
        f"dtype: parameters in bf16 halve them, their gradients and the optimizer's state: about "
        f"{format_bytes(freed)} less, at the cost of precision."
    )
    return Advice("dtype", text, freed, left, "about", changes_results=True) if freed else None


def _batch(timeline: Timeline) -> Advice | None:
    by_category = timeline.peak_by_category
    batch = timeline.trace.settings.batch
    if batch == 1:
        return None
    freed = (by_category["activation"] + by_category["input"]) // 2
    left = max(timeline.peak_bytes - freed, timeline.persistent_bytes)
    half = f" ({batch // 2} instead of {batch})" if batch is not None else ""
    text = (
        f"batch: half of it{half} frees about {format_bytes(freed)}, half of the activations and inputs at "
        "the peak; accumulate gradients over two of them to train on as many samples."
    )
    return Advice("batch", text, freed, left, "about", changes_results=False) if freed else None


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
