"""What a step without stages says about those of a pipeline: where its ops and bytes would be.

What comes before the blocks is the first stage's, what comes behind them the last one's. Parameters are
gathered, and gradients exchanged, once in a step of a pipeline and not with every micro-batch: a block's
seconds are those without. Its bytes are those of one micro-batch: neither parameters nor gradients that wait,
but the gradient that an op has just computed, which is then added to one that waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainfit.costs.schedule import Schedule, with_device_seconds
from trainfit.planning.model_calls import block_families
from trainfit.sizing.rank_growth import group_dimensions
from trainfit.traces.simulate import Timeline
from trainfit.traces.trace import CATEGORIES, Trace

_COPIES = ("aten.split_with_sizes_copy.out", "aten._chunk_cat.out", "aten._foreach_copy_.default")
"""What FSDP copies parameters and gradients by, out of what is gathered and into what is reduced."""
_PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default")
_SHARING = ("fsdp", "replicate")
_NOT_OF_A_MICRO_BATCH = ("parameter", "buffer", "gradient", "optimizer_state", "communication")


@dataclass(frozen=True)
class StageMeasures:
    """Seconds and bytes of one micro-batch, by where they are."""

    forward_seconds: float = 0.0
    """Of the blocks."""
    backward_seconds: float = 0.0
    first_forward_seconds: float = 0.0
    """Of what comes before the blocks."""
    first_backward_seconds: float = 0.0
    last_forward_seconds: float = 0.0
    """Of what comes behind them."""
    last_backward_seconds: float = 0.0
    copy_seconds: float = 0.0
    """Of what FSDP copies in a step, on the queue that computes."""
    inside_bytes: float = 0.0
    """The most bytes of a micro-batch at once while blocks run."""
    outside_bytes: float = 0.0
    """The same while what is behind them runs."""
    begin_bytes: float = 0.0
    """What there is of a micro-batch when the first block begins, its input included."""
    output_bytes: float = 0.0
    """What the model returns, which a pipeline holds until the micro-batch is done."""
    first_gradient_bytes: float = 0.0
    """The largest gradient of what comes before the blocks, as backward makes it."""


def stage_measures(timeline: Timeline, times: Schedule) -> StageMeasures:
    """Read them off a step that was replayed; nothing is known of a model without blocks."""
    trace = timeline.trace
    calls = [trace.calls[number] for number in max(block_families(trace), key=len, default=[])]
    if not calls:
        return StageMeasures()
    copies, shared = _copies(trace), collectives_along(trace, _SHARING)
    clean = with_device_seconds(times, np.where(copies | shared, 0.0, times.device_seconds)).op_seconds
    number = np.arange(len(trace.ops))
    phase = np.array([op.phase for op in trace.ops])
    forward, backward = phase == "forward", phase == "backward"
    begin, end = min(c.forward_start for c in calls), max(c.forward_end for c in calls)
    ran = [c for c in calls if c.backward_start >= 0]
    back_begin = min((c.backward_start for c in ran), default=len(trace.ops))
    back_end = max((c.backward_end for c in ran), default=len(trace.ops))
    before, behind = number < begin, number >= end
    last_back, first_back = number < back_begin, number >= back_end

    def seconds(*masks: NDArray[np.bool_]) -> float:
        return float(clean[np.logical_and.reduce(masks)].sum())

    own = _micro_batch_bytes(timeline)
    inner = (forward & ~before & ~behind) | (backward & ~last_back & ~first_back)
    outer = (forward & behind) | (backward & last_back)
    return StageMeasures(
        forward_seconds=seconds(forward, ~before, ~behind),
        backward_seconds=seconds(backward, ~last_back, ~first_back),
        first_forward_seconds=seconds(forward, before),
        first_backward_seconds=seconds(backward, first_back),
        last_forward_seconds=seconds(forward, behind),
        last_backward_seconds=seconds(backward, last_back),
        copy_seconds=float(times.device_seconds[copies].sum()),
        inside_bytes=float(own[inner].max(initial=0)),
        outside_bytes=float(own[outer].max(initial=0)),
        begin_bytes=float(own[max(begin - 1, 0)]),
        output_bytes=_output_bytes(trace, np.flatnonzero(forward & behind).tolist()),
        first_gradient_bytes=_largest_made(trace, np.flatnonzero(backward & first_back).tolist()),
    )


def _output_bytes(trace: Trace, behind: Sequence[int]) -> float:
    """Return the bytes of what the last product of forward makes, among ops behind the blocks."""
    products = [
        number for number in behind if trace.signatures[trace.ops[number].signature].name in _PRODUCTS
    ]
    return _largest_made(trace, products[-1:])


def _largest_made(trace: Trace, ops: Sequence[int]) -> float:
    """Return the bytes of the largest storage that some ops make."""
    made = (trace.storages[number].bytes for op in ops for number in trace.ops[op].creates)
    return float(max(made, default=0))


def _micro_batch_bytes(timeline: Timeline) -> NDArray[np.int64]:
    """Return, while each op runs, the bytes that belong to the micro-batch."""
    kept = [number for number, name in enumerate(CATEGORIES) if name not in _NOT_OF_A_MICRO_BATCH]
    gradients = timeline.by_category[CATEGORIES.index("gradient")]
    fresh = np.maximum(np.diff(gradients, prepend=gradients[:1]), 0)
    found: NDArray[np.int64] = timeline.by_category[kept].sum(axis=0) + timeline.workspace_bytes + fresh
    return found


def _copies(trace: Trace) -> NDArray[np.bool_]:
    named = [signature.name in _COPIES for signature in trace.signatures]
    return np.array([named[op.signature] and op.phase != "optimizer" for op in trace.ops], dtype=np.bool_)


def collectives_along(trace: Trace, dimensions: tuple[str, ...]) -> NDArray[np.bool_]:
    """Return which ops communicate along dimensions of the mesh; the first that a group lies along counts."""
    mesh = () if trace.cluster is None else trace.cluster.mesh
    inside = [
        signature.collective is not None
        and (group_dimensions(signature.collective, mesh) or ("",))[0] in dimensions
        for signature in trace.signatures
    ]
    return np.fromiter((inside[op.signature] for op in trace.ops), dtype=np.bool_, count=len(trace.ops))
