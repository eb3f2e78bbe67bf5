"""Workspaces of fused attention on an NVIDIA GPU.

Flash attention (Dao 2023; torch's `flash_attn/flash_api.cpp`) and the memory-efficient kernel
(`mem_eff_attention/kernel_backward.h`, `attention_backward.cu`). AMD's kernels keep one float32 per row.
"""

from __future__ import annotations

import math

from trainfit.devices.architectures import capability_of, is_amd
from trainfit.devices.device_table import Device
from trainfit.operators.recorded_calls import ITEM_BYTES, RecordedArguments
from trainfit.traces.trace import Signature, TensorSpec

_FLASH_ROWS = 128
_MOST_SPLITS = 128
_GOOD_SHARE = 0.85
"""Flash takes the fewest parts that reach this share of the best use of the chip."""


def flash_forward(signature: Signature, device: Device) -> int:
    """Return what flash attention allocates in forward: results of parts, where keys are divided.

    They are where batch, heads and rows alone would leave the chip idle, and without dropout only.
    """
    query, key = signature.inputs[0], signature.inputs[1]
    dropout = RecordedArguments(signature).get(3, "dropout_p", 0.0)
    if is_amd(device.architecture) or dropout:
        return 0
    batch, heads, rows, head = query.shape
    columns = 256 if head <= 64 else 128 if head <= 128 else 64
    blocks = batch * heads * -(-rows // 64)
    parts = _flash_parts(blocks, 2 * (device.sm_count or 1), -(-key.shape[2] // columns))
    return 4 * parts * batch * heads * rows * (_flash_head(head) + 1) if parts > 1 else 0


def _flash_parts(blocks: int, places: int, key_blocks: int) -> int:
    """Return into how many parts flash attention divides the keys."""
    if blocks >= 0.8 * places:
        return 1
    shares: dict[int, float] = {}
    for parts in range(1, min(_MOST_SPLITS, places, key_blocks) + 1):
        # One that leaves no block with fewer keys than one part less would is not looked at.
        if parts == 1 or -(-key_blocks // parts) != -(-key_blocks // (parts - 1)):
            waves = blocks * parts / places
            shares[parts] = waves / math.ceil(waves)
    best = max(shares.values())
    return next(parts for parts, share in shares.items() if share >= _GOOD_SHARE * best)


def _flash_head(head: int) -> int:
    return -(-head // 32) * 32 if head <= 192 else 256


def flash_backward(signature: Signature, device: Device) -> int:
    """Flash attention sums the query's gradient in float32, and keeps one float32 value per row.

    Rows are padded to 128 and heads to 32. With grouped query heads the key and value gradients are first
    made for every query head, in the tensors' dtype.
    """
    gradient, query, key = signature.inputs[:3]
    batch, heads, rows, head = query.shape
    key_heads, columns = key.shape[1], key.shape[2]
    total = _copied(gradient) + (_copied(signature.inputs[4]) if len(signature.inputs) > 4 else 0)
    if is_amd(device.architecture):
        total += 4 * batch * heads * rows
    else:
        total += 4 * batch * heads * -(-rows // _FLASH_ROWS) * _FLASH_ROWS * (_flash_head(head) + 1)
    if key_heads != heads:
        total += 2 * batch * heads * columns * head * ITEM_BYTES[key.dtype]
    return total


def efficient_forward(signature: Signature, device: Device) -> int:
    """In 16 bits, results with heads of more than 128 values are first summed in float32 memory."""
    value = signature.inputs[2]
    if is_amd(device.architecture) or value.dtype == "float32" or value.shape[3] <= 128:
        return 0
    return 4 * math.prod(signature.inputs[0].shape[:3]) * value.shape[3]


def efficient_backward(signature: Signature, device: Device) -> int:
    """The memory-efficient kernel sums the query's gradient in float32, and keeps one value per row.

    16-bit gradients of keys and values are summed in registers if a head fits there, else in float32 memory.
    In float32 the values per row are a product of all of the result, and its sum.
    """
    gradient, query, key, value = signature.inputs[:4]
    batch, heads, rows, head = query.shape
    width = max(head, value.shape[3])
    copied, per_row = _copied(gradient), 4 * batch * heads * rows
    if is_amd(device.architecture):
        return copied + per_row
    low = query.dtype != "float32"
    block, key_block, in_registers = _efficient_blocks(low, width, device)
    tiles = -(-rows // block) * -(-head // key_block)
    sums = tiles * (16 + 4 * block * key_block)  # 16 bytes for the lock of each tile
    if low and not in_registers:
        parts = max(min(-(-key.shape[2] // key_block), 200 // (batch * heads)), 1)
        padded = sum(-(-size // block) * block for size in (head, value.shape[3]))
        sums += 4 * parts * key_block * padded
    sums = -(-sums // 16) * 16 * batch * heads
    if low:
        return copied + per_row + sums
    product = 4 * batch * heads * rows * value.shape[3]
    return copied + max(product + per_row, 2 * per_row, per_row + sums)


def _efficient_blocks(low: bool, width: int, device: Device) -> tuple[int, int, bool]:
    """Return rows and columns of a tile, and whether gradients of keys stay in registers."""
    capability = capability_of(device.architecture) or (9, 0)
    if width <= 64:
        return 64, 64, low
    # Chips for desktops have too little shared memory for the largest tiles.
    small = (8, 6) <= capability <= (8, 9) or capability[0] == 12
    if low and capability >= (8, 0):
        if width <= 96 and capability in ((8, 6), (8, 9)):
            return 128, 64, True
        if width <= 128:
            return (64, 64, False) if small else (128, 128, True)
        return (64 if small else 128), 64, False
    if low:
        return 128, 64, width <= 128
    return (128 if capability >= (8, 0) and not small else 64), 64, False


def _copied(spec: TensorSpec) -> int:
    """Return the bytes of the copy that is made if heads do not lie between rows and values in memory."""
    if len(spec.shape) != 4 or len(spec.stride) != 4:
        return 0
    expected = 1
    for dimension in (3, 1, 2, 0):
        if spec.shape[dimension] != 1 and spec.stride[dimension] != expected:
            return math.prod(spec.shape) * ITEM_BYTES[spec.dtype]
        expected *= spec.shape[dimension]
    return 0
