"""Carries out accumulation: a step's `run` several times, the optimizer's part only at the end.

What is left out of all but the last run are the calls that usual loops make after backward: clipping,
`GradScaler`, the optimizer's step, zeroing of gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from trainfit.steps.step import Step

CAPTURED_PASSES = 2
"""How often forward and backward are captured where they run more often: the rest is like the second."""


def in_micro_batches(step: Step, parts: int = CAPTURED_PASSES) -> Step:
    """Return the step that runs the given one so many times and then updates the parameters once."""

    def run() -> Any:
        result = None
        for part in range(parts):
            last = part == parts - 1
            with contextlib.nullcontext() if last else without_updates(step):
                result = step.run()
        return result

    return replace(
        step,
        run=run,
        samples=None if step.samples is None else step.samples * parts,
        tokens=None if step.tokens is None else step.tokens * parts,
    )


@contextlib.contextmanager
def without_updates(step: Step) -> Iterator[None]:
    """Leave gradients where they are: nothing that usual loops do with them after backward happens."""
    clipping = torch.nn.utils, ("clip_grad_norm_", "clip_grad_value_")
    scaling = torch.amp.GradScaler, ("unscale_", "step", "update")
    owners: list[tuple[Any, tuple[str, ...]]] = [clipping, scaling, (step.model, ("zero_grad",))]
    owners += [(optimizer, ("step", "zero_grad")) for optimizer in step.optimizers]
    with contextlib.ExitStack() as stack:
        for owner, names in owners:
            for name in names:
                stack.enter_context(_left_out(owner, name))
        yield


@contextlib.contextmanager
def _left_out(owner: Any, name: str) -> Iterator[None]:
    own = vars(owner).get(name)
    nothing: Callable[..., None] = lambda *args, **kwargs: None  # noqa: E731
    setattr(owner, name, nothing)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
