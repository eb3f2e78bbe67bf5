"""A trace says which step it is of: what was asked for, and what the target or the user's code chose."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import trainfit
from trainfit.traces.settings import settings_json


def test_a_preset_says_what_it_chose() -> None:
    settings = trainfit.capture("llama-tiny", options=trainfit.StepOptions(batch=2, dtype="bf16")).settings
    assert (settings.batch, settings.seq, settings.dtype) == (2, 256, "bf16")
    assert (settings.optimizer, settings.optimizer_class) == ("adamw", "AdamW")
    assert settings.parameters == settings.trainable_parameters == 1_787_008  # as published in the catalog
    assert settings_json(settings)["model"]["layers"] == 4


@pytest.mark.parametrize(
    ("optimizer", "device", "kernels"),
    [
        ("adamw", "cpu", "for-loop"),
        ("adamw", "h100", "foreach"),
        ("adamw-fused", "h100", "fused"),
        ("adamw-foreach", "cpu", "foreach"),
    ],
)
def test_how_the_optimizer_goes_over_the_parameters(optimizer: str, device: str, kernels: str) -> None:
    options = trainfit.StepOptions(batch=2, image_size=64, optimizer=optimizer)  # type: ignore[arg-type]
    settings = trainfit.capture("resnet-tiny", device=device, options=options).settings
    assert (settings.optimizer, settings.optimizer_kernels) == (optimizer, kernels)
    assert (settings.image_size, settings.seq) == (64, None)


def build(batch: int = 4, width: int = 8, name: str = "small") -> trainfit.Step:
    model = nn.Sequential(nn.Embedding(10, width), nn.Linear(width, 10)).requires_grad_(False)
    model[1].requires_grad_(True)
    tokens = torch.randint(0, 10, (batch, 6))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with_loss = lambda output: output.float().square().mean()  # noqa: E731
    return trainfit.Step.of(model, tokens, loss=with_loss, optimizer=optimizer, autocast=torch.bfloat16)


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_a_function_says_as_much(device: str) -> None:
    settings = trainfit.capture(build, device=device).settings
    assert (settings.batch, settings.seq, settings.dtype) == (4, 6, "bf16-autocast")
    assert (settings.optimizer, settings.optimizer_class) == ("SGD", "SGD")
    assert (settings.parameters, settings.trainable_parameters, settings.modules) == (170, 90, 3)
    assert settings_json(settings)["arguments"] == {"batch": 4, "width": 8, "name": "small"}


def test_autocast_that_is_switched_off_is_not_said() -> None:
    def plain() -> trainfit.Step:
        model = nn.Linear(4, 1)

        def run() -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=False):
                loss = model(torch.randn(2, 4)).mean()
            loss.backward()
            return loss

        return trainfit.Step(model=model, optimizer=None, run=run)

    settings = trainfit.capture(plain).settings
    assert (settings.dtype, settings.optimizer, settings.batch) == ("fp32", "none", None)


def test_the_file_of_a_trace_has_them(tmp_path: Path) -> None:
    trace = trainfit.capture(build)
    trainfit.save_trace(trace, tmp_path / "step.trace")
    assert trainfit.load_trace(tmp_path / "step.trace").settings == trace.settings


def test_a_plan_has_those_of_its_step(tmp_path: Path) -> None:
    plan = trainfit.plan("gpt2-tiny", budget="1GiB", options=trainfit.StepOptions(batch=1, seq=32))
    trainfit.save_plan(plan, tmp_path / "plan.json")
    settings = trainfit.load_plan(tmp_path / "plan.json").settings
    assert (settings.batch, settings.seq, settings.parameters) == (1, 32, 1_350_400)


def test_parameters_on_the_host_are_said() -> None:
    class Offloaded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(1000, 256, device="cpu")
            self.head = nn.Linear(256, 4, device="cuda")

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.head(self.table(tokens).to("cuda"))
            return found

    def offloaded() -> trainfit.Step:
        tokens = torch.randint(0, 1000, (4, 8), device="cpu")
        return trainfit.Step.of(Offloaded(), tokens, loss=lambda output: output.mean())

    trace = trainfit.capture(offloaded, device="h100")
    assert [w for w in trace.warnings if "on the host" in w] == [
        "1000.00 KiB of the model's parameters are on the host, and are not counted: only what is on the GPU "
        "is."
    ]
    assert not [w for w in trainfit.capture(build, device="h100").warnings if "on the host" in w]
