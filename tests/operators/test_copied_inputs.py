"""What a GPU's kernel copies before it reads it: permuted inputs of kernels that read whole rows."""

from __future__ import annotations

import pytest

from trainfit.operators.copied_inputs import copied_bytes, copied_inputs, lies_in_rows
from trainfit.traces.trace import Signature, TensorSpec

ROWS = TensorSpec("float16", (4, 10, 8), (80, 8, 1))
PERMUTED = TensorSpec("float16", (4, 10, 8), (80, 1, 10))
CUT_OUT = TensorSpec("float16", (4, 10, 8), (160, 16, 1))
WEIGHT = TensorSpec("float16", (8,), (1,))


def call(name: str, *inputs: TensorSpec) -> Signature:
    return Signature(f"aten.{name}.default", inputs, (ROWS,), "[[],{}]", False, False, False)


@pytest.mark.parametrize("name", ["native_layer_norm", "_softmax", "_fused_rms_norm"])
def test_kernels_that_read_rows_copy_what_does_not_lie_in_them(name: str) -> None:
    assert copied_inputs(call(name, ROWS, WEIGHT)) == ()
    assert copied_inputs(call(name, PERMUTED, WEIGHT)) == (PERMUTED,)
    assert copied_inputs(call(name, CUT_OUT)) == (CUT_OUT,)
    assert copied_bytes(call(name, PERMUTED)) == 4 * 10 * 8 * 2


def test_in_backward_the_gradient_and_the_input_may_both_be_copied() -> None:
    assert copied_inputs(call("native_layer_norm_backward", PERMUTED, PERMUTED, WEIGHT)) == (PERMUTED,) * 2
    assert copied_inputs(call("native_layer_norm_backward", ROWS, PERMUTED, WEIGHT)) == (PERMUTED,)


def test_kernels_that_walk_through_any_strides_copy_nothing() -> None:
    assert copied_inputs(call("add", PERMUTED, ROWS)) == ()
    assert copied_inputs(call("sum", PERMUTED)) == ()


def test_a_dimension_of_one_element_may_have_any_stride() -> None:
    assert lies_in_rows(TensorSpec("float32", (3, 1, 5), (5, 77, 1)))
    assert not lies_in_rows(TensorSpec("float32", (3, 2, 5), (5, 77, 1)))
