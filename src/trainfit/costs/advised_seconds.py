"""How long a step would take with half of its batch, or in 16 bits: what advice about its peak costs.

With half a batch the ops that work on it take the device half as long, and the host as long as before. In 16
bits the derived trace is priced like any other; what the model casts to float32 itself is not in it.
"""

from __future__ import annotations

import numpy as np

from trainfit.costs.roofline import roofline_costs
from trainfit.costs.schedule import Schedule, schedule, with_device_seconds
from trainfit.memory.advice import AdvisedSeconds
from trainfit.memory.changed_steps import in_sixteen_bits, storages_of_batch


def advised_seconds(times: Schedule) -> AdvisedSeconds:
    """Return what changing a step makes of its time."""
    forward = np.array([op.phase == "forward" for op in times.trace.ops], dtype=np.bool_)
    return AdvisedSeconds(
        step=times.step_seconds,
        forward=float(times.device_seconds[forward].sum()),
        half_batch=_half_batch(times),
        sixteen_bits=_sixteen_bits(times),
    )


def _half_batch(times: Schedule) -> float:
    trace, of_batch = times.trace, storages_of_batch(times.trace)
    batch = trace.settings.batch or 2
    works_on_it = np.array(
        [
            op.phase != "optimizer" and not of_batch.isdisjoint((*op.reads, *op.writes, *op.creates))
            for op in trace.ops
        ],
        dtype=np.bool_,
    )
    share = batch // 2 / batch
    return with_device_seconds(times, np.where(works_on_it, share, 1.0) * times.device_seconds).step_seconds


def _sixteen_bits(times: Schedule) -> float | None:
    """Return the time of the derived trace; on a GPU only, whose speed in 16 bits is in its table."""
    device = times.costs.device
    if device.kind != "cuda" or "bf16" not in device.flops:
        return None
    changed = in_sixteen_bits(times.trace)
    return schedule(changed, roofline_costs(changed, device)).step_seconds
