"""Autocast by the GPU's lists, on CPU tensors.

`torch.autocast("cuda")` is turned into the CPU's autocast, and operators that only the GPU's lists have get a
kernel of ours at the CPU's autocast key. The lists are those of torch's documentation
("CUDA Ops that Autocast to ..."). What only the CPU's lists have (3-D average pooling, replication padding,
grid sampling) is still cast to fp32 here, although a GPU would not.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map

from trainfit.capturing.replacing import replaced

# Run in the lower precision. The rest of this list is in the CPU's autocast as well.
_LOWER = (
    "addmv", "addr", "mv", "prelu", "_cudnn_rnn", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
)  # fmt: skip
# Run in fp32.
_FLOAT32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt",
    "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm",
    "native_layer_norm", "group_norm", "norm.Scalar", "norm.ScalarOpt_dim", "nuclear_norm",
    "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d",
    "hinge_embedding_loss", "kl_div",
    "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss",
    "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits",
    "dist", "pdist", "cdist", "renorm", "logsumexp",
)  # fmt: skip
# Produce fp32 through their dtype argument, unless the caller chose one.
_FLOAT32_RESULT = (
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
    "linalg_matrix_norm", "sum", "sum.dim_IntList",
)  # fmt: skip
# Run in the widest dtype among their inputs.
_WIDEST = ("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "scatter_add")

_ASKED = ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype")
_LOW = (torch.float16, torch.bfloat16)


def _overload(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _below_autocast() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64:
        return value.to(dtype)
    return value


def _casting(operator: Any, choose: Callable[[Any], torch.dtype]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _below_autocast():
            dtype = choose((args, kwargs))
            args, kwargs = tree_map(lambda value: _cast(value, dtype), (args, kwargs))
            return operator(*args, **kwargs)

    return kernel


def _float32_result(operator: Any) -> Callable[..., Any]:
    def kernel(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with _below_autocast():
            chosen = kwargs.get("dtype") or next((a for a in args if isinstance(a, torch.dtype)), None)
            if tensor.dtype in _LOW and chosen is None:
                kwargs = {**kwargs, "dtype": torch.float32}
                args = args[:-1] if "softmax" in str(operator) and args and args[-1] is None else args
            return operator(tensor, *args, **kwargs)

    return kernel


def _widest(arguments: Any) -> torch.dtype:
    found: list[torch.dtype] = []
    tree_map(lambda value: found.append(value.dtype) if isinstance(value, torch.Tensor) else None, arguments)
    return torch.float32 if torch.float32 in found else torch.get_autocast_dtype("cpu")


@contextlib.contextmanager
def gpu_autocast() -> Iterator[None]:
    """Make autocast follow the GPU's lists for the length of a capture."""
    library = torch.library.Library("aten", "IMPL")
    try:
        _register(library)
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(torch.amp.autocast_mode.autocast, "__init__", _autocast_on_cpu))
            for name in _ASKED:
                stack.enter_context(replaced(torch, name, _ask_cpu))
            cpu_dtype = functools.partial(torch.get_autocast_dtype, "cpu")
            stack.enter_context(replaced(torch, "get_autocast_gpu_dtype", lambda _: cpu_dtype))
            yield
    finally:
        library._destroy()


def _register(library: torch.library.Library) -> None:
    kernels: dict[str, Callable[..., Any]] = {}
    kernels.update({n: _casting(_overload(n), lambda _: torch.get_autocast_dtype("cpu")) for n in _LOWER})
    kernels.update({n: _casting(_overload(n), lambda _: torch.float32) for n in _FLOAT32})
    kernels.update({n: _casting(_overload(n), _widest) for n in _WIDEST})
    kernels.update({n: _float32_result(_overload(n)) for n in _FLOAT32_RESULT})
    has_kernel: Any = torch._C._dispatch_has_kernel_for_dispatch_key
    for name, kernel in kernels.items():
        if not has_kernel(f"aten::{name}", "AutocastCPU"):
            library.impl(name, kernel, "AutocastCPU")


def _autocast_on_cpu(original: Any) -> Any:
    def __init__(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            # The GPU's default is fp16, the CPU's bf16.
            device_type, dtype = "cpu", dtype or torch.float16
        original(self, device_type, dtype, *args, **kwargs)

    return __init__


def _ask_cpu(original: Any) -> Any:
    def ask(*args: Any) -> Any:
        if not any(isinstance(value, str) for value in args):
            args = ("cuda", *args)  # the old forms without a device mean the GPU
        asks_gpu = original.__name__ == "get_autocast_dtype" and "cuda" in args
        if asks_gpu and not torch.is_autocast_enabled("cpu"):
            return torch.float16  # the GPU's default
        return original(*("cpu" if value == "cuda" else value for value in args))

    return ask
