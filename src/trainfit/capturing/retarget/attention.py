"""Which attention kernel a GPU runs: flash, memory-efficient, or the formula in plain operators.

The order and the conditions are torch's (see the documentation of `torch.nn.attention.SDPBackend`). Flash
needs 16-bit dtypes, no mask, a head of at most 256 values, and an NVIDIA GPU of compute capability 8.0 or
higher or one of AMD's for data centers. Memory-efficient takes fp32 and masks, and older GPUs in fp32 and
fp16, but not grouped query heads. All else runs as a formula.

The memory-efficient kernel keeps the logarithm of each row's sum. NVIDIA's rounds the number of rows up to a
multiple of 32; AMD's does not.

On compute capability 9 and 10 torch prefers cuDNN's kernel where its version is new enough. It keeps what
flash keeps, the result and one value per row, and is captured as flash.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F

from trainfit.capturing.retarget.gpu import Gpu
from trainfit.devices.architectures import FLASH_CAPABILITY, capability_of, is_amd

aten = torch.ops.aten
Kernel = Literal["flash", "efficient", "formula"]
_LARGEST_FLASH_HEAD = 256
_LARGEST_AMD_HEAD = 512
_AMD_WITH_KERNELS = ("gfx90a", "gfx942", "gfx950")
"""AMD's architectures that torch's attention kernels support, and not only experimentally."""
_FLASH_HEAD_MULTIPLE = 8
_BIAS_ALIGNMENT = 16
EFFICIENT_ROWS = 32
"""The rows that NVIDIA's memory-efficient kernel rounds up to."""
EFFICIENT = aten._scaled_dot_product_efficient_attention.default
LOW = (torch.float16, torch.bfloat16)
_ONE_OF_EACH_GENERATION = ("sm_75", "sm_90", "gfx942")


@dataclass(frozen=True)
class Attention:
    """One call of attention: what torch's function is given."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    enable_gqa: bool = False
    scale: float | None = None

    @property
    def needs_gradient(self) -> bool:
        """Whether it will be differentiated."""
        return self.query.requires_grad or self.key.requires_grad or self.value.requires_grad

    @property
    def head(self) -> int:
        """The values of one head."""
        return self.query.shape[-1]


def attention_on(gpu: Gpu) -> Callable[..., torch.Tensor]:
    """Return `scaled_dot_product_attention` with the kernel that the GPU would choose."""

    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        call = Attention(*args, **kwargs)
        kernel = choose(gpu.device.architecture, call)
        if not gpu.architecture_mattered:
            gpu.architecture_mattered = any(
                choose(other, call) != kernel for other in _ONE_OF_EACH_GENERATION
            )
        if kernel == "flash":
            return _flash(call)
        if kernel == "efficient":
            return _efficient(call)
        if not torch.backends.cuda.math_sdp_enabled():
            # What torch raises when none of the kernels that it may use (`sdpa_kernel`) supports the call.
            raise RuntimeError(
                f"No available kernel. Aborting execution. ({gpu.device.name} has none of the allowed ones "
                f"for this attention in {str(call.query.dtype).removeprefix('torch.')})"
            )
        formula: torch.Tensor = aten._scaled_dot_product_attention_math.default(*args, **kwargs)[0]
        return formula

    return scaled_dot_product_attention


def choose(architecture: str, call: Attention) -> Kernel:
    """Return the kernel that a GPU of this architecture runs; an unknown one counts as recent."""
    if _flash_enabled(architecture) and _flash_applies(call) and flash_runs_on(architecture, call):
        return "flash"
    return "efficient" if _efficient_applies(call) and efficient_runs_on(architecture, call) else "formula"


def _flash_enabled(architecture: str) -> bool:
    """Whether torch may use the flash kernel, or only cuDNN's, which saves the same tensors."""
    allowed = torch.backends.cuda
    others = allowed.math_sdp_enabled() or allowed.mem_efficient_sdp_enabled()
    only_cudnn = allowed.cudnn_sdp_enabled() and not others and not is_amd(architecture)
    return allowed.flash_sdp_enabled() or only_cudnn


def _flash_applies(call: Attention) -> bool:
    query, key, value = call.query, call.key, call.value
    return (
        call.attn_mask is None
        and query.dtype in LOW
        and query.dim() == key.dim() == value.dim() == 4
        and query.shape[0] == key.shape[0] == value.shape[0]
        and (call.enable_gqa or query.shape[1] == key.shape[1])
        and key.shape[1] == value.shape[1]
        and query.shape[-1] == key.shape[-1] == value.shape[-1]
        and (not call.is_causal or query.shape[-2] == key.shape[-2])
        and min(query.numel(), key.numel()) > 0
    )


def flash_runs_on(architecture: str, call: Attention) -> bool:
    """Whether a GPU of this architecture has the flash kernel for heads of this size."""
    if is_amd(architecture):
        return architecture in _AMD_WITH_KERNELS and call.head <= _LARGEST_AMD_HEAD
    capability = capability_of(architecture)
    if capability is None:
        return call.head <= _LARGEST_FLASH_HEAD
    # Chips for desktops have too little shared memory for the backward of the largest heads.
    small = (8, 6) <= capability <= (8, 9) or capability[0] == 12
    too_large = 192 < call.head <= 224 or (call.head > 224 and call.dropout_p > 0)
    return (
        capability >= FLASH_CAPABILITY
        and call.head <= _LARGEST_FLASH_HEAD
        and not (small and too_large and call.needs_gradient)
    )


def _efficient_applies(call: Attention) -> bool:
    query, key, value, mask = call.query, call.key, call.value, call.attn_mask
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and query.dtype in (torch.float32, *LOW)
        and query.dim() == key.dim() == value.dim() == 4
        and query.shape[:2] == key.shape[:2] == value.shape[:2]
        and query.shape[-1] == key.shape[-1]
        and min(query.numel(), key.numel()) > 0
        and (mask is None or not mask.requires_grad or mask.dim() in (2, 4))
    )


def efficient_runs_on(architecture: str, call: Attention) -> bool:
    """Whether a GPU of this architecture has the memory-efficient kernel for this dtype and head."""
    low = call.query.dtype in LOW
    heads = (call.head, call.value.shape[-1])
    if is_amd(architecture):
        if architecture not in _AMD_WITH_KERNELS or max(heads) > _LARGEST_AMD_HEAD:
            return False
        alignment = 8 if low else 4
    else:
        capability = capability_of(architecture)
        recent = capability is None or capability >= FLASH_CAPABILITY
        if not recent and call.query.dtype is torch.bfloat16:
            return False
        # Tensor cores take 16 bytes at a time: the newer ones in any dtype, the first ones in 16 bits.
        has_tensor_cores = recent or (low and capability is not None and capability >= (7, 0))
        alignment = 16 // call.query.element_size() if has_tensor_cores else 1
    return all(head % alignment == 0 for head in heads)


def _flash(call: Attention) -> torch.Tensor:
    tensors = [call.query, call.key, call.value]
    scale = call.head**-0.5 if call.scale is None else call.scale
    padding = -call.head % _FLASH_HEAD_MULTIPLE
    if padding:
        tensors = [F.pad(tensor, (0, padding)) for tensor in tensors]
    output: torch.Tensor = aten._scaled_dot_product_flash_attention.default(
        *tensors, call.dropout_p, call.is_causal, False, scale=scale
    )[0]
    return output[..., : call.head] if padding else output


def _efficient(call: Attention) -> torch.Tensor:
    query, key, value, mask = call.query, call.key, call.value, call.attn_mask
    bias = None if mask is None else _aligned_bias(mask, query, key)
    output: torch.Tensor = EFFICIENT(
        query, key, value, bias, call.needs_gradient, call.dropout_p, call.is_causal, scale=call.scale
    )[0]
    return output


def efficient_rows_on(gpu: Gpu) -> Callable[..., Any]:
    """Return what handles the memory-efficient operator, for a GPU whose maker decides about its rows."""

    def handle(mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args[0].shape[-2] % EFFICIENT_ROWS:
            gpu.architecture_mattered = True
        kernel = _with_rows_as_they_are if is_amd(gpu.device.architecture) else None
        return mode.compute(func, args, kwargs, kernel=kernel)

    return handle


def _with_rows_as_they_are(query: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """Return what the kernel of AMD's GPUs returns, for fake tensors."""
    output, sums, *state = EFFICIENT(query, *args, **kwargs)
    rows = min(sums.shape[-1], query.shape[-2])  # none, if they are not asked for
    return output, sums.new_empty((*sums.shape[:-1], rows)), *state


def _aligned_bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Turn a mask into an additive bias with rows padded to the kernel's alignment."""
    if mask.dtype is torch.bool:
        blocked = torch.full_like(mask, float("-inf"), dtype=query.dtype)
        mask = torch.where(mask, torch.zeros((), dtype=query.dtype), blocked)
    padding = -mask.shape[-1] % _BIAS_ALIGNMENT
    if padding:
        columns = mask.shape[-1]
        mask = F.pad(mask, (0, padding))[..., :columns]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
