"""The matrix products inside an operator: what a tile of a GPU's tensor cores or a CPU's GEMM works on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from trainfit.operators.names import aten_name
from trainfit.operators.recorded_calls import RecordedArguments
from trainfit.traces.trace import Signature


@dataclass(frozen=True, slots=True)
class Product:
    """`batch` products of an m x k by a k x n matrix, each element a multiply and an add."""

    batch: int
    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        """Floating-point operations."""
        return 2 * self.batch * self.m * self.n * self.k


_Rule = Callable[[Signature], tuple[Product, ...]]


def products_of(signature: Signature) -> tuple[Product, ...]:
    """Return the matrix products of one call; empty if it has none."""
    return _found(signature) if aten_name(signature.name) in _PRODUCTS else ()


@lru_cache(maxsize=16384)
def _found(signature: Signature) -> tuple[Product, ...]:
    """Reading the arguments takes longer than everything else, and one trace is priced for many devices."""
    return _PRODUCTS[aten_name(signature.name)](signature)


def is_convolution(signature: Signature) -> bool:
    """Whether its products are those of a convolution, done without writing the matrices out."""
    return aten_name(signature.name) in _CONVOLUTIONS


def _matrices(first: int) -> _Rule:
    """Return the rule for `[..., m, k] @ [..., k, n]`; the factors are inputs `first` and the next."""

    def find(signature: Signature) -> tuple[Product, ...]:
        if len(signature.inputs) < first + 2:
            return ()
        left, right = signature.inputs[first].shape, signature.inputs[first + 1].shape
        if len(left) < 2 or len(right) < 2:
            return ()
        return (Product(math.prod(left[:-2]), left[-2], right[-1], left[-1]),)

    return find


def _vector(signature: Signature) -> tuple[Product, ...]:
    """`mv`, `dot` and their like: the last two inputs, one of them or both a vector."""
    *_, left, right = signature.inputs
    rows = left.shape[0] if len(left.shape) == 2 else 1
    return (Product(1, rows, 1, math.prod(right.shape)),)


def _linear(signature: Signature) -> tuple[Product, ...]:
    rows, weight = signature.inputs[0].shape, signature.inputs[1].shape
    return (Product(1, math.prod(rows[:-1]), weight[0], rows[-1]),)


def _outer(signature: Signature) -> tuple[Product, ...]:
    """`addr`: a column times a row."""
    *_, left, right = signature.inputs
    return (Product(1, math.prod(left.shape), math.prod(right.shape), 1),)


def _grouped(signature: Signature) -> tuple[Product, ...]:
    """A product per expert; how the rows are divided among them does not change their sum."""
    left, right = signature.inputs[0].shape, signature.inputs[1].shape
    if len(left) == 2 and len(right) == 3:
        groups = max(right[0], 1)
        return (Product(groups, _share(left[0], groups), right[2], left[1]),)
    if len(left) == 3 and len(right) == 2:
        groups = max(left[0], 1)
        return (Product(groups, left[1], _share(right[1], groups), left[2]),)
    if len(left) == 2 and len(right) == 2:  # the gradient of the weights: rows are what is summed over
        groups = max(signature.outputs[0].shape[0], 1) if signature.outputs else 1
        return (Product(groups, left[0], right[1], _share(left[1], groups)),)
    return _matrices(0)(signature)


def _share(rows: int, groups: int) -> int:
    return -(-rows // groups)


def _convolution(signature: Signature) -> tuple[Product, ...]:
    call = RecordedArguments(signature)
    images, weight = call.tensor(0), call.tensor(1)
    if images is None or weight is None or not signature.outputs:
        return ()
    transposed, groups = bool(call.get(6, "transposed", False)), int(call.get(8, "groups", 1))
    # A transposed convolution is the input gradient of an ordinary one: the small image counts.
    image = images.shape if transposed else signature.outputs[0].shape
    positions = image[0] * math.prod(image[2:])
    taps = math.prod(weight.shape[2:])
    if transposed:
        return (Product(groups, positions, weight.shape[1] * taps, weight.shape[0] // groups),)
    return (Product(groups, positions, weight.shape[0] // groups, weight.shape[1] * taps),)


def _convolution_backward(signature: Signature) -> tuple[Product, ...]:
    call = RecordedArguments(signature)
    gradient, images, weight = call.tensor(0), call.tensor(1), call.tensor(2)
    if gradient is None or images is None or weight is None:
        return ()
    transposed, groups = bool(call.get(7, "transposed", False)), int(call.get(9, "groups", 1))
    wanted = call.get(10, "output_mask", [True, True, True])
    image = images.shape if transposed else gradient.shape
    positions = image[0] * math.prod(image[2:])
    taps = math.prod(weight.shape[2:])
    outer, inner = weight.shape[0] // groups, weight.shape[1]
    found: list[Product] = []
    if wanted[0] and transposed:
        found.append(Product(groups, positions, outer, inner * taps))
    elif wanted[0]:
        found.append(Product(groups, positions, inner, outer * taps))
    if wanted[1]:
        found.append(Product(groups, outer, inner * taps, positions))
    return tuple(found)


def _recurrent(times: int) -> _Rule:
    """Return the rule for a fused recurrent layer: each weight matrix meets each time step so often."""

    def find(signature: Signature) -> tuple[Product, ...]:
        rows = math.prod(signature.inputs[0].shape[:-1])
        weights = [spec.shape for spec in signature.inputs[1:] if len(spec.shape) == 2]
        return tuple(Product(1, rows, *shape) for shape in weights) * times

    return find


_CONVOLUTIONS: dict[str, _Rule] = {
    **dict.fromkeys(("convolution", "convolution_overrideable", "_convolution"), _convolution),
    "cudnn_convolution": _convolution,
    **dict.fromkeys(("convolution_backward", "convolution_backward_overrideable"), _convolution_backward),
}
_PRODUCTS: dict[str, _Rule] = {
    **_CONVOLUTIONS,
    **dict.fromkeys(("mm", "bmm", "matmul", "_int_mm", "_scaled_mm"), _matrices(0)),
    **dict.fromkeys(("addmm", "addmm_", "_addmm_activation", "baddbmm", "baddbmm_", "addbmm"), _matrices(1)),
    **dict.fromkeys(("linear", "mkldnn_linear"), _linear),
    **dict.fromkeys(("mv", "dot", "vdot", "addmv", "addmv_"), _vector),
    "addr": _outer,
    "_grouped_mm": _grouped,
    **dict.fromkeys(("mkldnn_rnn_layer", "_cudnn_rnn"), _recurrent(1)),
    **dict.fromkeys(("mkldnn_rnn_layer_backward", "_cudnn_rnn_backward"), _recurrent(2)),
}
