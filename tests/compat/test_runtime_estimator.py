"""`RuntimeEstimator`: sums of ops for every module, the four orders, both modes, without a GPU."""

from __future__ import annotations

import pytest
import torch
from small_models import Tower, Twice, Wrapped
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trainfit.capturing.counting import counted
from trainfit.capturing.observing import Observation
from trainfit.compat.captured_step import CapturedStep
from trainfit.compat.runtime_estimator import RuntimeEstimator
from trainfit.costs.pricing import price_trace
from trainfit.devices.device_table import find_device
from trainfit.errors import TrainfitError
from trainfit.steps.step import Step

DEVICE = "a100-sxm-40gb"
COST_MODEL, BENCHMARK = "operator-level-cost-model", "operator-level-benchmark"


def step(model: nn.Module, batch: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_modules_add_up_to_the_step() -> None:
    with FakeTensorMode():
        model = Tower(depth=2)
        optimizer = torch.optim.Adam(model.parameters())
        estimator = RuntimeEstimator(device=DEVICE)
        with estimator(COST_MODEL):
            step(model, torch.randn(32, 64), optimizer)
    runtimes = estimator.mod_runtimes
    together = runtimes["Global"]["fw"] + runtimes["Global"]["bw"]
    assert together == pytest.approx(estimator.total_runtime) and together > 0
    for phase in ("fw", "bw"):
        blocks = sum(runtimes[f"Tower.blocks.{number}"][phase] for number in range(2))
        assert blocks == pytest.approx(runtimes["Tower"][phase])
        parts = ("wide", "act", "narrow", "norm", "drop")
        inner = sum(runtimes[f"Tower.blocks.0.{part}"][phase] for part in parts)
        outside = runtimes["Tower.blocks.0"][phase] - inner
        if phase == "fw":
            assert outside > 0.01 * inner  # the input is added outside of them
        else:
            assert outside == pytest.approx(0.0, abs=1e-9 * inner)  # which backward passes on
    assert "Tower.blocks" not in runtimes  # a list of modules is not called


def test_figures_are_those_of_the_cost_table() -> None:
    """A second formulation: the ops of a linear layer by hand, from the same device's prices."""
    with FakeTensorMode():
        model, batch = nn.Linear(1024, 1024), torch.randn(4096, 1024)
        estimator = RuntimeEstimator(device=DEVICE)
        with estimator(COST_MODEL):
            model(batch)
        observation = Observation(find_device(DEVICE))
        with observation:
            model(batch)
    trace = counted(observation.trace())
    table = price_trace(trace, find_device(DEVICE))
    (product,) = [op for op in trace.ops if trace.signatures[op.signature].name == "aten.addmm.default"]
    expected = 1e3 * table.costs[product.signature].seconds
    assert estimator.mod_runtimes["Linear"]["fw"] == pytest.approx(expected)
    # TF32 is off: at most the 19.5 TFLOP/s of fp32, and at least half of it.
    flops = 2 * 4096 * 1024 * 1024
    assert flops / 19.5e12 <= expected / 1e3 <= 2 * flops / 19.5e12


def test_orders_are_those_of_the_calls() -> None:
    with FakeTensorMode():
        model = Tower(depth=2, checkpointed=True)
        estimator = RuntimeEstimator(device=DEVICE)
        with estimator(COST_MODEL):
            model(torch.randn(32, 64)).sum().backward()

    def down_to_blocks(names: list[str]) -> list[str]:
        return [name for name in names if name.count(".") < 3]

    blocks = ["Tower.blocks.0", "Tower.blocks.1"]
    assert down_to_blocks(estimator.mod_fw_pre_order) == ["Tower", *blocks]
    assert down_to_blocks(estimator.mod_fw_post_order) == [*blocks, "Tower"]
    assert down_to_blocks(estimator.mod_bw_pre_order) == ["Tower", *reversed(blocks)]
    assert down_to_blocks(estimator.mod_bw_post_order) == [*reversed(blocks), "Tower"]
    assert len(estimator.mod_fw_pre_order) == len(estimator.mod_fw_post_order) == 13


def test_benchmarking_runs_the_operators_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    model, batch = nn.Linear(256, 256), torch.randn(512, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    estimator = RuntimeEstimator()
    with estimator(BENCHMARK):
        step(model, batch, optimizer)
    with FakeTensorMode(), estimator(BENCHMARK):
        nn.Linear(256, 256)(torch.ones(512, 256))
    assert f"Estimated ({BENCHMARK})total_time: {estimator.total_runtime:.3f} ms" in capsys.readouterr().out
    assert 0.01 < estimator.mod_runtimes["Linear"]["fw"] < 1000


def test_it_can_be_entered_again_and_begins_anew() -> None:
    model, batch = Tower(depth=1), torch.randn(8, 64)
    estimator = RuntimeEstimator(device=DEVICE)
    found = []
    for _ in range(2):
        model.zero_grad()
        with estimator(COST_MODEL):
            model(batch).sum().backward()
        found.append((estimator.total_runtime, len(estimator.mod_fw_pre_order)))
    assert found[0] == found[1]


@pytest.mark.parametrize("model", [Wrapped(), Twice()])
def test_dataclasses_and_shared_modules_are_followed(model: nn.Module) -> None:
    estimator = RuntimeEstimator(device=DEVICE)
    with estimator(COST_MODEL):
        output = model(torch.ones(2, 16))
        (output if isinstance(output, torch.Tensor) else output.logits).sum().backward()
    root = estimator.mod_runtimes[type(model).__name__]
    assert root["fw"] > 0 and root["bw"] > 0
    if isinstance(model, Twice):
        assert estimator.mod_fw_pre_order.count("Twice.first") == 2


@pytest.mark.parametrize("name", ["A100", "NVIDIA A100-SXM4-40GB", "a100-sxm-40gb"])
def test_devices_need_not_be_named_exactly(name: str) -> None:
    """torch's roofline wants the very name that the driver reports."""
    if name == "A100":
        with pytest.raises(TrainfitError, match="a100-sxm-80gb"):  # there are several
            RuntimeEstimator(device=name)
    else:
        RuntimeEstimator(device=name)


def test_products_of_integers_and_memory_that_nothing_fills() -> None:
    """torch's roofline raises for the one, and charges the other."""
    with FakeTensorMode():
        numbers = torch.zeros(64, 64, dtype=torch.int8)
        estimator = RuntimeEstimator(device=DEVICE)
        with estimator(COST_MODEL):
            torch._int_mm(numbers, numbers)
        product = estimator.total_runtime
        with estimator(COST_MODEL):
            torch.empty(4096, 4096)
    assert product > 0
    assert estimator.total_runtime == 0


def test_products_are_not_faster_than_the_datasheet_says() -> None:
    """torch's are, by half: 312 TFLOP/s in bf16 is the peak of an A100."""
    with FakeTensorMode():
        matrix = torch.zeros(8192, 8192, dtype=torch.bfloat16)
        estimator = RuntimeEstimator(device=DEVICE)
        with estimator(COST_MODEL):
            matrix @ matrix
    least = 1e3 * 2 * 8192**3 / 312e12
    assert least < estimator.total_runtime < 2 * least


def test_stats_are_printed_down_to_a_depth(capsys: pytest.CaptureFixture[str]) -> None:
    estimator = RuntimeEstimator(device=DEVICE)
    with estimator(COST_MODEL):
        Tower(depth=1)(torch.ones(2, 64)).sum().backward()
    capsys.readouterr()
    estimator.display_modulewise_stats(depth=1)
    runtimes = estimator.mod_runtimes["Tower"]
    everything = estimator.mod_runtimes["Global"]
    assert capsys.readouterr().out.splitlines() == [
        "Pre-Forward Execution Order: ",
        "Tower",
        "Pre-Backward Execution Order: ",
        "Tower",
        f"Global fw: {everything['fw']:.3f}ms bw: {everything['bw']:.3f}ms",
        f"Tower fw: {runtimes['fw']:.3f}ms bw: {runtimes['bw']:.3f}ms",
    ]


def test_mistakes_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="operator-level-benchmark or operator-level-cost-model"):
        RuntimeEstimator()("module-level")
    with pytest.raises(TrainfitError):
        RuntimeEstimator(device="a1000")
    with pytest.raises(TrainfitError, match="a100-sxm-40gb"), RuntimeEstimator(device=DEVICE)(BENCHMARK):
        torch.ones(3) + 1


def test_an_error_inside_is_the_users() -> None:
    with pytest.raises(ValueError, match="mine"), RuntimeEstimator(device=DEVICE)(COST_MODEL):
        raise ValueError("mine")


def test_a_captured_step_is_that_of_its_trace() -> None:
    def build() -> Step:
        model = Tower(256, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        return Step.of(model, torch.randn(64, 256), loss=torch.sum, optimizer=optimizer)

    captured = CapturedStep(build, device="h100-sxm-80gb")
    estimator = RuntimeEstimator.of(captured)
    table = price_trace(captured.trace, captured.target)
    expected = 1e3 * sum(table.costs[op.signature].seconds for op in captured.trace.ops)
    assert estimator.total_runtime == pytest.approx(expected)
