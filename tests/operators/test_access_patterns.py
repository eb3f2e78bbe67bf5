"""How operators walk through memory: the cases that PyTorch's kernels tell apart."""

from __future__ import annotations

import pytest

from trainfit.operators.access_patterns import access_of
from trainfit.traces.trace import Signature, TensorSpec

ROWS = TensorSpec("float16", (64, 32), (32, 1))
IMAGES = TensorSpec("float16", (8, 16, 4, 4), (256, 16, 4, 1))
LAST = TensorSpec("float16", (8, 16, 4, 4), (256, 1, 64, 16))


def of(shape: tuple[int, ...], stride: tuple[int, ...], dtype: str = "float16") -> TensorSpec:
    return TensorSpec(dtype, shape, stride)


@pytest.mark.parametrize(
    ("name", "inputs", "outputs", "access"),
    [
        ("add.Tensor", (ROWS, ROWS), (ROWS,), "streams"),
        ("mul.Tensor", (LAST, LAST), (LAST,), "streams"),
        ("mul.Tensor", (ROWS, of((), ())), (ROWS,), "streams"),
        ("relu_.default", (ROWS,), (), "streams"),
        ("normal_.default", (), (), "streams"),
        ("mul.Tensor", (ROWS, of((32,), (1,))), (ROWS,), "strided"),
        ("mul.Tensor", (ROWS, of((64, 32), (0, 1))), (ROWS,), "strided"),
        ("add.Tensor", (ROWS, of((64, 32), (32, 1), "float32")), (ROWS,), "strided"),
        ("_to_copy.default", (of((64, 32), (32, 1), "float32"),), (ROWS,), "strided"),
        ("mul.Tensor", (of((64, 32), (64, 1)), ROWS), (ROWS,), "strided"),
        ("clone.default", (of((64, 32), (1, 64)),), (ROWS,), "transposed"),
        ("add.Tensor", (IMAGES, LAST), (IMAGES,), "transposed"),
        # Rows stay rows, but they come in another order, as the heads of attention do.
        ("clone.default", (of((4, 8, 32), (32, 128, 1)),), (of((4, 8, 32), (256, 32, 1)),), "strided"),
        # The stride of a dimension of one element means nothing.
        ("neg.default", (of((64, 1, 32), (32, 7, 1)),), (of((64, 1, 32), (32, 32, 1)),), "streams"),
        ("cat.default", (ROWS, ROWS), (of((128, 32), (32, 1)),), "joined"),
        ("native_layer_norm.default", (ROWS,), (ROWS,), "reductions"),
        ("embedding.default", (ROWS, of((7,), (1,), "int64")), (of((7, 32), (32, 1)),), "irregular"),
        ("_foreach_add_.List", (ROWS, ROWS), (), "lists"),
    ],
)
def test_how_an_operator_walks_through_memory(
    name: str, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], access: str
) -> None:
    signature = Signature(f"aten.{name}", inputs, outputs, "[[],{}]", False, False, False)
    assert access_of(signature) == access
