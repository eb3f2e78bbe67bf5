"""Inputs that a GPU's kernel copies before it reads them, because they do not lie in memory as it wants them.

torch's kernels of norms over the last dimensions and of softmax read whole rows: what was permuted is made
contiguous first (`layer_norm_kernel.cu`, `SoftMax.cu`, where each begins with it). Other kernels walk through
any strides, or are asked for copies by the program, which the trace then has as operators of their own.
"""

from __future__ import annotations

from trainfit.operators.names import OperatorSet
from trainfit.operators.recorded_calls import ITEM_BYTES, elements
from trainfit.traces.trace import Signature, TensorSpec

_READ_ROWS = OperatorSet.of(
    """
    native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward
    _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data
    """
)


def copied_inputs(signature: Signature) -> tuple[TensorSpec, ...]:
    """Return the inputs that are copied, as they lie; most calls have none."""
    if signature.name not in _READ_ROWS or not signature.inputs:
        return ()
    largest = elements(signature.inputs[0])
    return tuple(
        spec for spec in signature.inputs if elements(spec) == largest > 1 and not lies_in_rows(spec)
    )


def copied_bytes(signature: Signature) -> int:
    """Return the bytes of the copies, which are there while the kernel runs."""
    return sum(elements(spec) * ITEM_BYTES.get(spec.dtype, 1) for spec in copied_inputs(signature))


def lies_in_rows(spec: TensorSpec) -> bool:
    """Whether a tensor is contiguous: its last dimension innermost, without gaps."""
    if len(spec.stride) != len(spec.shape):
        return True
    step = 1
    for length, stride in zip(reversed(spec.shape), reversed(spec.stride)):
        if length != 1:
            if stride != step:
                return False
            step *= length
    return True
