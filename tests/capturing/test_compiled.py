"""Compiled models, parts of them and functions are captured as eager PyTorch runs them; a note says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from captured_steps import captured, owned_bytes
from torch import nn

from trainfit.capturing.modules import ModuleTable
from trainfit.steps.step import Step
from trainfit.traces.simulate import simulate

both_devices = pytest.mark.parametrize("device", ["cpu", "cuda"])


class Model(nn.Module):
    """No container: it has no length."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Sequential(nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def _nothing(model: nn.Module) -> nn.Module:
    return model


def _whole(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def _parts(model: nn.Module) -> nn.Module:
    model.first = torch.compile(model.first, backend="eager")
    model.second = torch.compile(model.second, backend="eager")
    return model


def _by_method(model: nn.Module) -> nn.Module:
    model.first.compile(backend="eager")
    model.compile(backend="eager")
    return model


def _function(model: nn.Module) -> nn.Module:
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def _step(compile_it: Callable[[nn.Module], nn.Module]) -> Callable[[], Step]:
    def build() -> Step:
        model = compile_it(Model())
        optimizer = torch.optim.Adam(model.parameters())
        return Step.of(model, torch.randn(4, 8), loss=torch.sum, optimizer=optimizer)

    return build


@both_devices
@pytest.mark.parametrize("compile_it", [_whole, _parts, _by_method, _function])
def test_compiled_models_are_captured_as_their_originals(
    compile_it: Callable[[nn.Module], nn.Module], device: str
) -> None:
    eager, compiled = captured(_step(_nothing), device), captured(_step(compile_it), device)
    assert simulate(compiled).peak_bytes == simulate(eager).peak_bytes
    assert [compiled.op_name(n) for n in range(len(compiled.ops))] == [
        eager.op_name(n) for n in range(len(eager.ops))
    ]
    assert sum(owned_bytes(compiled, m.parameters) for m in compiled.modules) == sum(
        owned_bytes(eager, m.parameters) for m in eager.modules
    )
    (note,) = compiled.warnings
    assert note.startswith("torch.compile: the step was captured as eager PyTorch runs it")
    assert eager.warnings == ()


def test_a_module_without_a_length_is_never_tested_for_truth() -> None:
    class Unsure(nn.Linear):
        def __len__(self) -> int:
            raise TypeError("no length")

    table = ModuleTable()
    model = Unsure(2, 2)
    table.add_root(model)
    assert table.entries[0].own_parameters == (model.weight, model.bias)
    assert table.entries[0].own_buffers == ()
