"""The least that is copied over the link, known before a step is captured with what copies it."""

from __future__ import annotations

from trainfit.changes.unchanged_step import UnchangedStep

_NARROWED = 0.5
"""What bf16 makes of float32: a step that is not in it may be changed to it, too."""
_LEAST_BYTES = 1024
"""A counter of steps is one number, which stays where it is."""


def least_state_bytes(step: UnchangedStep) -> int:
    """Return what the optimizer keeps for its parameters, whatever else is changed."""
    kept = [storage.bytes for storage in step.trace.storages if storage.category == "optimizer_state"]
    return _narrowed(step, sum(size for size in kept if size >= _LEAST_BYTES))


def least_updated_bytes(step: UnchangedStep, least_share: float) -> int:
    """Return the parameters that are updated, without small ones, whatever else is changed.

    They are as large as the gradients that the optimizer reads.
    """
    storages = step.trace.storages
    whole = sum(storage.bytes for storage in storages if storage.category == "parameter")
    read = {number for op in step.trace.ops if op.phase == "optimizer" for number in op.reads}
    gradients = [storages[number].bytes for number in read if storages[number].category == "gradient"]
    return _narrowed(step, sum(size for size in gradients if size >= least_share * whole))


def _narrowed(step: UnchangedStep, size: int) -> int:
    if step.device.kind != "cuda":
        return 0  # a CPU copies by itself: nothing is known about a link
    return size if step.settings.dtype == "bf16" else int(_NARROWED * size)
