"""What a run of a step leaves behind in its tensors: a run that leaves nothing has not trained.

A loop over data that has ended runs no more (`for batch in batches: ...`), without an error. Its time and its
memory are not those of a step.
"""

from __future__ import annotations

import weakref

import torch

from trainfit.steps.step import Step


class StepMarks:
    """How often parameters and buffers have been written to so far, and which gradients there are."""

    def __init__(self, step: Step) -> None:
        """Look at the tensors of a step, without holding any."""
        trained = (
            p for optimizer in step.optimizers for group in optimizer.param_groups for p in group["params"]
        )
        tensors = [*step.model.parameters(), *step.model.buffers(), *trained]
        gradients = [tensor.grad if tensor.is_leaf else None for tensor in tensors]
        self._versions = [_version(tensor) for tensor in (*tensors, *gradients)]
        self._gradients = [None if gradient is None else weakref.ref(gradient) for gradient in gradients]

    def differ_from(self, earlier: StepMarks) -> bool:
        """Whether anything was written to in between."""
        # The same object has the same reference, as long as that is held.
        same = all(now is before for now, before in zip(self._gradients, earlier._gradients))
        return self._versions != earlier._versions or not same


def _version(tensor: torch.Tensor | None) -> int:
    try:
        return -1 if tensor is None else tensor._version
    except RuntimeError:  # of inference mode, which counts nothing
        return -1
