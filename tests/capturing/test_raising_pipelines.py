"""Code of the user that raises inside of a pipeline's schedule: one error, and nothing is left behind."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage, microbatch, schedules, stage
from torch.nn import functional
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from trainfit.capturing import capture
from trainfit.errors import CaptureError, UserCodeError
from trainfit.steps.step import Step
from trainfit.traces.ranks import Cluster

WORLD, WIDTH, PIECES = 2, 8, 4


class Raises(nn.Module):
    """Raises in the calls from a number on, in forward or in backward."""

    def __init__(self, where: str, call: int) -> None:
        super().__init__()
        self.where, self.call, self.calls = where, call, 0
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.where == "forward" and self.calls >= self.call:
            raise ValueError("as the stage pleases")
        result: torch.Tensor = self.layer(x)
        if self.where == "backward" and self.calls >= self.call and result.requires_grad:
            result.register_hook(self._fail)
        return result

    def _fail(self, gradient: torch.Tensor) -> None:
        raise ValueError("as the stage pleases")


def build(schedule: str, where: str, on_stage: int, call: int, device: str) -> Step:
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank = dist.get_rank()
    place = torch.device("cuda", rank) if device == "cuda" else torch.device("cpu")
    kind: Any = getattr(pipelining, schedule)
    several = issubclass(kind, schedules.PipelineScheduleMulti)
    numbers = range(rank, 2 * WORLD, WORLD) if several else range(rank, WORLD, WORLD)
    parts = 2 * WORLD if several else WORLD
    model = nn.ModuleList(Raises(where if number == on_stage else "", call) for number in numbers).to(place)
    stages = [PipelineStage(part, number, parts, place) for part, number in zip(model, numbers)]

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if where == "loss":
            raise ValueError("as the stage pleases")
        return functional.mse_loss(output, target)

    made = kind(stages if several else stages[0], PIECES, loss_fn=loss)
    batch = torch.ones(2 * PIECES, WIDTH, device=place)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        given = (batch,) if rank == 0 else ()
        made.step(*given, target=batch) if parts - 1 in numbers else made.step(*given)
        optimizer.step()
        optimizer.zero_grad()

    return Step(model=model, optimizer=optimizer, run=run)


def functions_of(*owners: ModuleType | type) -> dict[str, Any]:
    """Return every function of modules and classes, and of the classes that a module defines."""
    found: dict[str, Any] = {}
    for owner in owners:
        for name, value in vars(owner).items():
            if name == "reduce_op":
                continue  # warns that it is not to be used any more, whatever it is asked
            if callable(value):
                found[f"{owner.__name__}.{name}"] = value
            if (
                isinstance(owner, ModuleType)
                and isinstance(value, type)
                and value.__module__ == owner.__name__
            ):
                found |= functions_of(value)
    return found


def state() -> dict[str, Any]:
    world = dist.distributed_c10d._world
    return {
        "environment": dict(os.environ),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "groups": (dist.is_initialized(), len(world.pg_map), len(world.pg_names), len(world.pg_group_ranks)),
        "meshes": list(dist.device_mesh._mesh_resources.mesh_stack),
        "modes": [*_get_current_dispatch_mode_stack(), *torch.overrides._get_current_function_mode_stack()],
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "random": torch.get_rng_state().tolist(),
        "warnings": list(warnings.filters),
        "functions": functions_of(
            stage,
            schedules,
            microbatch,
            dist,
            dist.distributed_c10d,
            dist.device_mesh,
            dist.Work,
            torch.autograd,
            torch.autograd.graph,
            torch.cuda,
            torch.Tensor,
            nn.Module,
            threading.Thread,
        ),
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    changed = [name for name in before if name != "functions" and before[name] != after[name]]
    functions, later = before["functions"], after["functions"]
    return changed + [name for name in functions | later if functions.get(name) is not later.get(name)]


def expect_error(make: Callable[[], Step], rank: int, device: str) -> None:
    with pytest.raises(UserCodeError, match="ValueError: as the stage pleases") as caught:
        capture(make, cluster=Cluster(WORLD, rank), device=device)
    assert "test_raising_pipelines.py" in caught.value.user_traceback


def refused(device: str) -> Step:
    """A stage that a capture cannot follow."""
    step = build("ScheduleGPipe", "", -1, 0, device)

    def forward(x: torch.Tensor) -> torch.Tensor:
        with FakeTensorMode():
            return x

    step.model[0].forward = forward  # type: ignore[index]
    return step


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_a_capture_refuses_in_a_stage_is_said_as_elsewhere(device: str) -> None:
    """Not as the error that torch makes of it."""
    with pytest.raises(
        CaptureError, match=r"test_raising_pipelines\.py:\d+ follows the operators .* limit of"
    ):
        capture(partial(refused, device), cluster=Cluster(WORLD, 0), device=device)


IN_SHAPES, LATER = 1, 4
"""The first call is for the shapes of what it returns; then come the pieces of the batch."""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("schedule", "where", "call"),
    [
        ("ScheduleGPipe", "forward", IN_SHAPES),
        ("ScheduleGPipe", "backward", LATER),
        ("Schedule1F1B", "forward", LATER),
        ("Schedule1F1B", "backward", LATER),
        ("ScheduleInterleaved1F1B", "forward", LATER),
        ("ScheduleInterleavedZeroBubble", "backward", LATER),
    ],
)
def test_a_stage_that_raises_leaves_nothing_behind(
    schedule: str, where: str, call: int, rank: int, device: str
) -> None:
    before = state()
    assert len(before["functions"]) > 1000
    expect_error(partial(build, schedule, where, rank, call, device), rank, device)
    assert differences(before, state()) == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_loss_that_raises_leaves_nothing_behind(device: str) -> None:
    before = state()
    expect_error(partial(build, "Schedule1F1B", "loss", -1, 0, device), 1, device)
    assert differences(before, state()) == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_stage_of_another_rank_that_raises_is_the_same_error(device: str) -> None:
    """Rank 1 asks for the shapes that rank 0 sends; it is run for that, and raises."""
    before = state()
    expect_error(partial(build, "ScheduleGPipe", "forward", 0, IN_SHAPES, device), 1, device)
    assert differences(before, state()) == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_next_capture_is_like_one_before(device: str) -> None:
    good = partial(build, "Schedule1F1B", "", -1, 0, device)
    first = capture(good, cluster=Cluster(WORLD, 1), device=device)
    expect_error(partial(build, "Schedule1F1B", "backward", 1, LATER, device), 1, device)
    again = capture(good, cluster=Cluster(WORLD, 1), device=device)
    assert (again.ops, again.storages) == (first.ops, first.storages)
