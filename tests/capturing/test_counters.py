"""Wherever people keep a counter: a run that does more, every fifth time, is the one that is recorded."""

from __future__ import annotations

import argparse
import itertools
import os
import random
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from captured_steps import captured
from torch import nn

import trainfit
from trainfit.capturing.python_state import PythonState
from trainfit.steps.step import Step
from trainfit.traces.simulate import simulate
from trainfit.traces.trace import Trace

Train = Callable[[], torch.Tensor]
Make = Callable[[nn.Module, torch.optim.Optimizer, Train, Train], Callable[[], Any]]


def traced(make: Make) -> Trace:
    """Capture a step whose `run` is made of a training step and of something large."""

    def build() -> Step:
        model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
        optimizer = torch.optim.AdamW(model.parameters())
        inputs, more = torch.randn(4, 32), torch.randn(2000, 32)

        def train() -> torch.Tensor:
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        def large() -> torch.Tensor:
            with torch.no_grad():
                return model(more)

        return Step(model, optimizer, make(model, optimizer, train, large))

    return captured(build)


def namespace(model: nn.Module, optimizer: torch.optim.Optimizer, train: Train, large: Train) -> Any:
    state = types.SimpleNamespace(step=0)

    def run() -> None:
        state.step += 1
        train()
        if state.step % 5 == 0:
            large()

    return run


def arguments(model: nn.Module, optimizer: torch.optim.Optimizer, train: Train, large: Train) -> Any:
    args = argparse.Namespace(step=0, every=5)

    def run() -> None:
        args.step += 1
        train()
        if args.step % args.every == 0:
            large()

    return run


def attribute_of_function(
    model: nn.Module, optimizer: torch.optim.Optimizer, train: Train, large: Train
) -> Any:
    def run() -> None:
        run.step += 1  # type: ignore[attr-defined]
        train()
        if run.step % 5 == 0:  # type: ignore[attr-defined]
            large()

    run.step = 0  # type: ignore[attr-defined]
    return run


def default_argument(model: nn.Module, optimizer: torch.optim.Optimizer, train: Train, large: Train) -> Any:
    def run(*, state: dict[str, int] = {"n": 0}) -> None:  # noqa: B006
        state["n"] += 1
        train()
        if state["n"] % 5 == 0:
            large()

    return run


def first_of_a_list(model: nn.Module, optimizer: torch.optim.Optimizer, train: Train, large: Train) -> Any:
    state = [0, 5]

    def run() -> None:
        state[0] += 1
        train()
        if state[0] % state[1] == 0:
            large()

    return run


def array(model: nn.Module, optimizer: torch.optim.Optimizer, train: Train, large: Train) -> Any:
    calls = numpy.zeros(1, dtype=numpy.int64)

    def run() -> None:
        calls[0] += 1
        train()
        if calls[0] % 5 == 0:
            large()

    return run


def tensor(model: nn.Module, optimizer: torch.optim.Optimizer, train: Train, large: Train) -> Any:
    calls = torch.zeros((), dtype=torch.long)

    def run() -> None:
        calls.add_(1)
        train()
        if calls % 5 == 0:
            large()

    return run


def scheduler(model: nn.Module, optimizer: torch.optim.Optimizer, train: Train, large: Train) -> Any:
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)

    def run() -> None:
        train()
        schedule.step()
        if schedule.last_epoch % 5 == 0:
            large()

    return run


def learning_rate(model: nn.Module, optimizer: torch.optim.Optimizer, train: Train, large: Train) -> Any:
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)

    def run() -> None:
        train()
        schedule.step()
        if schedule.get_last_lr()[0] < 9e-4:
            large()

    return run


def steps_of_the_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, train: Train, large: Train
) -> Any:
    def run() -> None:
        train()
        if int(next(iter(optimizer.state.values()))["step"]) % 5 == 0:
            large()

    return run


def numpy_generator(model: nn.Module, optimizer: torch.optim.Optimizer, train: Train, large: Train) -> Any:
    generator = numpy.random.default_rng(0)

    def run() -> None:
        train()
        if generator.random() < 0.3:
            large()

    return run


def python_generator(model: nn.Module, optimizer: torch.optim.Optimizer, train: Train, large: Train) -> Any:
    generator = random.Random(0)

    def run() -> None:
        train()
        if generator.random() < 0.5:
            large()

    return run


def hook_of_the_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, train: Train, large: Train
) -> Any:
    calls = itertools.count(1)
    optimizer.register_step_post_hook(lambda *_: large() if next(calls) % 5 == 0 else None)
    return lambda: train()


def hook_of_a_module(model: nn.Module, optimizer: torch.optim.Optimizer, train: Train, large: Train) -> Any:
    calls = 0

    def hook(module: nn.Module, inputs: object, output: object) -> None:
        nonlocal calls
        calls += 1
        if calls % 5 == 0:
            torch.randn(2000, 32).exp()

    model[0].register_forward_hook(hook)  # type: ignore[index]
    return lambda: train()


def hook_of_a_parameter(
    model: nn.Module, optimizer: torch.optim.Optimizer, train: Train, large: Train
) -> Any:
    calls = 0

    def hook(parameter: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls % 5 == 0:
            torch.randn(2000, 32).exp()

    next(model.parameters()).register_post_accumulate_grad_hook(hook)
    return lambda: train()


def generator_itself(model: nn.Module, optimizer: torch.optim.Optimizer, train: Train, large: Train) -> Any:
    def runs() -> Any:
        for call in itertools.count(1):
            yield train()
            if call % 5 == 0:
                large()

    return runs().__next__


COUNTERS = (
    namespace,
    arguments,
    attribute_of_function,
    default_argument,
    first_of_a_list,
    array,
    tensor,
    scheduler,
    learning_rate,
    steps_of_the_optimizer,
    numpy_generator,
    python_generator,
    hook_of_the_optimizer,
    hook_of_a_module,
    hook_of_a_parameter,
    generator_itself,
)


@pytest.mark.parametrize("make", COUNTERS)
def test_the_run_that_does_more_is_found(make: Make) -> None:
    trace = traced(make)
    # 2,000 rows of 32 floats, of which any ordinary run of the step has only 4
    assert simulate(trace).peak_bytes > 2000 * 32 * 4 * 2
    assert trace.steps.differ and trace.steps.changing


def test_a_scheduler_that_nobody_asks_is_no_counter() -> None:
    def make(model: nn.Module, optimizer: torch.optim.Optimizer, train: Train, large: Train) -> Any:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)

        def run() -> None:
            train()
            schedule.step()

        return run

    steps = traced(make).steps
    assert steps.looked_at == 2 and steps.changing == ()


def test_a_counter_that_changed_nothing_so_far_is_said() -> None:
    def make(model: nn.Module, optimizer: torch.optim.Optimizer, train: Train, large: Train) -> Any:
        calls = 0

        def run() -> None:
            nonlocal calls
            calls += 1
            train()
            if calls % 100 == 0:
                large()

        return run

    (warning,) = traced(make).warnings
    assert "12 runs of the step were looked at, and are alike; but `calls` changes from run to run" in warning


def test_looking_leaves_values_as_they_are() -> None:
    """Of everything that is looked at, nothing is called or drawn."""
    generator = random.Random(1)
    model = nn.Linear(2, 2)

    def run() -> float:
        return generator.random()

    step = Step(model, None, run)
    before = PythonState(step)
    assert before.changes_to(PythonState(step)) == ()
    assert run() == random.Random(1).random()
    assert before.changes_to(PythonState(step)) == ("generator",)


def test_steps_that_torchs_optimizer_counts_are_no_counter_of_the_program() -> None:
    """Classes of an installed library name `state` somewhere; the step itself never asks for it."""
    transformers = pytest.importorskip("transformers")

    def build() -> Step:
        config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=64, n_positions=16)
        model = transformers.GPT2LMHeadModel(config)
        tokens = torch.randint(0, 64, (2, 16))
        optimizer = torch.optim.AdamW(model.parameters())
        return Step.of(model, {"input_ids": tokens, "labels": tokens}, optimizer=optimizer)

    trace = captured(build)

    assert trace.steps.changing == ()
    assert len(trace.steps.peaks) == 2
    assert not trace.warnings


_THROUGH_A_LINK = """
import torch, trainfit
assert "linked" in torch.__file__, torch.__file__
options = trainfit.StepOptions(batch=1, seq=8)
print(trainfit.capture("gpt2-tiny", device="h100", options=options).steps.looked_at)
"""


def test_torch_is_known_where_its_folder_is_reached_through_a_link(tmp_path: Path) -> None:
    """An optimizer's own counter of steps is not the program's, wherever the libraries are installed."""
    packages = Path(torch.__file__).parents[1].resolve()
    (tmp_path / "linked").symlink_to(packages)
    source = Path(trainfit.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "linked"), str(source)])}
    command = [sys.executable, "-c", _THROUGH_A_LINK]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    alike = trainfit.capture("gpt2-tiny", device="h100", options=trainfit.StepOptions(batch=1, seq=8))
    assert int(found.stdout) == alike.steps.looked_at <= 2
