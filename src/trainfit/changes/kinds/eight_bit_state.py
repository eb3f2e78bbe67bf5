"""The optimizer's two moments in 8 bits, as bitsandbytes keeps them.

A byte for each number and a float32 for each block of 256 of them; parameters with fewer than 4,096 numbers
keep theirs in float32. One kernel for each parameter, without temporaries.
Source: bitsandbytes, `optim/optimizer.py` (`min_8bit_size=4096`, blocks of 256; older versions had 2048).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from trainfit.changes.change import StepChange
from trainfit.changes.unchanged_step import UnchangedStep
from trainfit.plans.ways import OTHER_NUMERICS, ChangeMade
from trainfit.steps.step import Step

_BLOCK = 256
_SMALLEST = 4096
_HAS_8_BIT = ("Adam", "AdamW")


def changes(step: UnchangedStep) -> Iterator[StepChange]:
    """Yield it for Adam and AdamW on a GPU, which bitsandbytes has kernels for."""
    names = step.optimizers
    if step.device.kind != "cuda" or not names or not set(names) <= set(_HAS_8_BIT):
        return
    code = f"optimizer = bitsandbytes.optim.{names[0]}8bit(model.parameters(), ...)"
    yield StepChange(ChangeMade("optimizer", "8-bit state", code, OTHER_NUMERICS), make=with_8_bit_state)


def with_8_bit_state(step: Step) -> Step:
    """Let the step's optimizers keep what bitsandbytes would, and read and write as much.

    For predictions: the numbers that it writes are not Adam's.
    """
    for optimizer in step.optimizers:
        small = _EightBitAdam(optimizer.param_groups)
        # The user's code holds the optimizer: it stays the same object.
        optimizer.step = small.step  # type: ignore[method-assign, assignment]
        optimizer.state = small.state
    return step


class _EightBitAdam(torch.optim.Optimizer):
    """Keeps 8-bit moments of each parameter."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__([{"params": group["params"]} for group in groups], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        update = _kernel()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state.update(_moments(parameter))
                    update(parameter, parameter.grad, *state.values())


def _moments(parameter: Tensor) -> dict[str, Tensor]:
    numbers = parameter.numel()
    if numbers < _SMALLEST:
        like = {"device": parameter.device, "dtype": torch.float32}
        return {name: torch.zeros(parameter.shape, **like) for name in ("first", "second")}  # type: ignore[call-overload]
    blocks = -(-numbers // _BLOCK)
    found = {}
    for name in ("first", "second"):
        found[name] = torch.zeros(parameter.shape, dtype=torch.uint8, device=parameter.device)
        found[f"{name} scales"] = torch.zeros(blocks, device=parameter.device)
    return found


@cache
def _kernel() -> Any:
    """Return an operator that stands for the kernel: it reads and writes all of its arguments."""
    library = torch.library.Library("trainfit", "FRAGMENT")
    library.define(
        "adam_8bit_(Tensor(a!) parameter, Tensor gradient, Tensor(b!) first, Tensor(c!) second, "
        "Tensor(d!)? first_scales=None, Tensor(e!)? second_scales=None) -> ()"
    )
    library.impl("adam_8bit_", lambda *args: None, "CompositeExplicitAutograd")
    _kept.append(library)

    def update(parameter: Tensor, gradient: Tensor, *state: Tensor) -> None:
        if len(state) == 2:
            torch.ops.trainfit.adam_8bit_(parameter, gradient, *state)
        else:
            first, first_scales, second, second_scales = state
            torch.ops.trainfit.adam_8bit_(parameter, gradient, first, second, first_scales, second_scales)

    return update


_kept: list[Any] = []
"""An operator is gone with its library."""
