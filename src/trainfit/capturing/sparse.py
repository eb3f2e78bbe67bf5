"""Sparse (COO) tensors: gradients of embeddings. A sparse tensor is its indices and its values.

Building one and asking for its parts touches no data and runs for real. The operators on sparse tensors that
training uses are described here by what they allocate; any other is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload

from trainfit.capturing.autograd import called_by_engine
from trainfit.capturing.ledger import LiveStorage
from trainfit.capturing.metadata import Call, call_key
from trainfit.capturing.plain_tensors import strided_parts
from trainfit.capturing.schemas import aten, describe
from trainfit.errors import CaptureError

if TYPE_CHECKING:
    from trainfit.capturing.dispatch import CaptureMode

_METADATA_ONLY = {
    aten._sparse_coo_tensor_with_dims_and_tensors.default,
    aten._sparse_coo_tensor_with_dims.default,
    aten._indices.default,
    aten._values.default,
    aten.indices.default,
    aten.values.default,
    aten._nnz.default,
    aten.sparse_dim.default,
    aten.dense_dim.default,
    aten.is_coalesced.default,
    aten._coalesced_.default,
}


def is_sparse_call(func: OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether an operator makes or takes a sparse tensor."""
    if func in _METADATA_ONLY:
        return True
    return any(isinstance(arg, torch.Tensor) and arg.layout is torch.sparse_coo for arg in args[:2])


def handle(mode: CaptureMode, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what an operator on sparse tensors returns, and record what it allocates."""
    if func in _METADATA_ONLY:
        return func(*args, **kwargs)
    if func is aten.clone.default and mode.recorder.accumulating and called_by_engine(depth=4):
        # In a real run the parameter takes the gradient over; reference counts differ under a dispatch mode.
        return _sparse(args[0], args[0]._indices(), args[0]._values(), args[0].is_coalesced())
    effect = _EFFECTS.get(func)
    if effect is None:
        raise CaptureError(f"{describe(func).name} on a sparse tensor is not supported by capture.")
    # An in-place operator frees what it has read only when it is done.
    parts = [part for arg in args if isinstance(arg, torch.Tensor) for part in strided_parts(arg)]
    reads = [mode.live(part) for part in parts]
    created: list[LiveStorage] = []
    result, written = effect(mode, created, *args, **kwargs)
    key, _ = call_key(func, args, kwargs)
    key = (key, *(live.nbytes for live in created))
    call = mode.oracle.look_up(key) or mode.oracle.remember(Call(describe(func), key, (), single=True))
    mode.recorder.record(call, reads, written, created)
    del parts
    return result


def _new(mode: CaptureMode, created: list[LiveStorage], like: torch.Tensor, shape: Any) -> torch.Tensor:
    """Make a hollow, contiguous tensor of `like`'s dtype."""
    count = 1
    strides: list[int] = []
    for length in reversed(shape):
        strides.insert(0, count)
        count *= max(length, 1)
    elements = 0 if 0 in shape else count
    live, storage = mode.ledger.allocate(elements * like.element_size(), "sparse", keep_values=False)
    created.append(live)
    return torch.empty(0, dtype=like.dtype).set_(storage, 0, tuple(shape), tuple(strides))


def _sparse(
    tensor: torch.Tensor, indices: torch.Tensor, values: torch.Tensor, coalesced: bool
) -> torch.Tensor:
    made: torch.Tensor = aten._sparse_coo_tensor_with_dims_and_tensors.default(
        tensor.sparse_dim(), tensor.dense_dim(), tensor.shape, indices, values,
        dtype=values.dtype, layout=torch.sparse_coo, device=values.device, is_coalesced=coalesced,
    )  # fmt: skip
    return made


Effect = tuple[Any, tuple[LiveStorage, ...]]


def _coalesce(mode: CaptureMode, created: list[LiveStorage], tensor: torch.Tensor) -> Effect:
    """Sum the values of equal indices, in memory for all entries that is narrowed to the distinct ones."""
    indices, values = tensor._indices(), tensor._values()
    live = mode.live(indices)
    if live.known:
        mode.values.rely_on(live)
        count = torch.unique(indices, dim=1).shape[1]
    else:
        mode.values.assume("the indices of a sparse tensor were assumed to be distinct", "data")
        # There are at most as many distinct ones as the tensor has rows.
        count = min(indices.shape[1], math.prod(tensor.shape[: tensor.sparse_dim()]))
    new_indices = _new(mode, created, indices, indices.shape)[:, :count]
    new_values = _new(mode, created, values, values.shape)[:count]
    return _sparse(tensor, new_indices, new_values, coalesced=True), ()


def _elementwise(
    mode: CaptureMode, created: list[LiveStorage], tensor: torch.Tensor, *_: Any, **__: Any
) -> Effect:
    """Copy the indices and compute new values."""
    indices = _new(mode, created, tensor._indices(), tensor._indices().shape)
    values = _new(mode, created, tensor._values(), tensor._values().shape)
    return _sparse(tensor, indices, values, tensor.is_coalesced()), ()


def _add(mode: CaptureMode, created: list[LiveStorage], left: torch.Tensor, right: Any, **_: Any) -> Effect:
    """Add two sparse tensors by putting their entries one after the other."""
    if not isinstance(right, torch.Tensor) or right.layout is not torch.sparse_coo:
        raise CaptureError("adding a dense tensor to a sparse one is not supported by capture.")
    count = left._nnz() + right._nnz()
    indices = _new(mode, created, left._indices(), (left._indices().shape[0], count))
    values = _new(mode, created, left._values(), (count, *left._values().shape[1:]))
    return _sparse(left, indices, values, coalesced=False), ()


def _add_into(
    mode: CaptureMode, created: list[LiveStorage], dense: torch.Tensor, *_: Any, **__: Any
) -> Effect:
    """Add a sparse tensor into a dense one (or a scalar operation in place)."""
    written = tuple(mode.live(part) for part in list(strided_parts(dense))[-1:])
    for live in written:
        live.known = False
    return dense, written


def _add_in_place(
    mode: CaptureMode, created: list[LiveStorage], into: torch.Tensor, other: Any, **_: Any
) -> Effect:
    """Add into a dense tensor where it is; a sparse one gets new memory for the entries of both."""
    if into.layout is not torch.sparse_coo:
        return _add_into(mode, created, into)
    if into._nnz() and other._nnz():
        mode.values.assume("the indices of a sparse tensor were assumed to be distinct", "data")
    into.data = _add(mode, created, into, other)[0]
    return into, ()


def _clear(mode: CaptureMode, created: list[LiveStorage], tensor: torch.Tensor) -> Effect:
    """Set a tensor to zero: a sparse one has no entries then, and frees their memory."""
    tensor.sparse_resize_and_clear_(tensor.shape, tensor.sparse_dim(), tensor.dense_dim())
    return tensor, ()


def _sparse_mask(
    mode: CaptureMode, created: list[LiveStorage], dense: torch.Tensor, mask: torch.Tensor
) -> Effect:
    """Gather the rows of a dense tensor at a sparse tensor's indices, which are shared."""
    values = _new(mode, created, dense, mask._values().shape)
    return _sparse(mask, mask._indices(), values, mask.is_coalesced()), ()


def _to_dense(
    mode: CaptureMode, created: list[LiveStorage], tensor: torch.Tensor, *_: Any, **__: Any
) -> Effect:
    return _new(mode, created, tensor._values(), tensor.shape), ()


_EFFECTS: dict[OpOverload, Callable[..., Effect]] = {
    aten._coalesce.default: _coalesce,
    aten.add.Tensor: _add,
    aten.clone.default: _elementwise,
    aten.mul.Tensor: _elementwise,
    aten.mul.Scalar: _elementwise,
    aten.div.Tensor: _elementwise,
    aten.neg.default: _elementwise,
    aten.pow.Tensor_Scalar: _elementwise,
    aten._to_copy.default: _elementwise,
    aten.add_.Tensor: _add_in_place,
    aten.mul_.Tensor: _add_into,
    aten.mul_.Scalar: _add_into,
    aten.div_.Tensor: _add_into,
    aten.zero_.default: _clear,
    aten.sparse_mask.default: _sparse_mask,
    aten._to_dense.default: _to_dense,
}
