"""How an operator walks through memory, as far as it decides how much of the bandwidth it gets."""

from __future__ import annotations

from typing import Literal

from trainfit.operators.families import IRREGULAR, REDUCTIONS, takes_lists
from trainfit.operators.names import OperatorSet
from trainfit.operators.recorded_calls import elements
from trainfit.traces.trace import Signature, TensorSpec

Access = Literal["streams", "strided", "transposed", "joined", "reductions", "irregular", "lists"]

_JOINING = OperatorSet.of("cat stack")


def access_of(signature: Signature) -> Access:
    """Return how a call without products reads and writes.

    `streams`: every tensor straight through, several elements at a time. `strided`: element by element,
    because a tensor is broadcast, cut out of a larger one or of another dtype. `transposed`: neighbours in
    what is read are not neighbours in what is written. `joined`: several tensors into one.
    """
    name = signature.name
    if takes_lists(name):
        return "lists"
    if name in IRREGULAR:
        return "irregular"
    if name in REDUCTIONS:
        return "reductions"
    if name in _JOINING:
        return "joined"
    tensors = [spec for spec in (*signature.inputs, *signature.outputs) if elements(spec) > 1]
    if not tensors:
        return "streams"
    whole = max(tensors, key=elements)
    same = [spec for spec in tensors if spec.shape == whole.shape]
    if len({_innermost(spec) for spec in same}) > 1:
        return "transposed"
    alike = len(same) == len(tensors) and len({(spec.dtype, _steps(spec)) for spec in same}) == 1
    return "streams" if alike and _is_dense(whole) else "strided"


def _innermost(spec: TensorSpec) -> int:
    """Return the dimension whose elements are neighbours in memory; the last if it does not matter."""
    strides = [
        (abs(stride), -dimension)
        for dimension, (length, stride) in enumerate(zip(spec.shape, spec.stride))
        if length > 1 and stride
    ]
    return -min(strides)[1] if strides else len(spec.shape) - 1


def _steps(spec: TensorSpec) -> tuple[int, ...]:
    """Return the strides that matter: those of dimensions with more than one element."""
    return tuple(stride for length, stride in zip(spec.shape, spec.stride) if length > 1)


def _is_dense(spec: TensorSpec) -> bool:
    """Whether its elements fill a piece of memory without gaps, in whatever order of dimensions."""
    step = 1
    for stride, length in sorted((stride, length) for length, stride in zip(spec.shape, spec.stride)):
        if length != 1 and stride != step:
            return False
        step *= length
    return True
