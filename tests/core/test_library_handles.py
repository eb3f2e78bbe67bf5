"""What cuBLAS and its like keep on a GPU: how much, for which handles, and from which op on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from trace_text import trace

from trainfit.devices.device_table import find_device
from trainfit.devices.library_handles import LibraryWorkspace, configured_bytes, library_workspaces
from trainfit.traces.trace import TensorSpec, Trace

MIB = 2**20
STEP = """
    x                         : 400 held
    w                         : 100 held parameter @Net
    -- forward
    a = aten.relu.default(x)  : 400
    b = aten.mm.default(a, w) : 400
    c = aten.mm.default(b, w) : 400
    -- backward
    d = aten.neg.default(c)   : 400
    e = aten.mm.default(d, b) : 100
    f = aten.bmm.default(d, w): 400
    -- optimizer
    g = aten.mm.default(e, e) : 100
"""


def step(text: str = STEP) -> Trace:
    return replace(trace(text), device="cuda", torch="2.13.0+cu130")


def test_each_thread_keeps_a_workspace_from_its_first_product_on() -> None:
    # GIVEN products in forward (ops 1 and 2), in backward (4, 5) and in the optimizer, which runs where
    # forward ran
    found = library_workspaces(step(), find_device("a100-sxm-80gb"))
    # THEN there are two workspaces of 8.125 MiB
    size = 8 * MIB + 128 * 1024
    assert found == (
        LibraryWorkspace("cuBLAS, forward", size, 1),
        LibraryWorkspace("cuBLAS, backward", size, 4),
    )


def test_what_is_computed_again_in_backward_uses_the_handle_of_backward() -> None:
    text = STEP.replace("-- backward", "-- recompute\n    r = aten.mm.default(a, w) : 400\n    -- backward")
    assert [one.first_op for one in library_workspaces(step(text), find_device("rtx-3090"))] == [1, 3]


def test_a_step_without_products_keeps_nothing() -> None:
    text = STEP.replace("aten.mm", "aten.convolution").replace("aten.bmm", "aten._softmax")
    assert library_workspaces(step(text), find_device("a100-sxm-80gb")) == ()


def test_a_cpu_keeps_nothing() -> None:
    assert library_workspaces(step(), find_device("cpu")) == ()


@pytest.mark.parametrize(
    ("device", "torch", "expected"),
    [
        ("v100-sxm-32gb", "2.13.0", 8.125),
        ("rtx-4090", "2.9.1", 8.125),
        ("h100-sxm-80gb", "2.9.1", 32),
        ("h200-sxm-141gb", "2.13.0", 32),
        ("b200-sxm-180gb", "2.11.0", 8.125),  # larger on Blackwell since 2.12
        ("b200-sxm-180gb", "2.12.0", 32),
        ("rtx-5090", "2.10.0", 8.125),
        ("rtx-5090", "2.13.0+cu130", 32),
        ("mi100-32gb", "2.13.0", 32),  # hipBLAS
        ("mi300x-192gb", "2.13.0", 76),  # hipBLASLt
    ],
)
def test_the_size_follows_from_architecture_and_version(device: str, torch: str, expected: float) -> None:
    found = library_workspaces(step(), find_device(device), torch)
    assert [one.bytes / MIB for one in found] == [expected, expected]


def test_before_2_0_the_library_allocated_for_itself() -> None:
    assert library_workspaces(step(), find_device("v100-sxm-32gb"), "1.13.1") == ()


def test_a_stream_of_its_own_has_a_workspace_of_its_own() -> None:
    whole = step()
    ops = [*whole.ops]
    ops[2] = replace(ops[2], queue="side")
    found = library_workspaces(replace(whole, ops=tuple(ops)), find_device("a100-sxm-80gb"))
    assert [(one.name, one.first_op) for one in found] == [
        ("cuBLAS, forward", 1),
        ("cuBLAS, forward, side", 2),
        ("cuBLAS, backward", 4),
    ]


def _with_bias() -> Trace:
    """A linear layer of 3 to 5: its bias is added by cuBLASLt."""
    whole = step("x : 24 held\nw : 60 held\nb : 20 held\n-- forward\ny = aten.addmm.default(b, x, w) : 40")
    shapes = ((5,), (2, 3), (3, 5))
    inputs = tuple(TensorSpec("float32", shape, ()) for shape in shapes)
    return replace(whole, signatures=(replace(whole.signatures[0], inputs=inputs),))


def test_cublaslt_had_a_workspace_of_its_own_until_2_10() -> None:
    device = find_device("a100-sxm-80gb")
    found = library_workspaces(_with_bias(), device, "2.10.0")
    assert [(one.name, one.bytes) for one in found] == [
        ("cuBLAS, forward", 8_519_680),
        ("cuBLASLt, forward", MIB),
    ]
    assert [one.name for one in library_workspaces(_with_bias(), device, "2.11.0")] == ["cuBLAS, forward"]


def test_products_without_elements_ask_for_nothing() -> None:
    whole = _with_bias()
    signature = whole.signatures[0]
    empty = replace(
        signature, inputs=(*signature.inputs[:1], TensorSpec("float32", (0, 3), ()), signature.inputs[2])
    )
    assert library_workspaces(replace(whole, signatures=(empty,)), find_device("a100-sxm-80gb")) == ()


def test_float64_on_amd_goes_to_hipblas() -> None:
    whole = _with_bias()
    inputs = tuple(replace(spec, dtype="float64") for spec in whole.signatures[0].inputs)
    doubles = replace(whole, signatures=(replace(whole.signatures[0], inputs=inputs),))
    found = library_workspaces(doubles, find_device("mi300x-192gb"))
    assert [(one.name, one.bytes) for one in found] == [("hipBLAS, forward", 128 * MIB)]


def test_the_variable_for_deterministic_results_sets_the_size() -> None:
    # GIVEN the value that torch's documentation recommends: eight buffers of 4 MiB
    assert configured_bytes(":4096:8") == 32 * MIB
    assert configured_bytes(":4096:2:16:8") == 8 * MIB + 128 * 1024
    assert configured_bytes(":0:0") == 0
    assert configured_bytes("nonsense") is None
    found = library_workspaces(step(), find_device("rtx-3090"), workspace_config=":4096:8")
    assert [one.bytes for one in found] == [32 * MIB, 32 * MIB]
