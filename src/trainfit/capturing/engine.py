"""What autograd's engine and its formulas do in place in a real run, but not under a dispatch mode.

Autograd asks whether its tensors are of a subclass, and the answer is always yes while a mode is active. Then
it does not accumulate into its buffers, and its formulas do not scatter into the tensor of zeros that they
have just made. The decision is made here instead, from the facts that a real run decides by.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload

from trainfit.capturing.recorder import Recorder
from trainfit.capturing.schemas import aten, in_place_forms
from trainfit.operators.value_use import ZEROS

if TYPE_CHECKING:
    from trainfit.capturing.dispatch import CaptureMode

# Not into every tensor of the node: where a view was written to, a formula gets a copy of the gradient, which
# it does not change.
_IN_PLACE_INTO_ZEROS = in_place_forms(
    """
    index_put.default index_add.default index_copy.default index_fill.int_Scalar scatter.src scatter.value
    scatter_add.default masked_scatter.default put.default
    """
)
# Formulas that go further, and also compute in place.
_IN_PLACE_IN_NODE = {
    "BinaryCrossEntropyWithLogitsBackward0": in_place_forms("sub.Tensor mul.Tensor div.Tensor"),
    # With factors that are zero.
    "CumprodBackward0": in_place_forms("mul.Tensor div.Tensor"),
    # Clamping between tensors.
    "ClampBackward0": in_place_forms("logical_and.default logical_or.default"),
}


def as_the_engine_would(
    mode: CaptureMode, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> OpOverload:
    """Return the in-place form of an operator where a real run's backward would use it."""
    if mode.recorder.between_nodes:
        if func is aten.add.Tensor and not kwargs and _would_add_in_place(mode, args[0]):
            return aten.add_.Tensor
        return func
    if torch.is_grad_enabled():
        return func
    form = _IN_PLACE_IN_NODE.get(mode.recorder.node.name, {}).get(func)
    if form is not None and _made_in_this_node(mode, args[0]):
        return form
    form = _IN_PLACE_INTO_ZEROS.get(func)
    if form is not None and mode.live(args[0]).producer in ZEROS and _made_in_this_node(mode, args[0]):
        return form
    return func


def sums_masked_gradient(recorder: Recorder) -> bool:
    """Whether a formula sums masked elements, which a real run selects first."""
    masked = recorder.node.name == "MaskedFillBackward1"
    return masked and not recorder.between_nodes and not torch.is_grad_enabled()


def _would_add_in_place(mode: CaptureMode, buffered: torch.Tensor) -> bool:
    """Whether the engine, in a real run, adds a second gradient into `buffered` itself.

    It does when nothing else holds the tensor or its storage, gradient mode is off and the memory is dense.
    """
    if torch.is_grad_enabled() or buffered.layout is not torch.strided:
        return False
    recorder = mode.recorder
    tensor_count: int = buffered._use_count()  # type: ignore[attr-defined]
    if recorder.unshared_counts is None:
        recorder.unshared_counts = (tensor_count, _storage_count(buffered))
    if tensor_count > recorder.unshared_counts[0]:
        return False
    live = mode.live(buffered)
    saved = any(hold.end is None for hold in live.saved)
    return _unshared(recorder, buffered) and not saved and _is_dense(buffered)


def _made_in_this_node(mode: CaptureMode, tensor: torch.Tensor) -> bool:
    made = mode.live(tensor).producer_op >= mode.recorder.node_start
    return made and _unshared(mode.recorder, tensor)


def _unshared(recorder: Recorder, tensor: torch.Tensor) -> bool:
    assert recorder.unshared_counts is not None, "a session calibrates itself first"
    return _storage_count(tensor) <= recorder.unshared_counts[1]


def _storage_count(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in some order of dimensions."""
    expected = 1
    for stride, length in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape) if n != 1):
        if stride != expected:
            return False
        expected *= length
    return True
