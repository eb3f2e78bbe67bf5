"""Bytes that an operator moves between memory and the chip, read and written, if nothing stays in a cache."""

from __future__ import annotations

import json
from collections.abc import Callable

from trainfit.operators.memory_use import ONLY_ALLOCATE
from trainfit.operators.names import OperatorSet, aten_name
from trainfit.operators.recorded_calls import RecordedArguments, elements, nbytes
from trainfit.traces.trace import Signature

_MOVE_NOTHING = ONLY_ALLOCATE | OperatorSet.of("resize_")
_ROW_CACHE_BYTES = 48 << 10
"""A softmax over longer rows than fit into a block's shared memory reads them twice."""


def moved_bytes(signature: Signature, written: tuple[int, ...], overwrites_first: bool = False) -> int:
    """Return the bytes read and written by one call.

    `written` are the numbers of the inputs that it changes; with `overwrites_first` it does not read the
    first of them.
    """
    if signature.view or signature.name in _MOVE_NOTHING:
        return 0
    rule = _RULES.get(aten_name(signature.name))
    if rule is not None:
        return rule(signature)
    total = _all(signature) + sum(nbytes(signature.inputs[number]) for number in written)
    # What is given as `out=` is written, and not read.
    total -= sum(nbytes(signature.inputs[number]) for number in _outs(signature) if number in written)
    if overwrites_first and written:
        total -= nbytes(signature.inputs[written[0]])
    return total


def _outs(signature: Signature) -> list[int]:
    """Return the numbers of the inputs that are given as `out=`."""
    if '"out":' not in signature.arguments:
        return []
    given = json.loads(signature.arguments)[1].get("out", [])
    return [one["tensor"] for one in (given if isinstance(given, list) else [given]) if "tensor" in one]


def _all(signature: Signature) -> int:
    return sum(map(nbytes, signature.inputs)) + sum(map(nbytes, signature.outputs))


def _rows_picked(signature: Signature) -> int:
    """Gathers read, of their first input, only what they return."""
    return 2 * sum(map(nbytes, signature.outputs)) + sum(map(nbytes, signature.inputs[1:]))


def _rows_changed(signature: Signature) -> int:
    """In-place scatters read the source and its indices, and read and write as much of the target."""
    source = max((nbytes(spec) for spec in signature.inputs[1:]), default=0)
    return sum(map(nbytes, signature.inputs[1:])) + 2 * source


def _copy_with_rows_changed(signature: Signature) -> int:
    return 2 * nbytes(signature.inputs[0]) + _rows_changed(signature)


def _embedding_backward(signature: Signature) -> int:
    """The gradient of the whole table is cleared; the indices are sorted with their positions."""
    gradient, indices, *_ = signature.inputs
    return sum(map(nbytes, signature.outputs)) + 3 * nbytes(gradient) + 16 * nbytes(indices)


def _again(*numbers: int) -> Callable[[Signature], int]:
    """Return the rule for kernels that read some inputs a second time."""
    return lambda s: _all(s) + sum(nbytes(s.inputs[n]) for n in numbers if n < len(s.inputs))


def _softmax(reads: int) -> Callable[[Signature], int]:
    """Return the rule for a softmax, whose first `reads` inputs are read again if a row is long."""

    def rule(signature: Signature) -> int:
        call = RecordedArguments(signature)
        dimension = call.get(1 if reads == 1 else 2, "dim", -1)
        spec = signature.inputs[0]
        length = spec.shape[dimension] if spec.shape and isinstance(dimension, int) else 1
        row_bytes = length * nbytes(spec) // max(elements(spec), 1)
        return _all(signature) if row_bytes <= _ROW_CACHE_BYTES else _again(*range(reads))(signature)

    return rule


def _picked_loss(signature: Signature) -> int:
    """A loss that looks at one class per row reads little, and its gradient is mostly zeros."""
    return sum(map(nbytes, signature.outputs)) + sum(map(nbytes, signature.inputs[1:]))


def _sort(signature: Signature) -> int:
    """A radix sort moves keys and positions once for every byte of the key."""
    keys = signature.inputs[0]
    per_key = nbytes(keys) // max(elements(keys), 1)
    return _all(signature) + 2 * per_key * sum(map(nbytes, signature.outputs))


_RULES: dict[str, Callable[[Signature], int]] = {
    **dict.fromkeys(("embedding", "index_select", "gather", "index", "take", "_embedding_bag"), _rows_picked),
    **dict.fromkeys(("index_add_", "scatter_add_", "index_put_", "_index_put_impl_"), _rows_changed),
    **dict.fromkeys(("scatter_", "index_copy_", "scatter_reduce_"), _rows_changed),
    **dict.fromkeys(("index_add", "scatter_add", "index_put", "scatter"), _copy_with_rows_changed),
    "embedding_dense_backward": _embedding_backward,
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _picked_loss),
    "nll_loss_backward": lambda s: sum(map(nbytes, s.outputs)) + nbytes(s.inputs[2]),
    "nll_loss2d_backward": lambda s: sum(map(nbytes, s.outputs)) + nbytes(s.inputs[2]),
    **dict.fromkeys(("slice_backward", "select_backward", "diagonal_backward"), _again(0)),
    # Statistics first, then the values: training batch norm and group norm pass over their input twice.
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm"), _again(0)),
    **dict.fromkeys(("_batch_norm_with_update", "native_group_norm"), _again(0)),
    **dict.fromkeys(("native_batch_norm_backward", "cudnn_batch_norm_backward"), _again(0, 1)),
    **dict.fromkeys(("batch_norm_backward", "native_group_norm_backward"), _again(0, 1)),
    # The gradients of a norm's weights are a second kernel that reads everything again.
    **dict.fromkeys(("native_layer_norm_backward", "_fused_rms_norm_backward"), _again(0, 1)),
    **dict.fromkeys(("_softmax", "_log_softmax", "_safe_softmax"), _softmax(1)),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _softmax(2)),
    **dict.fromkeys(("cumsum", "cumprod", "topk"), _again(0)),
    "sort": _sort,
}
