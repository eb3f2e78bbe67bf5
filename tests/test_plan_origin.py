"""A plan knows which step it was made for, and says so where it is used for another one."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import trainfit
from trainfit.costs.roofline import roofline_costs
from trainfit.devices.device_table import find_device
from trainfit.planning.planner import Planner
from trainfit.plans.plan_origin import other_model, other_step, plan_differences
from trainfit.report.json_result import result_json
from trainfit.report.reading import verification_data
from trainfit.traces.settings import Difference, Settings


def blocks(layers: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(layers)])


def build(batch: int = 512, layers: int = 4, device: str = "cpu") -> trainfit.Step:
    model = blocks(layers).to(device)
    inputs = torch.randn(batch, 64, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return trainfit.Step.of(model, inputs, loss=lambda y: y.square().mean(), optimizer=optimizer)


def plan_of(device: str = "cpu", **arguments: Any) -> trainfit.Plan:
    options = trainfit.StepOptions(set=arguments)
    trace = trainfit.capture(build, device=device, options=options)
    budget = trainfit.estimate(trace, device=device).peak_bytes * 9 // 10
    # cuBLAS alone takes more than this step.
    return trainfit.plan(trace, device=device, budget=budget, allocator=None)


def test_the_same_step_is_no_difference() -> None:
    plan = plan_of()
    assert plan_differences(plan, trainfit.capture(build), plan.device) == ()
    assert other_step(()) == ""


def test_another_batch_another_model_another_device() -> None:
    plan = plan_of("h100")
    here = trainfit.capture(build, options=trainfit.StepOptions(set={"batch": 256, "layers": 6}))
    found = {d.name: (d.planned, d.here) for d in plan_differences(plan, here, "cpu")}
    size = 64 * 64 + 64
    assert found["batch"] == (512, 256)
    assert found["parameters"] == (4 * size, 6 * size)
    assert found["layers"] == ("4", "6")
    assert found["device"] == ("h100-sxm-80gb", "cpu")
    text = other_step(plan_differences(plan, here, "cpu"))
    assert text.startswith("The plan was made for 16,640 parameters, ") and "batch 512" in text
    assert "on h100-sxm-80gb; this is 24,960 parameters, " in text
    assert text.endswith(
        "The promised peak and time are for that; the comparison of results is of this step."
    )


def test_the_same_settings_but_other_operators() -> None:
    plan = plan_of()
    other = replace(plan, trace_hash="0" * 64)
    found = plan_differences(other, trainfit.capture(build), plan.device)
    assert [d.name for d in found] == ["operators"]
    assert "with the same settings that runs other operators" in other_step(found)


def plan_with(module: str) -> trainfit.Plan:
    """Return a plan with this region; which ones are the fastest depends on how fast this machine is."""
    trace = trainfit.capture(build)
    planner = Planner(trace, roofline_costs(trace, find_device("h100")), allocator=None)
    calls = [trace.calls[option.effects[0].region.call] for option in planner.problem.options]
    number = next(n for n, call in enumerate(calls) if trace.module_name(call.module) == module)
    return replace(planner.certified([number], 0, 0.0).plan, device="cpu")


def test_a_model_of_another_size_is_not_taken_in_silence() -> None:
    plan = plan_with("Sequential.2")
    with pytest.warns(
        UserWarning, match=r"made for a Sequential with 16,640 parameters in 13 modules, and this"
    ):
        model = trainfit.apply(blocks(6), plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(8, 64)).sum().backward()  # the block that it names does what it says
        trainfit.apply(blocks(4), plan)
        # Frozen weights are the same model.
        trainfit.apply(blocks(4).requires_grad_(False), plan)


def test_a_region_that_goes_on_where_the_plan_ends_says_so_as_well() -> None:
    plan = plan_with("Sequential")
    with pytest.warns(UserWarning, match="made for a Sequential with 16,640 parameters"):
        model = trainfit.apply(blocks(6), plan)
    with pytest.warns(
        UserWarning,
        match=r"Sequential does not do what its plan says: op \d+ is .*, where the plan has the end",
    ):
        model(torch.randn(8, 64)).sum().backward()


def told(model: nn.Module, plan: trainfit.Plan, batch: int = 8, **kind: Any) -> list[str]:
    """Apply a plan and train a little; return what the user is told."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainfit.apply(model, plan)
        for _ in range(2):
            model(torch.randn(batch, 64, **kind)).sum().backward()
    return [str(warning.message) for warning in caught]


class Other(nn.Sequential):
    """A class that inherits from the plan's."""


def test_a_model_of_another_dtype_or_class_is_not_taken_in_silence() -> None:
    plan = plan_with("Sequential.2")
    (text,) = told(blocks(4).double(), plan, dtype=torch.float64)
    assert text.startswith(
        "the plan was made for a Sequential with parameters in fp32, and this is a Sequential with "
        "parameters in fp64. Results stay the same, but"
    )
    (text,) = told(blocks(4).bfloat16(), plan, dtype=torch.bfloat16)
    assert "this is a Sequential with parameters in bf16." in text
    (text,) = told(Other(*blocks(4)), plan)
    assert text.startswith("the plan was made for a Sequential, and this is an Other. Results")
    (text,) = told(Other(*blocks(6)).double(), plan, batch=1024, dtype=torch.float64)
    assert "this is an Other with 24,960 parameters in 19 modules and parameters in fp64." in text


@pytest.mark.parametrize("dtype", ["fp32", "bf16-autocast", None])
def test_autocast_is_not_what_parameters_are_stored_in(dtype: str | None) -> None:
    plan = plan_with("Sequential.2")
    assert told(blocks(4), replace(plan, settings=replace(plan.settings, dtype=dtype))) == []


def test_a_model_on_another_kind_of_device_is_not_taken_in_silence() -> None:
    plan = plan_with("Sequential.2")
    (text,) = told(blocks(4), replace(plan, device="h100-sxm-80gb"))
    assert text.startswith("the plan was made for h100-sxm-80gb, and the model runs on cpu. Results stay the")
    assert told(blocks(4), replace(plan, device="a device of one's own")) == []
    # Where it will run is not known before it does.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainfit.apply(blocks(4), replace(plan, device="h100-sxm-80gb"))


def test_a_larger_batch_is_not_taken_in_silence() -> None:
    plan = plan_with("Sequential.2")
    assert told(blocks(4), plan, batch=512) == told(blocks(4), plan, batch=8) == []
    (text,) = told(blocks(4), plan, batch=1024)
    assert text == (
        "the plan was made for smaller inputs (batch 512) than Sequential.2 gets: aten.addmm.default makes "
        "[1024, 64], where the plan has [512, 64]. Results stay the same, but the peak that the plan "
        "promises is of the smaller ones: plan again for these."
    )
    # Nothing is wrong with evaluating on more, and sizes that depend on data were never promised.
    assert told(blocks(4).eval(), plan, batch=1024) == []
    assert told(blocks(4), replace(plan, reserve_bytes=1), batch=1024) == []


def test_only_the_first_batch_is_compared() -> None:
    """Passes of one step may have other sizes (an accumulation over batches), which is no difference."""
    model = trainfit.apply(blocks(4), plan_with("Sequential.2"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in (512, 513):
            model(torch.randn(batch, 64)).sum().backward()


class Routed(nn.Module):
    """Computes with as many numbers as are positive."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        return y[x > 0].exp().sum()


def test_sizes_that_depend_on_data_say_nothing_about_the_batch() -> None:
    x = torch.ones(16, 8)
    x[3:] = -1.0
    trace = trainfit.capture(lambda: trainfit.Step.of(Routed(), x, loss=lambda loss: loss))
    planner = Planner(trace, roofline_costs(trace, find_device("h100")), allocator=None)
    plan = replace(planner.certified([0], 0, 0.0).plan, device="cpu", reserve_bytes=0)
    assert [region.module for region in plan.regions] == ["Routed"]
    model = trainfit.apply(Routed(), plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(16, 8)).backward()
    model = trainfit.apply(Routed(), plan)
    with pytest.warns(UserWarning, match="made for smaller inputs"):
        model(torch.ones(17, 8)).backward()


def test_a_plan_of_which_nothing_is_known_says_nothing() -> None:
    plan = replace(plan_of(), settings=Settings())
    assert other_model(plan, Settings(parameters=7, modules=7, dtype="fp64", model_class="Net")) == ""


def test_verify_says_what_the_plan_was_made_for() -> None:
    options = trainfit.StepOptions(batch=256)
    verification = trainfit.verify(build, options=options, plan=plan_of(batch=512), costs="roofline")
    assert verification.plan_differences == (Difference("batch", 512, 256),)
    result = result_json(verification_data(verification))
    assert result["plan_differences"] == [{"name": "batch", "planned": 512, "here": 256}]
    assert (result["plan_made_for"]["batch"], result["plan_made_for"]["device"]) == (512, "cpu")
    assert result["gradients_equal"] is True
