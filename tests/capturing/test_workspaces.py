"""Workspaces: memory inside kernels, measured on the CPU or from a formula; and how results really lie."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from captured_steps import Build, assert_exact, captured, only_op, op_names, ops, result, signature, training
from torch import nn

from trainfit.steps.step import Step
from trainfit.traces.simulate import simulate
from trainfit.traces.trace import Signature, TensorSpec, Trace
from trainfit.workspace.made_up_arguments import make_arguments
from trainfit.workspace.measured import (
    QUICK,
    THOROUGH,
    Limits,
    _is_convolution,
    _is_product,
    measure_operators,
)
from trainfit.workspace.profiler import profile_allocations

pytestmark = pytest.mark.usefixtures("little_garbage")


def convolution() -> Build:
    # Two layers: the second's backward also makes the gradient of its input.
    return training(lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3)), 2, 3, 16, 16)


@pytest.fixture(scope="module")
def convolved() -> Trace:
    return captured(convolution(), limits=THOROUGH)


# Measured on the CPU --------------------------------------------------------------------------------------


def test_the_workspace_of_a_convolution_is_what_the_profiler_sees(convolved: Trace) -> None:
    # GIVEN the first convolution of the model, run alone
    inputs, weight, bias = (
        torch.full((2, 3, 16, 16), 0.5),
        torch.full((8, 3, 3, 3), 0.5),
        torch.full((8,), 0.5),
    )
    with profile_allocations() as log, log.range("convolution"):
        output = F.conv2d(inputs, weight, bias, padding=1)
    usage = log.usage("convolution")
    assert output.shape == (2, 8, 16, 16)
    # THEN what it allocated beyond its result is what the trace says
    first = signature(convolved, ops(convolved, "convolution")[0])
    assert first.workspace_source == "measured"
    assert first.workspace_bytes == usage.peak_bytes - usage.end_bytes


def test_convolutions_are_exact_with_their_workspaces(convolved: Trace) -> None:
    assert any(found.workspace_bytes > 0 for found in convolved.signatures)
    assert_exact(convolution())


def test_the_peak_includes_the_workspace_of_the_op_at_the_peak(convolved: Trace) -> None:
    timeline = simulate(convolved)
    during = [
        live + signature(convolved, op).workspace_bytes for op, live in enumerate(timeline.live_bytes)
    ]  # fmt: skip
    assert timeline.peak_bytes == max(during)
    assert timeline.peak_op == during.index(max(during))
    assert convolved.observed_peak_bytes == max(timeline.live_bytes)


def test_views_have_no_workspace(convolved: Trace) -> None:
    trace = captured(training(lambda: nn.Linear(4, 4), 3, 4))
    for found in trace.signatures:
        assert found.workspace_source != "unknown"
        if found.view:
            assert found.workspace_bytes == 0


def test_an_operator_that_is_measured_twice_gives_the_same() -> None:
    trace = captured(training(lambda: nn.Linear(4, 4), 3, 4))
    first = measure_operators(trace.signatures, QUICK)
    assert measure_operators(trace.signatures, QUICK) == first


@pytest.mark.parametrize("rows", [8, 40_000])  # with known values, and with unknown ones
def test_indexing_with_a_mask_is_measured_with_as_many_elements_as_the_step_selects(rows: int) -> None:
    def selected(y: torch.Tensor) -> torch.Tensor:
        return y[torch.arange(len(y)) % 4 == 0].sum()

    trace = captured(training(lambda: nn.Linear(4, 4), rows, 4, loss=selected))
    found = signature(trace, only_op(trace, "index"))
    assert found.outputs[0].shape == (rows // 4, 4)
    # The kernel lists the positions of the mask's true elements.
    assert (found.workspace_source, found.workspace_bytes) == ("measured", rows // 4 * 8)


DIVISIONS = {
    "floor_divide": lambda a, b: a // b,
    "remainder": lambda a, b: a % b,
    "fmod": torch.fmod,
    "div": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "floor_divide_": lambda a, b: a.clone().floor_divide_(b),
}


@pytest.mark.parametrize("name", DIVISIONS)
def test_divisions_of_whole_numbers_by_a_tensor_are_measured(name: str) -> None:
    # GIVEN a step that divides whole numbers by a tensor of them
    def divided(y: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(len(y))
        return (y * DIVISIONS[name](rows, torch.full_like(rows, 3))[:, None]).sum()

    # WHEN each operator is run alone
    trace = captured(training(lambda: nn.Linear(4, 4), 37, 4, loss=divided))
    # THEN the division is, too: its made-up divisors are not zero
    assert signature(trace, only_op(trace, name)).workspace_source == "measured"
    assert not trace.warnings


# Limits ---------------------------------------------------------------------------------------------------


def test_an_operator_beyond_the_limits_is_not_run_and_listed() -> None:
    # GIVEN a limit that lets nothing through; the sizes are of this test alone, so that none is remembered
    nothing = Limits(nbytes=0, products=0, convolutions=0)
    trace = captured(training(lambda: nn.Sequential(nn.Conv1d(3, 5, 3)), 7, 3, 11), limits=nothing)
    for name in ("convolution", "convolution_backward"):
        found = signature(trace, only_op(trace, name))
        assert (found.workspace_source, found.workspace_bytes) == ("unknown", 0)
    # THEN a warning names what was left out
    (warning,) = trace.warnings
    assert warning.startswith("workspaces inside kernels were not measured and count as 0")
    assert "aten.convolution.default" in warning
    assert "aten.convolution_backward.default" in warning


@pytest.mark.parametrize(
    ("limits", "left_out"),
    [
        pytest.param(Limits(nbytes=1000, products=1e9, convolutions=1e9), {"addmm", "mm"}, id="bytes"),
        pytest.param(Limits(nbytes=1 << 20, products=100, convolutions=1e9), {"addmm", "mm"}, id="products"),
        pytest.param(
            Limits(nbytes=1 << 20, products=1e9, convolutions=10),
            {"convolution", "convolution_backward"},
            id="convolutions",
        ),
    ],
)
def test_each_limit_keeps_out_its_kind_of_operator(limits: Limits, left_out: set[str]) -> None:
    # Sizes that no other case has: what was measured once is remembered.
    odd = {1000: 13, 100: 17}.get(limits.nbytes if limits.nbytes == 1000 else int(limits.products), 19)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv1d(2, 3, 3, padding=1)
            self.layer = nn.Linear(odd, odd)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.convolution(x).flatten(0, 1))

    trace = captured(training(Both, 5, 2, odd), limits=limits)
    unknown = [n for n in range(len(trace.ops)) if signature(trace, n).workspace_source == "unknown"]
    assert left_out <= set(op_names(trace, unknown))
    if "convolution" not in left_out:
        assert "convolution" not in op_names(trace, unknown)
    assert any("not measured" in warning for warning in trace.warnings)


def test_a_small_step_is_measured_whole_within_the_quick_limits(convolved: Trace) -> None:
    assert captured(convolution(), limits=QUICK).signatures == convolved.signatures


# Workspaces that depend on values -------------------------------------------------------------------------


class Exponential(nn.Module):
    """A layer whose weight is the exponential of a matrix with `size` as its 1-norm."""

    def __init__(self, width: int, size: float) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.eye(width) * size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.matrix_exp(self.matrix)


def exponential(width: int, size: float) -> Build:
    def build() -> Step:
        model, inputs = Exponential(width, size), torch.randn(4, width)
        # A loss and a rate so small that neither the gradient nor the step changes the order of size.
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        return Step.of(model, inputs, loss=lambda y: y.mean() * 1e-9, optimizer=optimizer)

    return build


def alone(width: int, size: float) -> int:
    matrix = torch.eye(width) * size
    with profile_allocations() as log, log.range("exponential"):
        result = torch.matrix_exp(matrix)
    usage = log.usage("exponential")
    assert result.shape == matrix.shape
    return usage.peak_bytes - usage.end_bytes


@pytest.mark.parametrize("width", [16, 300], ids=["values known anyway", "values known at second try"])
@pytest.mark.parametrize("size", [1e-2, 0.3, 2.0])
def test_the_matrix_exponential_has_the_workspace_of_its_values(width: int, size: float) -> None:
    # GIVEN matrices for which the kernel takes 4, 8 and 18 terms
    trace = captured(exponential(width, size))
    forward = signature(trace, ops(trace, "linalg_matrix_exp", phase="forward")[0])
    assert (forward.workspace_source, forward.workspace_bytes) == ("measured", alone(width, size))
    assert not trace.warnings
    assert_exact(exponential(width, size))


def test_larger_values_take_more_workspace() -> None:
    assert alone(300, 1e-2) < alone(300, 0.3) < alone(300, 2.0) == alone(300, 1000.0)


def test_calls_of_the_same_shapes_keep_their_own_workspaces() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small, self.large = Exponential(16, 1e-2), Exponential(16, 2.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.large(self.small(x))

    trace = captured(training(Two, 4, 16, loss=lambda y: y.mean() * 1e-9))
    found = [
        signature(trace, n).workspace_bytes for n in ops(trace, "linalg_matrix_exp", phase="forward")
    ]  # fmt: skip
    assert found == [alone(16, 1e-2), alone(16, 2.0)]


def test_a_step_too_large_to_be_run_assumes_the_largest_workspace_and_says_so() -> None:
    # GIVEN a limit that lets each operator through, but not the step as a whole
    limits = Limits(nbytes=5 * 300 * 300 * 4 * 2, products=1e9, convolutions=1e3)
    trace = captured(exponential(300, 1e-2), limits=limits)
    forward = signature(trace, ops(trace, "linalg_matrix_exp", phase="forward")[0])
    assert (forward.workspace_source, forward.workspace_bytes) == ("measured", alone(300, 1000.0))
    warning = next(w for w in trace.warnings if "linalg_matrix_exp" in w)
    assert warning.startswith("memory depends on data: ")
    assert "was measured on values that need the most in Exponential" in warning


def test_a_step_that_profiles_itself_is_left_alone() -> None:
    def build() -> Step:
        step = exponential(16, 0.3)()

        def run() -> object:
            with torch.autograd.profiler.profile():
                return step.run()

        return Step(step.model, step.optimizer, run)

    trace = captured(build)
    forward = signature(trace, ops(trace, "linalg_matrix_exp", phase="forward")[0])
    assert forward.workspace_bytes == alone(16, 1000.0)


# Results that lie differently than their metadata says ----------------------------------------------------


def test_a_loss_that_is_reduced_into_its_terms_keeps_their_memory() -> None:
    # GIVEN mse_loss, whose CPU kernel computes all terms and reduces them in the same memory
    def build() -> Step:
        model, inputs, targets = nn.Linear(8, 8), torch.randn(64, 8), torch.randn(64, 8)
        return Step.of(model, inputs, loss=lambda output: F.mse_loss(output, targets))

    real = F.mse_loss(torch.randn(64, 8), torch.randn(64, 8))
    trace = captured(build)
    loss = result(trace, only_op(trace, "mse_loss"))
    # THEN the scalar holds a storage of full size, as long as it lives
    assert signature(trace, only_op(trace, "mse_loss")).outputs[0].shape == ()
    assert loss.bytes == real.untyped_storage().nbytes() == 64 * 8 * 4
    assert loss.end is None
    assert_exact(build)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("function", [F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits])
def test_every_loss_has_the_memory_that_its_kernel_gives_it(function: object, reduction: str) -> None:
    def build() -> Step:
        model, inputs, targets = nn.Linear(8, 8), torch.randn(64, 8), torch.rand(64, 8)
        loss = lambda output: function(output, targets, reduction=reduction).sum()  # type: ignore[operator]  # noqa: E731
        return Step.of(model, inputs, loss=loss)

    assert_exact(build)


def test_the_strides_of_a_result_are_those_of_the_real_kernel() -> None:
    # GIVEN convolutions in another memory format, after which views may need copies
    def build() -> Step:
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)).to(memory_format=torch.channels_last)
        inputs = torch.randn(2, 3, 12, 12)

        def run() -> torch.Tensor:
            loss = model(inputs).flatten(1).pow(2).sum()
            loss.backward()
            model.zero_grad()
            return loss

        return Step(model, None, run)

    with torch.no_grad():
        real = F.conv2d(
            torch.randn(2, 3, 12, 12), torch.randn(8, 3, 3, 3).to(memory_format=torch.channels_last)
        )
    trace = captured(build)
    assert signature(trace, ops(trace, "convolution")[0]).outputs[0].stride == real.stride()
    assert_exact(build)


def test_counting_what_is_not_zero_can_be_run_alone() -> None:
    """Only its name has `nonzero` in it: its result is one number."""
    spec, result = TensorSpec("float32", (8, 4), (4, 1)), TensorSpec("int64", (), ())
    arguments = '[[{"tensor":0}],{}]'
    signature = Signature("aten.count_nonzero.default", (spec,), (result,), arguments, False, False, False)
    made, _ = make_arguments(signature)
    assert torch.count_nonzero(*made).item() == 32


@pytest.mark.parametrize(
    ("name", "convolution", "product"),
    [
        ("aten.convolution_backward.default", True, True),
        ("aten.mkldnn_rnn_layer.default", True, True),
        ("aten._convert_indices_from_coo_to_csr.default", False, False),
        ("aten.addmm.default", False, True),
        ("aten.cummax.default", False, False),
        ("aten.upsample_bilinear2d.default", False, False),
    ],
)
def test_products_are_known_by_their_names(name: str, convolution: bool, product: bool) -> None:
    signature = Signature(name, (), (), "[[],{}]", False, False, False)
    assert (_is_convolution(signature), _is_product(signature)) == (convolution, product)
