"""Workspaces of reductions and norms on a GPU.

A reduction whose results are too few to keep the chip busy divides its inputs among blocks, and each block
writes what it has (torch's `aten/src/ATen/native/cuda/Reduce.cuh`, whose decisions are repeated here). Norms:
`layer_norm_kernel.cu`, `group_norm_kernel.cu`, `Normalization.cuh`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainfit.devices.architectures import is_amd, threads_per_multiprocessor
from trainfit.devices.device_table import Device
from trainfit.operators.names import OperatorSet, aten_name
from trainfit.operators.recorded_calls import ITEM_BYTES, RecordedArguments, elements
from trainfit.traces.trace import Signature, TensorSpec

_WARP, _THREADS = 32, 512
_LOADS = 4
"""Values that a thread loads at once."""
_FEWEST_VALUES, _MOST_VALUES = 16, 256
"""Values that a thread sums."""
_LARGEST_INDEX = 2**31
_WITH_POSITION = OperatorSet.of("argmax argmin max min aminmax")
_WITH_MOMENTS = OperatorSet.of("var std var_mean std_mean")
_AS_THEY_ARE = OperatorSet.of("amax amin any all")


@dataclass(frozen=True, slots=True)
class _Dimension:
    """Neighbouring dimensions that memory walks through as one."""

    length: int
    stride: int
    reduced: bool


def reduction(signature: Signature, device: Device) -> int:
    """Return what a sum, mean, maximum, norm or variance allocates."""
    spec, call = signature.inputs[0], RecordedArguments(signature)
    outputs = elements(signature.outputs[0]) if signature.outputs else 0
    if not outputs or elements(spec) <= outputs or elements(spec) >= _LARGEST_INDEX:
        return 0  # nothing is reduced; or it is done in pieces, whose workspaces are small
    where = call.get(2 if aten_name(signature.name) == "linalg_vector_norm" else 1, "dim")
    return _reduction_bytes(_dimensions(spec, where), _partial_bytes(signature), spec.dtype, device)


def sum_of(spec: TensorSpec, where: list[int], device: Device) -> int:
    """Return what a sum over some dimensions allocates, called from inside another operator."""
    return _reduction_bytes(_dimensions(spec, where), 4, spec.dtype, device)


def _partial_bytes(signature: Signature) -> int:
    """Return the size of what a block hands over: a sum in float32 or more, a value with its position."""
    item = ITEM_BYTES.get(signature.inputs[0].dtype, 1)
    if signature.name in _WITH_POSITION:
        return 16
    if signature.name in _WITH_MOMENTS:
        return 16 if item <= 4 else 32
    return item if signature.name in _AS_THEY_ARE else max(item, 4)


def _dimensions(spec: TensorSpec, where: list[int] | int | None) -> tuple[_Dimension, ...]:
    """Return the dimensions as a kernel walks through them: reduced ones first, then by stride, joined."""
    rank = len(spec.shape)
    given = [where] if isinstance(where, int) else where
    reduced = {place % rank for place in given} if given and rank else set(range(rank))
    strides = spec.stride if len(spec.stride) == rank else (1,) * rank
    found = [_Dimension(n, s, at in reduced) for at, (n, s) in enumerate(zip(spec.shape, strides)) if n != 1]
    found.sort(key=lambda one: (not one.reduced, one.stride))
    joined: list[_Dimension] = []
    for one in found:
        last = joined[-1] if joined else None
        if last and last.reduced == one.reduced and one.stride == last.length * last.stride:
            joined[-1] = _Dimension(last.length * one.length, last.stride, last.reduced)
        else:
            joined.append(one)
    return tuple(joined)


def _reduction_bytes(found: tuple[_Dimension, ...], partial: int, dtype: str, device: Device) -> int:
    inside = [one for one in found if one.reduced]
    kept = [one for one in found if not one.reduced]
    inputs, outputs = math.prod(one.length for one in inside), math.prod(one.length for one in kept)
    if not inside or not inputs:
        return 0
    along = not kept or inside[0].stride < kept[0].stride  # neighbours in memory have the same result
    width, height, vector = inputs if along else outputs, outputs if along else inputs, 1
    if along and inside[0].stride == 1 and inputs >= 128 and len(inside) == 1:
        width //= _LOADS
    elif not along and kept[0].stride == 1:
        strides = [one.stride for one in (*inside, *kept[1:])]
        vector = next(n for n in (4, 2, 1) if not any(value % n for value in (kept[0].length, *strides)))
        width //= vector
    block_width, block_height = _block(width, height, (_THREADS if dtype != "complex128" else 256) // vector)
    step_in, step_out = (block_width, 1) if along else (1, block_width)
    values = -(-inputs // step_in)
    across = values >= min(block_height * 16, _MOST_VALUES)
    if across:
        step_in *= block_height
    else:
        step_out *= block_height
    values = -(-inputs // step_in)
    per_chip = (device.sm_count or 1) * (
        threads_per_multiprocessor(device.architecture) // (block_width * block_height)
    )
    grid = -(-(outputs // vector) // step_out)
    if not across or values < _MOST_VALUES or grid > per_chip:
        return 0
    fewest = 128 if is_amd(device.architecture) else _FEWEST_VALUES
    blocks = max(min(-(-per_chip // grid), -(-values // fewest)), -(-values // _MOST_VALUES))
    if blocks <= 1:
        return 0
    blocks = max(blocks, 64) if is_amd(device.architecture) else blocks
    staged = partial * outputs * blocks * (1 if along else block_width * vector)
    return staged + 4 * grid


def _block(width: int, height: int, most: int) -> tuple[int, int]:
    """Return the threads of a block: powers of two, a warp wide at least where there is work for one."""
    wide, high = (_power(length, most) for length in (width, height))
    block_height = min(high, most // min(wide, _WARP))
    return min(wide, most // block_height), block_height


def _power(length: int, most: int) -> int:
    return min(1 << (max(length, 1).bit_length() - 1), most)


# ------------------------------------------------------------------------------------------------------ norms


def layer_norm_backward(signature: Signature, device: Device) -> int:
    """Many short rows: gradients of the weights are summed in parts of 32 rows, and these by a reduction."""
    call = RecordedArguments(signature)
    spec, shape = call.tensor(1), call.get(2, "normalized_shape")
    if spec is None or not shape:
        return 0
    columns, warp = int(math.prod(shape)), 64 if is_amd(device.architecture) else 32
    rows = elements(spec) // max(columns, 1)
    if rows <= 64 * 1024 or columns // warp >= (device.sm_count or 1) // 2:
        return 0
    parts = min(32 * 1024 // -(-columns // warp), -(-rows // 32))
    weights = 1 if aten_name(signature.name) == "_fused_rms_norm_backward" else 2
    item = ITEM_BYTES.get(spec.dtype, 4)
    return weights * parts * columns * item


def group_norm(signature: Signature, device: Device) -> int:
    """Two float32 factors per image and channel."""
    spec = signature.inputs[0]
    return 2 * 4 * math.prod(spec.shape[:2]) if len(spec.shape) > 2 else 0


def group_norm_backward(signature: Signature, device: Device) -> int:
    """Two float32 sums and a factor per image and channel, and two per group."""
    spec, call = signature.inputs[0], RecordedArguments(signature)
    groups = int(call.get(8, "group", 1))
    return 4 * (3 * math.prod(spec.shape[:2]) + 2 * spec.shape[0] * groups)


def batch_norm(signature: Signature, device: Device) -> int:
    """Channels last: each block hands over mean, variance and count of what it has seen."""
    return _staged(signature.inputs[0], 4)


def batch_norm_backward(signature: Signature, device: Device) -> int:
    """Channels last: each block hands over two sums."""
    return _staged(signature.inputs[1], 2)


def _staged(spec: TensorSpec, values: int) -> int:
    if len(spec.shape) < 4 or len(spec.stride) != len(spec.shape) or spec.stride[1] != 1:
        return 0
    channels = spec.shape[1]
    positions = elements(spec) // channels
    width = min(_power(channels, _THREADS), 32)
    height = min(_power(-(-positions // 16), _THREADS), _THREADS // width)
    parts = min(-(-positions // (height * 16)), 128)
    return 4 * values * channels * parts if parts >= 8 else 0
