"""`StepOptions` refuses nonsense in words; `training_step` applies dtype, autocast, scaling and optimizer."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from trainfit.errors import OptionError, StepError
from trainfit.models.recipe import StepOptions, default_dtype, training_step


class Squares(nn.Module):
    """Mean square of a linear map; remembers the dtype that forward computed in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.computed_in: torch.dtype | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.linear(x)
        self.computed_in = output.dtype
        return output.float().square().mean()


def squares_step(**options: Any) -> Any:
    settings = StepOptions(**options)
    inputs = {"x": torch.randn(3, 4, dtype=settings.parameter_dtype)}
    return training_step(Squares(), inputs, settings)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "--batch must be a whole number from 1 to 1,000,000, got 0."),
        ({"batch": -4}, "--batch must be a whole number from 1 to 1,000,000, got -4."),
        ({"batch": 2.5}, "--batch must be a whole number from 1 to 1,000,000, got 2.5."),
        ({"batch": True}, "--batch must be a whole number from 1 to 1,000,000, got True."),
        ({"seq": 1}, "--seq must be a whole number from 2 to 100,000,000, got 1."),
        ({"image_size": 0}, "--image-size must be a whole number from 1 to 65,536, got 0."),
        (
            {"dtype": "fp8"},
            "--dtype must be one of fp32, bf16, bf16-autocast, fp16-autocast, got 'fp8'.",
        ),
        (
            {"optimizer": "adam"},
            "--optimizer must be one of adamw, adamw-foreach, adamw-fused, adamw-for-loop, sgd, none, "
            "got 'adam'.",
        ),
        ({"device": "tpu"}, "the device of a step must be cpu, cuda or cuda:N, got 'tpu'."),
        ({"device": "cuda:x"}, "the device of a step must be cpu, cuda or cuda:N, got 'cuda:x'."),
    ],
)
def test_impossible_options_are_refused_with_the_possible_ones(options: Any, message: str) -> None:
    with pytest.raises(OptionError) as raised:
        StepOptions(**options)
    assert str(raised.value) == message


def test_given_names_only_what_the_user_set() -> None:
    assert StepOptions(device="cuda").given() == {}
    assert StepOptions(batch=2, dtype="fp32").given() == {"batch": 2, "dtype": "fp32"}


def test_device_type_has_no_number() -> None:
    assert StepOptions(device="cuda:1").device_type == "cuda"


@pytest.mark.parametrize(
    ("dtype", "weights", "computed_in"),
    [
        (None, torch.float32, torch.float32),
        ("fp32", torch.float32, torch.float32),
        ("bf16", torch.bfloat16, torch.bfloat16),
        ("bf16-autocast", torch.float32, torch.bfloat16),
        ("fp16-autocast", torch.float32, torch.float16),
    ],
)
def test_dtype_sets_weights_and_computation(dtype: Any, weights: Any, computed_in: Any) -> None:
    step = squares_step(dtype=dtype)
    step.run()
    assert step.model.linear.weight.dtype == weights
    assert step.model.computed_in == computed_in


def test_autocast_is_for_the_devices_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kind comes from the options, not from the model: this model stays on the CPU."""
    asked: list[tuple[str, torch.dtype]] = []

    def autocast(device_type: str, dtype: torch.dtype, enabled: bool) -> nullcontext[None]:
        asked.append((device_type, dtype))
        return nullcontext()

    monkeypatch.setattr(nn.Module, "to", lambda self, *_: self)
    monkeypatch.setattr(torch, "autocast", autocast)
    squares_step(dtype="bf16-autocast", device="cuda:0").run()
    assert asked == [("cuda", torch.bfloat16)]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "bf16-autocast", "fp16-autocast"])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw-foreach", "adamw-fused", "adamw-for-loop", "sgd"])
def test_a_step_changes_the_weights_and_drops_the_gradients(dtype: Any, optimizer: Any) -> None:
    torch.manual_seed(0)  # with other values the first float16 step may overflow and be skipped
    step = squares_step(dtype=dtype, optimizer=optimizer)
    before = step.model.linear.weight.detach().clone()
    step.run()
    assert not torch.equal(step.model.linear.weight, before)
    assert step.model.linear.weight.grad is None


@pytest.mark.parametrize("dtype", ["fp32", "fp16-autocast"])
def test_without_optimizer_only_gradients_are_computed(dtype: Any) -> None:
    step = squares_step(dtype=dtype, optimizer="none")
    before = step.model.linear.weight.detach().clone()
    step.run()
    assert step.optimizers == ()
    assert torch.equal(step.model.linear.weight, before)
    assert step.model.linear.weight.grad is None


@pytest.mark.parametrize(
    ("name", "foreach", "fused"),
    [
        (None, None, None),
        ("adamw", None, None),
        ("adamw-foreach", True, None),
        ("adamw-fused", None, True),
        ("adamw-for-loop", False, False),
    ],
)
def test_adamw_variants(name: Any, foreach: bool | None, fused: bool | None) -> None:
    (optimizer,) = squares_step(optimizer=name).optimizers
    assert isinstance(optimizer, torch.optim.AdamW)
    assert (optimizer.defaults["foreach"], optimizer.defaults["fused"]) == (foreach, fused)


def test_sgd_has_momentum() -> None:
    (optimizer,) = squares_step(optimizer="sgd").optimizers
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.defaults["momentum"] == 0.9


def test_scaled_step_equals_the_unscaled_one() -> None:
    """The loss scale is taken out again before the optimizer sees the gradients."""
    weights = []
    for dtype in ("fp32", "fp16-autocast"):
        torch.manual_seed(0)
        step = squares_step(dtype=dtype, optimizer="sgd")
        step.run()
        weights.append(step.model.linear.weight.detach())
    torch.testing.assert_close(*weights, atol=1e-4, rtol=1e-3)


def test_own_loss_is_used() -> None:
    model = nn.Linear(4, 2)
    step = training_step(model, {"input": torch.ones(3, 4)}, StepOptions(), loss=lambda out: out.sum())
    assert step.run().numel() == 1


def test_output_without_loss_is_refused_when_run() -> None:
    step = training_step(nn.Linear(4, 2), {"input": torch.ones(3, 4)}, StepOptions())
    with pytest.raises(StepError, match="no scalar loss"):
        step.run()


def test_buffers_kept_in_float32_stay_so_when_the_weights_already_are_bfloat16() -> None:
    with default_dtype(torch.bfloat16):
        model = nn.Linear(4, 4)
    model.register_buffer("frequencies", torch.ones(4, dtype=torch.float32))
    step = training_step(model, {"input": torch.ones(1, 4, dtype=torch.bfloat16)}, StepOptions(dtype="bf16"))
    assert step.model.get_buffer("frequencies").dtype == torch.float32


def test_default_dtype_comes_back_after_an_exception() -> None:
    with pytest.raises(ValueError, match="inside"), default_dtype(torch.bfloat16):
        assert torch.get_default_dtype() == torch.bfloat16
        raise ValueError("inside")
    assert torch.get_default_dtype() == torch.float32
