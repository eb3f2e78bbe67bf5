"""Make up arguments from a signature, so that an operator can be run alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from trainfit.operators.names import aten_name, functional_name
from trainfit.operators.value_use import SIZED_BY_VALUES
from trainfit.traces import arguments
from trainfit.traces.trace import Signature, TensorSpec

_GROUPED = {"_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"}
# Kernels that follow pointers or layouts hidden in their inputs: on made-up inputs they would crash. Parts
# of names on purpose: to refuse one operator too many is better than a crash on one that torch adds.
_OPAQUE = ("cudnn", "miopen", "quantized", "fbgemm", "nested", "jagged", "weight_int", "_packed", "onednn")


class CannotRunAlone(Exception):
    """The operator cannot be run alone; the message says why."""


def find_operator(name: str) -> Any:
    """Return the operator overload called `name`, such as `aten.mm.default`."""
    parts = name.split(".")
    if any(word in name for word in _OPAQUE):
        raise CannotRunAlone(f"{name} takes data that cannot be made up")
    if len(parts) != 3 or parts[0] != "aten":
        raise CannotRunAlone(f"{name} is not an operator of torch's dispatcher")
    try:
        return getattr(getattr(getattr(torch.ops, parts[0]), parts[1]), parts[2])
    except AttributeError as error:
        raise CannotRunAlone(f"{name} is not known to torch {torch.__version__}") from error


def make_arguments(signature: Signature) -> tuple[list[Any], dict[str, Any]]:
    """Return positional and keyword arguments with tensors of the recorded metadata.

    Integers are zeros, which are valid indices everywhere, and floats are halves; what counts from one, and
    what is divided by, is one, and the group ends of grouped products are spread evenly. The matrix
    exponential takes the more memory the larger its matrix is, up to a 1-norm of about 3: it gets one that
    needs the most. Where the size of a result depends on values, they are such that it has the recorded size.
    """
    positional, keyword = arguments.decode(signature.arguments)
    tensors = [_make_tensor(spec) for spec in signature.inputs]
    if aten_name(signature.name) in _GROUPED:
        _spread_group_ends(tensors)
    if signature.name == "aten.linalg_matrix_exp.default":
        tensors[0].fill_(4)
    made = [_decode(value, tensors) for value in positional]
    divides = functional_name(signature.name) in _DIVISIONS
    for argument, value in zip(find_operator(signature.name)._schema.arguments, made):
        from_one = argument.name in _FROM_ONE or (argument.name == "other" and divides)
        if from_one and isinstance(value, torch.Tensor):
            value.fill_(1)
    make_values = _RESULT_SIZES.get(signature.name)
    if make_values is not None:
        make_values(signature, made)
    elif signature.name in SIZED_BY_VALUES:
        raise CannotRunAlone("the size of its result depends on values")
    if signature.name == "aten.mkldnn_rnn_layer_backward.default":
        _use_real_rnn_state(made)
    return made, {name: _decode(value, tensors) for name, value in keyword.items()}


def _make_tensor(spec: TensorSpec) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype)
    if len(spec.stride) != len(spec.shape):
        raise CannotRunAlone("it takes a tensor that is not strided")
    if 0 in spec.shape:
        return torch.empty_strided(spec.shape, spec.stride, dtype=dtype)
    extent = 1 + sum((length - 1) * stride for length, stride in zip(spec.shape, spec.stride))
    fill = 0.5 if dtype.is_floating_point else 0
    return torch.full((extent,), fill, dtype=dtype).as_strided(spec.shape, spec.stride)


# Arguments that are at least one: rows that were exchanged, and the sizes of bags that are not empty.
_FROM_ONE = {"pivots", "LU_pivots", "bag_size"}
# Whole numbers cannot be divided by zero.
_DIVISIONS = {"div", "floor_divide", "fmod", "remainder"}


def _true_elements(signature: Signature, made: list[Any]) -> None:
    """As many elements are not zero as the result lists."""
    _mark_first(made[0], signature.outputs[0].shape[0])


def _selected_elements(signature: Signature, made: list[Any]) -> None:
    """The mask selects as many elements as the result has; it may be broadcast."""
    tensor, mask = made[0], made[1]
    repeats = math.prod(torch.broadcast_shapes(tensor.shape, mask.shape)) // max(mask.numel(), 1)
    _mark_first(mask, signature.outputs[0].shape[0] // max(repeats, 1))


def _repeats(signature: Signature, made: list[Any]) -> None:
    """The repeats add up to the length of the result."""
    repeats, total = made[0], signature.outputs[0].shape[0]
    if repeats.numel():
        repeats.fill_(total // repeats.numel())
        repeats[: total % repeats.numel()] += 1


def _bins(signature: Signature, made: list[Any]) -> None:
    """The largest element belongs to the last bin."""
    if made[0].numel():
        made[0][-1] = signature.outputs[0].shape[0] - 1


def _distinct_elements(signature: Signature, made: list[Any]) -> None:
    """As many elements are different as the result lists, in groups of equals one after another."""
    tensor, distinct = made[0], signature.outputs[0].shape[0]
    count = tensor.numel()
    tensor.copy_((torch.arange(count) * distinct // max(count, 1)).reshape(tensor.shape))


def _indexed_elements(signature: Signature, made: list[Any]) -> None:
    """Masks among the indices select as many elements as the result, or what is written, has there."""
    indices = made[1]
    used = [number for number, index in enumerate(indices) if index is not None]
    masks = [indices[number] for number in used if indices[number].dtype in (torch.bool, torch.uint8)]
    if not masks:
        return
    if any(indices[n].dim() > 1 for n in used if indices[n].dtype not in (torch.bool, torch.uint8)):
        raise CannotRunAlone("it takes masks together with other indices of several dimensions")
    writes = signature.name != "aten.index.Tensor"
    if writes and made[2].numel() == 1 and not (len(made) > 3 and made[3]):
        return  # a fill, which does not count what the mask selects
    # What is indexed becomes one dimension, in its place if it is in one piece, else in front.
    in_one_piece = used[-1] - used[0] + 1 == len(used)
    position = used[0] if in_one_piece else 0
    indexed = sum(
        index.dim() if any(index is mask for mask in masks) else 1 for index in indices if index is not None
    )
    rank = made[0].dim() - indexed + 1
    shape = made[2].shape if writes else signature.outputs[0].shape
    position -= rank - len(shape)
    if position < 0:
        raise CannotRunAlone("how many elements its mask selects is not known")
    for mask in masks:
        _mark_first(mask, shape[position])


def _mark_first(tensor: torch.Tensor, count: int) -> None:
    """Make the first `count` elements one, and the others zero."""
    tensor.copy_((torch.arange(tensor.numel()) < count).reshape(tensor.shape))


_RESULT_SIZES: dict[str, Callable[[Signature, list[Any]], None]] = {
    "aten.nonzero.default": _true_elements,
    "aten.masked_select.default": _selected_elements,
    "aten.repeat_interleave.Tensor": _repeats,
    "aten.bincount.default": _bins,
    **dict.fromkeys(("aten._unique2.default", "aten.unique_consecutive.default"), _distinct_elements),
    **dict.fromkeys(("aten.index.Tensor", "aten.index_put.default"), _indexed_elements),
    **dict.fromkeys(("aten.index_put_.default", "aten._index_put_impl_.default"), _indexed_elements),
}


def _spread_group_ends(tensors: list[torch.Tensor]) -> None:
    rows = tensors[0].shape[0] if tensors[0].dim() == 2 else tensors[1].shape[-1]
    for tensor in tensors[2:]:
        if tensor.dtype == torch.int32 and tensor.dim() == 1:
            groups = tensor.numel()
            tensor.copy_(torch.arange(1, groups + 1) * rows // groups)


def _use_real_rnn_state(backward: list[Any]) -> None:
    """Give a recurrent layer's backward the opaque state of a real forward: it follows pointers in it."""
    reverse, mode, hidden, layers, biases, train, bidirectional, batch_sizes, batch_first = backward[13:22]
    *_, state = torch.ops.aten.mkldnn_rnn_layer.default(
        *backward[:7], reverse, batch_sizes, mode, hidden, layers, biases, bidirectional, batch_first, train
    )
    backward[22] = state


def _decode(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    (kind, content), *_ = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind in ("dtype", "layout", "memory_format"):
        return getattr(torch, content)
    if kind == "device":
        return torch.device(content)
    if kind == "float":
        return float(content)
    if kind == "complex":
        return complex(_decode(content[0], tensors), _decode(content[1], tensors))
    raise CannotRunAlone(f"one of its arguments cannot be written down ({content})")
