"""Regions in a row that keep one input together: each one's input is recomputed by the region before it.

The region before passes its result on through an identity that saves it for backward. Under a checkpoint what
is saved is dropped, and recomputed when someone asks for it: the next region asks, when it is recomputed
itself, instead of holding its input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from trainfit.applying.execution import execution


class _Output(torch.autograd.Function):
    """Passes a tensor on; its values can be asked for later."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Link:
    """A region's input that the region before it computes again."""

    __slots__ = ("_made_by",)

    def __init__(self, tensor: torch.Tensor) -> None:
        """Remember who made the tensor, not the tensor."""
        self._made_by: Any = tensor.grad_fn

    def tensor(self) -> torch.Tensor:
        """Return the tensor again; the region before is recomputed for it, if it has not been yet."""
        (again,) = self._made_by.saved_tensors
        values: torch.Tensor = again.detach()
        return values.requires_grad_()


def pass_on(result: Any) -> Any:
    """Return a region's result so that the next region can ask for its first tensor again."""
    leaves, structure = tree_flatten(result)
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            # It is no op of the region: whoever follows or replays those is not to see it.
            with execution.unwatched():
                leaves[number] = _Output.apply(leaf)  # type: ignore[no-untyped-call]
            return tree_unflatten(leaves, structure)
    return result


def was_passed_on(value: Any) -> bool:
    """Whether a value is a tensor that the region before it has passed on."""
    made_by = value.grad_fn if isinstance(value, torch.Tensor) else None
    return made_by is not None and type(made_by).__name__ == f"{_Output.__name__}Backward"
