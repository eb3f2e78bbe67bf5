"""Make up arguments from a signature, so that an operator can be run alone."""

from __future__ import annotations

from typing import Any

import torch

from trainfit import arguments
from trainfit.trace import Signature, TensorSpec

# Kernels that follow pointers or layouts hidden in their inputs: on made-up inputs they would crash.
_OPAQUE = ("cudnn", "miopen", "quantized", "fbgemm", "nested", "jagged", "weight_int", "_packed", "onednn")


class CannotReplay(Exception):
    """The operator cannot be run alone; the message says why."""


def find_operator(name: str) -> Any:
    """Return the operator overload called `name`, such as `aten.mm.default`."""
    parts = name.split(".")
    if any(word in name for word in _OPAQUE):
        raise CannotReplay(f"{name} takes data that cannot be made up")
    if len(parts) != 3 or parts[0] != "aten":
        raise CannotReplay(f"{name} is not an operator of torch's dispatcher")
    try:
        return getattr(getattr(getattr(torch.ops, parts[0]), parts[1]), parts[2])
    except AttributeError as error:
        raise CannotReplay(f"{name} is not known to torch {torch.__version__}") from error


def make_arguments(signature: Signature) -> tuple[list[Any], dict[str, Any]]:
    """Return positional and keyword arguments with tensors of the recorded metadata.

    Integers are zeros, which are valid indices everywhere, and floats are halves; the group ends of grouped
    products are spread evenly. The matrix exponential takes the more memory the larger its matrix is, up to
    a 1-norm of about 3: it gets one that needs the most.
    """
    positional, keyword = arguments.decode(signature.arguments)
    tensors = [_make_tensor(spec) for spec in signature.inputs]
    if "_grouped_mm" in signature.name:
        _spread_group_ends(tensors)
    if signature.name == "aten.linalg_matrix_exp.default":
        tensors[0].fill_(4)
    made = [_decode(value, tensors) for value in positional]
    if signature.name == "aten.mkldnn_rnn_layer_backward.default":
        _use_real_rnn_state(made)
    return made, {name: _decode(value, tensors) for name, value in keyword.items()}


def _make_tensor(spec: TensorSpec) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype)
    if len(spec.stride) != len(spec.shape):
        raise CannotReplay("it takes a tensor that is not strided")
    if 0 in spec.shape:
        return torch.empty_strided(spec.shape, spec.stride, dtype=dtype)
    extent = 1 + sum((length - 1) * stride for length, stride in zip(spec.shape, spec.stride))
    fill = 0.5 if dtype.is_floating_point else 0
    return torch.full((extent,), fill, dtype=dtype).as_strided(spec.shape, spec.stride)


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
    raise CannotReplay(f"one of its arguments cannot be written down ({content})")
