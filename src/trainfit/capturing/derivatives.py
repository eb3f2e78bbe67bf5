"""Backward formulas of torch that are wholly different while a dispatch mode is active.

In C++ they ask whether a tensor is of a subclass. Under a mode the answer is always yes, and they do not look
at values: the product, whose gradient is simple where nothing is zero, takes the long way. While a capture
runs, each has a kernel of ours that takes the ordinary path. Formulas that differ only in working
in place are in `dispatch.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload

if TYPE_CHECKING:
    from trainfit.capturing.dispatch import CaptureMode

aten = torch.ops.aten
# A key that no tensor of the step has, and for which torch's own autograd kernels are still registered.
_TORCHS_OWN = torch._C.DispatchKey.AutogradOther
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
Kernel = Callable[..., torch.Tensor]


def install(library: torch.library.Library, mode: CaptureMode, device: str) -> None:
    """Give the operators their ordinary backward, for as long as `library` lives."""
    spread = _spread_on_gpu if device == "cuda" else _spread_on_cpu
    for selection in (aten.max.default, aten.min.default, aten.median.default, aten.nanmedian.default):
        library.impl(selection, _with_backward(selection, spread), "AutogradCPU")

    def product_backward(
        gradient: torch.Tensor, tensor: torch.Tensor, result: torch.Tensor, *reduced: Any, **_: Any
    ) -> torch.Tensor:
        return _product_backward(mode, gradient, tensor, result, *reduced)

    for product in (aten.prod.default, aten.prod.dim_int):
        library.impl(product, _with_backward(product, product_backward), "AutogradCPU")

    def cumprod_backward(
        gradient: torch.Tensor, tensor: torch.Tensor, dim: int, result: torch.Tensor
    ) -> torch.Tensor:
        return _cumulative_product_backward(mode, gradient, tensor, dim, result)

    library.impl(aten.cumprod_backward.default, cumprod_backward, "AutogradCPU")


def _with_backward(func: OpOverload, formula: Kernel) -> Kernel:
    """Return a kernel that computes `func` as usual and its gradient by `formula`.

    The formula takes the gradient, the input, the result and the other arguments of `func`.
    """

    class Ordinary(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor, others: tuple[Any, ...], named: dict[str, Any]) -> Any:
            result = func._op_dk(_TORCHS_OWN, tensor, *others, **named)
            ctx.save_for_backward(tensor, result)
            ctx.others, ctx.named = others, named
            return result

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            tensor, result = ctx.saved_tensors
            return formula(gradients[0], tensor, result, *ctx.others, **ctx.named), None, None

    Ordinary.__name__ = Ordinary.__qualname__ = str(func)

    def kernel(tensor: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        # Inside a transform of torch.func tensors are of a subclass in a real run as well.
        plain = not torch._C._are_functorch_transforms_active()
        result: torch.Tensor
        if plain and tensor.requires_grad and torch.is_grad_enabled():
            result = Ordinary.apply(tensor, others, named)  # type: ignore[no-untyped-call]
        else:
            result = func._op_dk(_TORCHS_OWN, tensor, *others, **named)
        return result

    return kernel


def _spread_on_cpu(gradient: torch.Tensor, tensor: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Share the gradient of one chosen value among the elements that have it; none of them is NaN."""
    chosen.isnan()
    mask = tensor == chosen
    spread = gradient.new_zeros(tensor.shape, dtype=tensor.dtype)
    return spread.masked_fill_(mask, gradient / mask.sum())


def _spread_on_gpu(gradient: torch.Tensor, tensor: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Do the same without reading a value, for which the host would have to wait for the GPU."""
    both_nan = tensor.isnan().logical_and_(chosen.isnan())
    mask = (tensor == chosen).logical_or_(both_nan)
    return mask * (gradient / mask.sum())


def _product_backward(
    mode: CaptureMode,
    gradient: torch.Tensor,
    tensor: torch.Tensor,
    result: torch.Tensor,
    dim: int | None = None,
    keepdim: bool = False,
) -> torch.Tensor:
    tensor = tensor.to(gradient.dtype)
    if tensor.dim() == 0:
        return gradient
    has_zeros = _has_zeros(mode, tensor)
    if dim is None:
        is_zero = tensor.eq(0)
        if not has_zeros:
            # A real run lists the positions of zeros here; an empty list takes no memory.
            del is_zero
            return gradient * (result / tensor).conj()
        positions = is_zero.nonzero()
        del is_zero
        if len(positions) > 1 and not torch.is_grad_enabled():
            return torch.zeros_like(tensor, memory_format=torch.contiguous_format)
        return _product_backward_with_zeros(gradient, tensor.contiguous().view(-1), 0).view_as(tensor)
    if not keepdim:
        gradient, result = gradient.unsqueeze(dim), result.unsqueeze(dim)
    is_zero = tensor.eq(0)
    counts = is_zero.sum(dim, keepdim=True)
    counts.sum()
    if has_zeros:
        return _product_backward_with_zeros(gradient, tensor, dim)
    return gradient * (result / tensor).conj()


def _product_backward_with_zeros(gradient: torch.Tensor, tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Multiply, for each element, all those before it with all those after it."""
    length = tensor.shape[dim]
    if tensor.numel() == 0:
        return gradient.expand_as(tensor)
    if length == 1:
        return gradient
    one = torch.ones_like(tensor.narrow(dim, 0, 1))
    shifted = torch.cat([one, tensor.narrow(dim, 0, length - 1)], dim)
    before = shifted.cumprod(dim)
    reverse = torch.cat([one, tensor.narrow(dim, 1, length - 1).flip(dim)], dim)
    del one
    after = reverse.cumprod(dim).flip(dim)
    return gradient * (before * after).conj()


def _cumulative_product_backward(
    mode: CaptureMode, gradient: torch.Tensor, tensor: torch.Tensor, dim: int, result: torch.Tensor
) -> torch.Tensor:
    transformed = torch._C._are_functorch_transforms_active()
    if transformed or tensor.numel() <= 1 or tensor.shape[dim] == 1 or _has_zeros(mode, tensor):
        with mode.torchs_own_formula():
            own: torch.Tensor = aten.cumprod_backward.default._op_dk(
                _COMPOSITE, gradient, tensor, dim, result
            )
        return own
    weighted = result.conj() * gradient
    is_zero = tensor.eq(0)
    turned = weighted.flip(dim)
    summed = turned.cumsum(dim)
    reverse = summed.flip(dim)
    # As in C++, where temporaries are freed at the end of the whole expression, and variables at the end.
    del turned, summed
    gradient = reverse.div(tensor.conj())
    del weighted, is_zero
    return gradient


def _has_zeros(mode: CaptureMode, tensor: torch.Tensor) -> bool:
    """Whether an element is zero, where that is known; else it is assumed that none is."""
    live = mode.live(tensor)
    if live.known:
        mode.values.rely_on(live)
        with torch.utils._python_dispatch._disable_current_modes():
            return bool((tensor == 0).any())
    # A step that is cheap to run is captured again with all values known.
    mode.values.kernel_lacked_values = True
    mode.values.assume("a product was assumed to have no factor that is zero", "data")
    return False
