"""Workspaces of kernels that sort: gradients of embeddings and of indexing, and sorting itself.

From torch's `aten/src/ATen/native/cuda`: Embedding.cu, EmbeddingBackwardKernel.cu, Indexing.cu, Sort.cpp,
SortStable.cu, TensorTopK.cu. A radix sort of CUB's has a second buffer for keys and values.
"""

from __future__ import annotations

import math

from trainfit.devices.device_table import Device
from trainfit.operators.recorded_calls import ITEM_BYTES, RecordedArguments, elements
from trainfit.traces.trace import Signature, TensorSpec

_FEW_INDICES = 3072
_ROWS_PER_PART = 10
_WARP, _MOST_THREADS, _FEW_BLOCKS = 32, 1024, 4
_SMALL_SORT = 4096
_LONG_ROW, _FEW_ROWS = 1_000_000, 128


def embedding_backward(signature: Signature, device: Device) -> int:
    """Tokens are sorted; rows of the same token are summed in parts of ten, in float32.

    There is room for as many parts as there may be: one per token that occurs, or per row of the table. Few
    tokens are summed without sorting. A table so small that its rows would not fill the chip is added to
    directly (since torch 2.11), 16-bit ones through a table in float32.
    """
    call = RecordedArguments(signature)
    gradient, indices = call.tensor(0), call.tensor(1)
    tokens = 0 if indices is None else elements(indices)
    by_frequency = bool(call.get(4, "scale_grad_by_freq", False))
    if gradient is None or indices is None or (tokens <= _FEW_INDICES and not by_frequency):
        return 0
    item, rows = ITEM_BYTES[indices.dtype], int(call.get(2, "num_weights", 0))
    counts = item * tokens if by_frequency else 0
    sorted_twice = 2 * item * tokens
    while_sorting = sorted_twice + item * tokens + 2 * item * tokens
    most = min(tokens, rows)
    parts = tokens // _ROWS_PER_PART + most
    offsets = item * (tokens + 2 * most + parts)
    width, low = gradient.shape[-1], ITEM_BYTES[gradient.dtype] < 4
    sums = parts * width * max(ITEM_BYTES[gradient.dtype], 4)
    warped = -(-width // _WARP) * _WARP
    blocks = -(-most * warped // min(warped, _MOST_THREADS))
    if blocks < _FEW_BLOCKS * (device.sm_count or 1) and parts > 4 * blocks:
        sums = item * parts + (4 * rows * width if low else 0)
    return max(while_sorting, sorted_twice + offsets + counts + sums) + _copy(gradient)


def index_put(signature: Signature, device: Device) -> int:
    """Adding to indexed places sorts the places, as positions in memory, with where they come from."""
    call = RecordedArguments(signature)
    if not call.get(3, "accumulate", False):
        return 0
    places, values = call.get(1, "indices"), call.tensor(2)
    tensors = [place for place in places or [] if isinstance(place, TensorSpec)]
    if not tensors or any(place.dtype in ("bool", "uint8") for place in tensors):
        return 0  # how many places a mask names is not known
    count = math.prod(_broadcast([place.shape for place in tensors]))
    as_int64 = sum(8 * elements(place) for place in tensors if place.dtype != "int64")
    linear, sorted_twice, numbers, buffers = 8 * count, 16 * count, 8 * count, 16 * count
    expanded = 0
    target = signature.inputs[0]
    if values is not None:
        written = count * math.prod(target.shape[len(tensors) :])
        expanded = written * ITEM_BYTES.get(values.dtype, 1) if elements(values) < written else _copy(values)
    return as_int64 + linear + sorted_twice + numbers + buffers + expanded


def sort(signature: Signature, device: Device) -> int:
    """Rows of up to 4096 values are sorted in one block; longer ones by radix, with their positions."""
    call = RecordedArguments(signature)
    spec = signature.inputs[0]
    dimension = next((d for d in (call.get(1, "dim"), call.get(2, "dim")) if _is_position(d)), -1)
    if not spec.shape or not elements(spec):
        return 0
    length = spec.shape[dimension]
    if length <= _SMALL_SORT:
        return 0
    rows, item = elements(spec) // length, ITEM_BYTES.get(spec.dtype, 1)
    if rows == 1 or length >= _LONG_ROW:
        return 8 * length + (item + 8) * length
    pairs = (item + 8) * elements(spec)
    if rows < _FEW_ROWS:
        return 8 * elements(spec) + pairs
    # All rows at once: positions with their row, twice, the sorted keys, and the sort's own buffers.
    return 16 * elements(spec) + item * elements(spec) + pairs


def topk(signature: Signature, device: Device) -> int | None:
    """Short rows are searched by one block each, without memory; long ones by many (not known)."""
    spec = signature.inputs[0]
    dimension = RecordedArguments(signature).get(2, "dim", -1)
    if not spec.shape or not elements(spec):
        return 0
    length = spec.shape[dimension]
    rows = elements(spec) // length
    longest = next(limit for most, limit in _ONE_BLOCK if rows <= most)
    return 0 if length < longest else None


_ONE_BLOCK = ((20, 20000), (40, 10000), (80, 8000), (199, 5000), (799, 3000), (4000, 800), (math.inf, 400))
"""Up to so many rows, those shorter than this have one block each."""


def _is_position(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _broadcast(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    length = max(map(len, shapes))
    padded = [(1,) * (length - len(shape)) + shape for shape in shapes]
    return tuple(0 if 0 in sizes else max(sizes) for sizes in zip(*padded))


def _copy(spec: TensorSpec) -> int:
    """Return the bytes of the copy that is made of a tensor which does not lie in one piece."""
    expected = 1
    for length, stride in zip(reversed(spec.shape), reversed(spec.stride)):
        if length != 1 and stride != expected:
            return elements(spec) * ITEM_BYTES.get(spec.dtype, 1)
        expected *= length
    return 0
