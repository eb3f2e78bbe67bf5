"""Operators that choose another kernel on a GPU: dropout, norms, recurrent layers and attention.

They are composites that ask "is this tensor on a GPU?" in C++, where the claims of `device.py` are not heard.
While a capture for a GPU runs, each has a kernel of ours at the autograd key, which calls what the GPU's
branch calls. Also here: what torch can only tell in a build with cuDNN, and values that the CPU's kernels
refuse to compute.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from trainfit.capturing.replacing import replaced
from trainfit.capturing.retarget.attention import attention_on
from trainfit.capturing.retarget.gpu import Gpu

aten = torch.ops.aten
_LSTM, _GRU, _RNN_RELU, _RNN_TANH = 2, 3, 0, 1
"""cuDNN's numbers for the kinds of recurrent layers."""


def dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """The fused kernel keeps a mask of one byte per element; the CPU keeps one in the tensor's dtype."""
    if p == 0 or not train or tensor.numel() == 0:
        return tensor
    if p == 1:
        return tensor * 0
    dropped: torch.Tensor = aten.native_dropout.default(tensor, p, train)[0]
    return dropped


def rms_norm(
    tensor: torch.Tensor,
    normalized_shape: list[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """The fused kernel keeps its input and one value per row; the CPU runs the formula op by op."""
    if weight is not None and weight.dtype != tensor.dtype:
        # The GPU, too, falls back to the formula for mixed dtypes.
        return _rms_norm_formula(tensor, normalized_shape, weight, eps)
    normed: torch.Tensor = _FusedRMSNorm.apply(tensor, normalized_shape, weight, eps)  # type: ignore[no-untyped-call]
    return normed


class _FusedRMSNorm(torch.autograd.Function):
    """The GPU's kernel and its backward; on the CPU the operator is a composite above autograd."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, shape: list[int], weight: torch.Tensor | None, eps: float | None
    ) -> torch.Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            output, scale = aten._fused_rms_norm.default(tensor, shape, weight, eps)
        ctx.save_for_backward(tensor, weight, scale)
        ctx.shape = shape
        result: torch.Tensor = output
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        tensor, weight, scale = ctx.saved_tensors
        mask = [ctx.needs_input_grad[0], weight is not None and ctx.needs_input_grad[2]]
        for_input, for_weight = aten._fused_rms_norm_backward.default(
            gradients[0], tensor, ctx.shape, scale, weight, mask
        )
        return for_input, None, for_weight, None


def _rms_norm_formula(
    tensor: torch.Tensor, normalized_shape: list[int], weight: torch.Tensor, eps: float | None
) -> torch.Tensor:
    wide = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    upcast = tensor.to(wide)
    dimensions = list(range(tensor.dim() - len(normalized_shape), tensor.dim()))
    variance = upcast.pow(2).mean(dim=dimensions, keepdim=True)
    epsilon = torch.finfo(wide).eps if eps is None else eps
    return (upcast * torch.rsqrt(variance + epsilon) * weight).to(torch.result_type(tensor, weight))


def group_norm(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
    """The GPU's kernel reads images row by row, and makes others so; the CPU's leaves channels last."""
    normed: torch.Tensor = aten.group_norm.default.decompose(tensor.contiguous(), *args)
    return normed


def _recurrent(mode: int) -> Callable[..., Any]:
    """One cuDNN call for all layers and steps, with a reserve space instead of saved gates."""

    def recurrent(tensor: torch.Tensor, state: Any, params: list[torch.Tensor], *options: Any) -> Any:
        has_biases, num_layers, dropout, train, bidirectional, batch_first = options
        hx, cx = state if mode == _LSTM else (state, None)
        hidden = params[1].shape[1] if cx is None else cx.shape[2]
        projected = hx.shape[2] if cx is not None and cx.shape[2] != hx.shape[2] else 0
        # On a GPU the weights lie in one buffer; here any of them stands for it: nothing is allocated.
        per_layer = (4 if has_biases else 2) + (1 if projected else 0)
        output, hy, cy, _reserve, _weights = aten._cudnn_rnn.default(
            tensor, params, per_layer, params[0].detach(), hx, cx, mode, hidden, projected, num_layers,
            batch_first, dropout, train, bidirectional, [], None,
        )  # fmt: skip
        return (output, hy) if cx is None else (output, hy, cy)

    return recurrent


def _memory_format_on(gpu: Gpu) -> Callable[..., torch.memory_format]:
    """The layout of a convolution's results: channels last if an operand lies so, but not in fp64.

    On AMD's GPUs torch gives its library contiguous images only, unless an environment variable asks for
    channels last.
    """

    def memory_format(input: torch.Tensor, weight: torch.Tensor, backend: Any) -> torch.memory_format:
        if torch.float64 in (input.dtype, weight.dtype):
            return torch.contiguous_format
        channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(weight.dim())
        if channels_last not in (suggest_memory_format(input), suggest_memory_format(weight)):
            return torch.contiguous_format
        as_on_nvidia = not gpu.is_amd or os.environ.get("PYTORCH_MIOPEN_SUGGEST_NHWC") == "1"
        return channels_last if as_on_nvidia else torch.contiguous_format

    return memory_format


_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_histogram_of_floats = torch.library.get_kernel("aten::histc", "CPU")


def histogram(tensor: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    """Count values per bin; the GPU's kernel also takes integers, and computes with them."""
    if tensor.is_floating_point():
        counted: torch.Tensor = _histogram_of_floats.call_boxed(_CPU, tensor, bins, min, max)
        return counted
    low, high = int(min), int(max)
    if low == high and tensor.numel():
        low, high = int(tensor.min()), int(tensor.max())
    if low == high:
        low, high = low - 1, high + 1
    inside = tensor[(tensor >= low) & (tensor <= high)].long()
    places = ((inside - low) * bins // (high - low)).clamp(max=bins - 1)
    return torch.bincount(places, minlength=bins).to(tensor.dtype)


_KERNELS: dict[str, Callable[..., Any]] = {
    "dropout": dropout,
    "rms_norm": rms_norm,
    "group_norm": group_norm,
    "lstm.input": _recurrent(_LSTM),
    "gru.input": _recurrent(_GRU),
    "rnn_tanh.input": _recurrent(_RNN_TANH),
    "rnn_relu.input": _recurrent(_RNN_RELU),
}


@contextlib.contextmanager
def gpu_kernels(gpu: Gpu) -> Iterator[None]:
    """Install the GPU's choices for the length of a capture."""
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, kernel in _KERNELS.items():
            library.impl(name, kernel, "AutogradCPU")
        library.impl("scaled_dot_product_attention", attention_on(gpu), "AutogradCPU")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel of torch is replaced, which is the purpose
            library.impl("histc", histogram, "CPU", allow_override=True)
        chosen = _memory_format_on(gpu)
        with replaced(torch._C, "_conv_determine_backend_memory_format", lambda _: chosen):
            yield
    finally:
        library._destroy()
