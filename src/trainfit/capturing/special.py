"""Operators that need more than metadata: questions about values, shapes that depend on values, resizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload

from trainfit.capturing.metadata import call_key, describe_call
from trainfit.capturing.operators import aten

if TYPE_CHECKING:
    from trainfit.capturing.dispatch import CaptureMode

NOT_SPECIAL = object()
Arguments = tuple[Any, ...]
Keywords = dict[str, Any]
Handler = Callable[["CaptureMode", OpOverload, Arguments, Keywords], Any]


def item(mode: CaptureMode, func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
    """Answer `.item()`, `bool(tensor)`, `int(tensor)`."""
    return mode.values.scalar(args[0], mode.live(args[0]))


def equal(mode: CaptureMode, func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
    """Answer `torch.equal`."""
    if mode.live(args[0]).known and mode.live(args[1]).known:
        return func(*args, **kwargs)
    if args[0].shape != args[1].shape:
        return False
    mode.values.assume("two tensors whose values depend on data were assumed to be different")
    return False


def lift_fresh(mode: CaptureMode, func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
    """A constant that torch has just made (`torch.tensor(...)`): from now on it is the program's."""
    tensor = args[0]
    if mode.ledger.find(tensor) is not None or tensor.is_meta:
        return tensor
    key, _ = call_key(func, args, kwargs)
    live, storage = mode.ledger.adopt(tensor, "torch.tensor", known=True)
    wrapped = mode.ledger.tensor(live, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())
    mode.recorder.record(describe_call(func, key, [], wrapped), (), (), (live,))
    del storage
    return wrapped


def with_known_values(mode: CaptureMode, func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
    """Run an operator whose output shape depends on values, if the values are known."""
    key, tensors = call_key(func, args, kwargs)
    lives = [mode.live(tensor) for tensor in tensors]
    if not all(live.known for live in lives):
        return NOT_SPECIAL
    for live in lives:
        mode.values.rely_on(live)
    return mode.run_real(func, None, key, args, kwargs, tensors, lives)


def nonzero(mode: CaptureMode, func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
    """List the true positions; of an unknown mask, all positions (an upper bound)."""
    result = with_known_values(mode, func, args, kwargs)
    if result is not NOT_SPECIAL:
        return result
    mode.values.assume(_all_true(args[0]))

    def kernel(mask: torch.Tensor) -> torch.Tensor:
        return mask.new_empty((mask.numel(), mask.dim()), dtype=torch.int64)

    return mode.compute(func, args, kwargs, kernel=kernel)


def masked_select(mode: CaptureMode, func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
    """Gather the masked elements into a new 1-D tensor; an unknown mask selects all."""
    result = with_known_values(mode, func, args, kwargs)
    if result is not NOT_SPECIAL:
        return result
    tensor, mask = torch.broadcast_tensors(args[0], args[1])
    live = mode.live(mask)
    if live.known:
        mode.values.rely_on(live)
        count = int(mask.sum())
    else:
        mode.values.assume(_all_true(mask))
        count = mask.numel()

    def kernel(tensor: torch.Tensor, mask: torch.Tensor, count: int) -> torch.Tensor:
        return tensor.new_empty((count,))

    return mode.compute(func, args, kwargs, kernel=kernel, shape_args=(*args, count))


def index(mode: CaptureMode, func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
    """Index with tensors; boolean masks count as the positions of their true elements."""
    tensor, indices = args[0], args[1]
    if not any(_is_mask(i) for i in indices):
        return NOT_SPECIAL
    result = with_known_values(mode, func, args, kwargs)
    if result is not NOT_SPECIAL:
        return result
    positions: list[torch.Tensor | None] = []
    for i in indices:
        positions.extend(_true_positions(mode, i) if _is_mask(i) else [i])
    return mode.compute(func, args, kwargs, shape_args=(tensor, positions, *args[2:]))


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _true_positions(mode: CaptureMode, mask: torch.Tensor) -> list[torch.Tensor]:
    """Return one index tensor per dimension of `mask`; all positions when its values are unknown."""
    live = mode.live(mask)
    if live.known:
        mode.values.rely_on(live)
        return list(torch.nonzero(mask).unbind(1))
    mode.values.assume(_all_true(mask))
    return [torch.empty(1, dtype=torch.int64).expand(mask.numel()) for _ in range(mask.dim())]


def _all_true(mask: torch.Tensor) -> str:
    return f"memory depends on data: a mask of {mask.numel()} elements was assumed to be all true"


def check_finite_and_unscale(mode: CaptureMode, func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
    """Unscale gradients in place; a healthy step finds no infinity, so `found_inf` stays as it is."""
    found_inf = mode.live(args[1])
    known = found_inf.known
    result = mode.compute(func, args, kwargs)
    found_inf.known = known
    return result


HANDLERS: dict[OpOverload, Handler] = {
    aten._local_scalar_dense.default: item,
    aten.equal.default: equal,
    aten.lift_fresh.default: lift_fresh,
    aten.nonzero.default: nonzero,
    aten.index.Tensor: index,
    aten.index_put.default: index,
    aten.index_put_.default: index,
    aten._index_put_impl_.default: index,
    aten.masked_select.default: masked_select,
    aten._amp_foreach_non_finite_check_and_unscale_.default: check_finite_and_unscale,
    aten.repeat_interleave.Tensor: with_known_values,
    aten.bincount.default: with_known_values,
    aten._unique2.default: with_known_values,
    aten.unique_dim.default: with_known_values,
    aten.unique_consecutive.default: with_known_values,
}
