"""A capture, whether it succeeds or not, leaves torch, the process and the user's objects as they were."""

from __future__ import annotations

import builtins
import functools
import gc
import importlib
import io
import os
import pickle
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch._dynamo  # wraps functions of torch when it is first imported, which is not our doing
import torch.nn.functional as F
from captured_steps import captured, training
from torch import nn

from trainfit.capturing import capture
from trainfit.errors import StepError, UserCodeError
from trainfit.steps.step import Step
from trainfit.verifying.measuring import measure_step

pytestmark = pytest.mark.usefixtures("little_garbage")


def good_step() -> Step:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.LayerNorm(4))
    optimizer = torch.optim.Adam(model.parameters())
    return Step.of(model, torch.randn(3, 4), loss=torch.sum, optimizer=optimizer)


def bad_step() -> Step:
    """Raises in the middle of backward, where the most is going on."""
    model, inputs = nn.Linear(4, 4), torch.randn(3, 4)

    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("on purpose")

    def run() -> None:
        output = model(inputs)
        output.register_hook(fail)
        output.sum().backward()

    return Step(model, None, run)


def bad_optimizer() -> Step:
    """Raises inside the optimizer's step, under autocast."""

    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise ValueError("on purpose")

    model, inputs = nn.Linear(4, 4), torch.randn(3, 4)
    optimizer = Failing(model.parameters(), lr=0.1)

    def run() -> None:
        model(inputs).sum().backward()
        with torch.autocast("cpu"):
            optimizer.step()

    return Step(model, optimizer, run)


def bad_build() -> Step:
    raise ValueError("on purpose")


def no_step() -> Any:
    return 3


STEPS = [good_step, bad_step, bad_optimizer, bad_build, no_step]
both_devices = pytest.mark.parametrize("device", ["cpu", "cuda"])
all_steps = pytest.mark.parametrize("build", STEPS, ids=lambda build: build.__name__)


def attempt(build: Callable[[], Any], device: str = "cpu") -> None:
    """Capture, and expect the error that belongs to the step."""
    if build is good_step:
        capture(build, device=device)
    elif build is no_step:
        with pytest.raises(StepError, match=r"must return a trainfit\.Step"):
            capture(build, device=device)
    else:
        with pytest.raises(UserCodeError, match="ValueError: on purpose"):
            capture(build, device=device)


# torch ----------------------------------------------------------------------------------------------------


def _public_functions() -> dict[str, Any]:
    owners: dict[str, Any] = {
        "torch": torch,
        "torch.Tensor": torch.Tensor,
        "torch.UntypedStorage": torch.UntypedStorage,
        "torch.nn.Module": nn.Module,
        "torch.nn.functional": F,
        "torch.autograd": torch.autograd,
        "torch.autograd.graph": torch.autograd.graph,
        "torch.random": torch.random,
        "torch.cuda": torch.cuda,
        "torch.cuda.nvtx": torch.cuda.nvtx,
        "torch.accelerator": torch.accelerator,
        "torch.amp.autocast_mode.autocast": torch.amp.autocast_mode.autocast,
        "torch.backends.cudnn": torch.backends.cudnn,
        "torch.optim.Optimizer": torch.optim.Optimizer,
        "torch.serialization": torch.serialization,
        "builtins": builtins,
        "io": io,
        "os": os,
        "pickle": pickle,
        "shutil": shutil,
    }
    found = {}
    for owner_name, owner in owners.items():
        for name in dir(owner):
            value = owner.__dict__.get(name) if isinstance(owner, type) else getattr(owner, name, None)
            if callable(value) and name != "__dict__":
                found[f"{owner_name}.{name}"] = value
    return found


@both_devices
@all_steps
def test_every_function_of_torch_is_the_original_again(build: Callable[[], Any], device: str) -> None:
    before = _public_functions()
    assert len(before) > 1000
    attempt(build, device)
    after = _public_functions()
    changed = [name for name, value in before.items() if after.get(name) is not value]
    assert changed == []


@both_devices
@all_steps
def test_functions_that_write_have_their_own_code_again(build: Callable[[], Any], device: str) -> None:
    writers = [torch.save, torch.load, numpy.save._implementation, numpy.savez._implementation]
    before = [writer.__code__ for writer in writers]
    finders = list(sys.meta_path)
    attempt(build, device)
    assert all(writer.__code__ is code for writer, code in zip(writers, before))
    assert sys.meta_path == finders


def _kernels_of_ours() -> list[str]:
    registered = ["linear", "dropout", "rms_norm", "lstm.input", "gru.input", "scaled_dot_product_attention"]
    has: Any = torch._C._dispatch_has_kernel_for_dispatch_key
    found = [name for name in registered if has(f"aten::{name}", "AutogradCPU")]
    listed = ["exp", "layer_norm", "sum", "pow.Tensor_Scalar", "cumsum"]
    return found + [name for name in listed if has(f"aten::{name}", "AutocastCPU")]


@both_devices
@all_steps
def test_no_kernel_stays_registered(build: Callable[[], Any], device: str) -> None:
    before = _kernels_of_ours()
    attempt(build, device)
    assert _kernels_of_ours() == before


@both_devices
@all_steps
def test_no_mode_and_no_hook_stays(build: Callable[[], Any], device: str) -> None:
    attempt(build, device)
    from torch.optim import optimizer as optimizers
    from torch.overrides import _get_current_function_mode
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    assert _get_current_dispatch_mode() is None
    assert _get_current_function_mode() is None
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert not optimizers._global_optimizer_pre_hooks
    assert not optimizers._global_optimizer_post_hooks
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()


@both_devices
@all_steps
def test_ordinary_code_works_afterwards(build: Callable[[], Any], device: str) -> None:
    attempt(build, device)
    # GIVEN a real model, trained for a step
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.0), nn.LSTM(8, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    inputs = torch.randn(3, 4)
    loss = model(inputs)[0].pow(2).sum()
    before = loss.item()
    loss.backward()
    optimizer.step()
    # THEN it learns, and its tensors are where they say
    assert model(inputs)[0].pow(2).sum().item() < before
    assert inputs.device.type == "cpu"
    assert not inputs.is_cuda
    with torch.autocast("cpu", torch.bfloat16):
        assert inputs.to(torch.bfloat16).exp().dtype is torch.bfloat16
        assert (inputs @ inputs.T).dtype is torch.bfloat16
    copied = inputs.untyped_storage().clone()
    assert copied.nbytes() == 48


# State of the process -------------------------------------------------------------------------------------


def _random_states() -> list[Any]:
    return [torch.get_rng_state().tolist(), numpy.random.get_state()[1].tolist(), random.getstate()]


@both_devices
@all_steps
def test_the_random_generators_are_where_they_were(build: Callable[[], Any], device: str) -> None:
    torch.manual_seed(5)
    numpy.random.seed(5)
    random.seed(5)
    before = _random_states()
    attempt(build, device)
    assert _random_states() == before


@both_devices
@all_steps
def test_defaults_and_garbage_collection_are_as_they_were(build: Callable[[], Any], device: str) -> None:
    assert gc.isenabled()
    before = (torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads())
    attempt(build, device)
    assert gc.isenabled()
    assert (torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()) == before


def test_garbage_collection_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        capture(good_step)
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_defaults_that_the_users_code_changes_are_put_back(device: str) -> None:
    # GIVEN a script that sets them once for the whole process, as scripts do
    def build() -> Step:
        torch.set_default_dtype(torch.float64)
        torch.set_default_device(device)
        return good_step()

    before = (torch.get_default_dtype(), torch.get_default_device())
    try:
        capture(build, device=device)
        assert (torch.get_default_dtype(), torch.get_default_device()) == before
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def test_tensors_that_a_function_cache_took_up_during_the_capture_are_dropped() -> None:
    @functools.lru_cache
    def positions(length: int) -> torch.Tensor:
        return torch.arange(length).float() + 0.5

    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(300, 300)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * positions(300)

    capture(training(Remembering, 2, 300))
    assert positions.cache_info().currsize == 0
    assert positions(3).tolist() == [0.5, 1.5, 2.5]


@both_devices
def test_the_tensors_of_a_module_that_the_step_imports_are_real(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a module with constants, which the step is the first to import
    name = f"constants_of_a_step_for_{device}"
    (tmp_path / f"{name}.py").write_text(
        "import torch\nSCALE = torch.full((70000,), 3.0)\nONE = torch.tensor(1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def build() -> Step:
        constants = importlib.import_module(name)
        return training(lambda: nn.Linear(4, 4), 3, 4, loss=lambda y: y.sum() * constants.SCALE[0])()

    captured(build, device)
    # THEN they have their values when the capture is over
    constants = importlib.import_module(name)
    assert constants.SCALE.sum() == 210000
    assert constants.ONE == 1


def test_a_function_cache_is_emptied_also_if_the_capture_fails() -> None:
    @functools.cache
    def positions(length: int) -> torch.Tensor:
        return torch.arange(length)

    def build() -> Step:
        positions(7)
        raise ValueError("on purpose")

    with pytest.raises(UserCodeError):
        capture(build)
    assert positions.cache_info().currsize == 0


def test_a_function_cache_is_empty_when_a_capture_begins_again() -> None:
    # GIVEN a step that is captured a second time, with values for its matrix exponential, and a cache
    models: list[nn.Module] = []

    @functools.cache
    def scales(count: int) -> torch.Tensor:
        return torch.rand(count) + 0.5

    class Exponential(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(150, 150))
            models.append(self)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scales(100)  # which no operator reads
            return (x @ torch.matrix_exp(self.weight)).sum()

    # WHEN it is captured
    build = training(Exponential, 4, 150)
    trace = capture(build)
    assert len(models) == 2
    # THEN the cached tensor is counted as in a real run
    measured = measure_step(build, "cpu", steps=trace.steps, timed=0)
    assert trace.persistent_bytes == measured.persistent_bytes


@pytest.mark.parametrize("module", ["resnet", "typing_model", "torchvision.ops"])
def test_a_function_cache_is_emptied_whatever_the_name_of_its_module_begins_with(module: str) -> None:
    @functools.cache
    def positions(length: int) -> torch.Tensor:
        return torch.arange(length)

    positions.__module__ = module

    def build() -> Step:
        positions(7)
        return good_step()

    capture(build)
    assert positions.cache_info().currsize == 0


def test_a_function_cache_that_was_not_used_keeps_what_it_has() -> None:
    @functools.cache
    def next_of(number: int) -> int:
        return number + 1

    next_of(1)
    capture(good_step)
    assert next_of.cache_info().currsize == 1


# Twice ----------------------------------------------------------------------------------------------------


@both_devices
def test_two_captures_of_one_step_give_the_same_trace(device: str) -> None:
    assert capture(good_step, device=device) == capture(good_step, device=device)


def test_a_capture_after_a_failed_one_gives_the_same_trace() -> None:
    before = capture(good_step)
    attempt(bad_step)
    attempt(bad_step, "cuda")
    assert capture(good_step) == before


def test_the_trace_does_not_depend_on_the_random_state_around_it() -> None:
    torch.manual_seed(1)
    before = capture(good_step)
    torch.manual_seed(2)
    assert capture(good_step) == before


# Models from before ---------------------------------------------------------------------------------------


def _trained_before() -> tuple[nn.Module, Step]:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, Step.of(model, torch.randn(3, 4), loss=torch.sum, optimizer=optimizer)


def test_a_model_made_before_the_capture_is_refused_and_unharmed() -> None:
    model, step = _trained_before()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(StepError, match="made before the capture") as refused:
        capture(lambda: step)
    assert "make the model inside the function that builds the step" in str(refused.value)
    # Nothing was changed, and it still trains.
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(parameter.grad is None for parameter in model.parameters())
    step.run()
    assert not torch.equal(model[0].weight, before["0.weight"])


def test_a_part_made_before_the_capture_is_refused_as_well() -> None:
    part = nn.Linear(4, 4)

    def build() -> Step:
        model = nn.Sequential(nn.Linear(4, 4), part)
        return Step.of(model, torch.randn(3, 4), loss=torch.sum)

    with pytest.raises(StepError, match="made before the capture"):
        capture(build)
    assert part.weight.abs().sum() > 0


def test_a_model_is_not_mistaken_for_a_dead_one_whose_address_it_got() -> None:
    # GIVEN models that are garbage already, but not collected yet
    gc.disable()
    try:
        for _ in range(20):
            for _ in range(50):
                dead = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
                dead.itself = [dead]
            del dead
            # THEN a model that is made in their memory is accepted
            capture(good_step)
    finally:
        gc.enable()


def test_tensors_from_before_can_be_used_and_keep_their_values() -> None:
    batch = torch.randn(3, 4)
    before = batch.clone()

    def build() -> Step:
        model = nn.Linear(4, 4)
        return Step.of(model, batch, loss=torch.sum)

    trace = captured(build)
    assert trace.persistent_bytes == (4 * 4 + 4) * 4 + 48
    assert torch.equal(batch, before)
    assert batch.untyped_storage().nbytes() == 48
