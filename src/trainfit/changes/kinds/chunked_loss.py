"""Logits and loss of a part of the tokens at a time: the logits of all of them are never there together.

With a large vocabulary they, and their gradient in float32, are often the largest tensors of a step.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainfit.changes.change import StepChange
from trainfit.changes.chunked_head import chunk_loss
from trainfit.changes.unchanged_step import UnchangedStep
from trainfit.plans.ways import APPLIED, SAME_ARITHMETIC, ChangeMade
from trainfit.steps.step import Step

IN_CHUNKS = "in chunks"
_LOSSES = ("aten._log_softmax.default",)


def changes(step: UnchangedStep) -> Iterator[StepChange]:
    """Yield it where the step has a cross-entropy."""
    if any(signature.name in _LOSSES for signature in step.trace.signatures):
        made = ChangeMade("loss", IN_CHUNKS, APPLIED, SAME_ARITHMETIC, by_apply=True)
        yield StepChange(made, make=_in_chunks)


def _in_chunks(step: Step) -> Step:
    chunk_loss(step.model)
    return step
