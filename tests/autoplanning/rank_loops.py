"""Training loops of two processes, with and without a plan that they make together; run by `on_ranks`."""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from known_speed import known_speed
from small_loops import ROWS, WIDTH, Tied, same
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import trainfit
from trainfit.autoplanning.autoplan_result import AutoPlan
from trainfit.planning.plan_replay import replay_plan
from trainfit.workspace.profiler import no_cycle_collection, profile_allocations

STEPS = 6


class Unused(Tied):
    """Has a part that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.aside = nn.Linear(WIDTH, WIDTH)


def replicated(**options: Any) -> nn.Module:
    return DistributedDataParallel(Tied(), **options)


def hooked() -> nn.Module:
    model = DistributedDataParallel(Tied())
    model.register_comm_hook(None, fp16_compress_hook)
    return model


def sharded(**options: Any) -> nn.Module:
    mesh, model = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), Tied()
    for part in model.parts:
        fully_shard(part, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "ddp": replicated,
    "ddp, accumulating": replicated,
    "ddp, views of buckets": functools.partial(replicated, gradient_as_bucket_view=True),
    "ddp, unused parameters": lambda: DistributedDataParallel(Unused(), find_unused_parameters=True),
    "ddp, a hook": hooked,
    "fsdp2": sharded,
    "fsdp2, kept after forward": functools.partial(sharded, reshard_after_forward=False),
}
Loop = tuple[nn.Module, torch.optim.Optimizer, Callable[[list[torch.Tensor]], float]]


def make_loop(name: str) -> Loop:
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(10 + dist.get_rank())  # for dropout

    def step(batches: list[torch.Tensor]) -> float:
        total = 0.0
        for number, batch in enumerate(batches, start=1):
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = number == len(batches)
            loss = (model(batch) - batch.roll(1, 0)).square().mean()
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return model, optimizer, step


def batches(name: str) -> list[list[torch.Tensor]]:
    """Return what this rank trains on: the second has more than the first."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(7 + rank)
    each = 2 if "accumulating" in name else 1
    rows = ROWS + 32 * rank
    return [[torch.randn(rows, WIDTH, generator=generator) for _ in range(each)] for _ in range(STEPS)]


def local(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.to_local() if isinstance(value, DTensor) else value).detach().clone()
    if isinstance(value, dict):
        return {key: local(item) for key, item in value.items()}
    return [local(item) for item in value] if isinstance(value, list | tuple) else value


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    return [
        local(model.state_dict()),
        local(optimizer.state_dict()),
        [None if p.grad is None else local(p.grad) for p in model.parameters()],
        torch.get_rng_state(),
    ]


def trained(name: str, before: int, share: float | None) -> tuple[list[Any], AutoPlan | None, Loop]:
    """Train some steps; before one of them, plan for a share of what the step needs."""
    model, optimizer, step = make_loop(name)
    losses, done = [], None
    for number, batch in enumerate(batches(name)):
        if number == before and share is not None:
            found = state_of(model, optimizer)
            roomy = trainfit.autoplan(model, step, batch, budget="1GiB")
            assert roomy.fits and roomy.plan is None
            assert same(state_of(model, optimizer), found)
            done = trainfit.autoplan(model, step, batch, budget=int(roomy.needed_bytes * share))
        losses.append(step(batch))
    return [losses, *state_of(model, optimizer)], done, (model, optimizer, step)


def rise_of(step: Callable[[list[torch.Tensor]], float], batch: list[torch.Tensor]) -> int:
    """Measure how far a step rises above what is there before it."""
    with no_cycle_collection(), profile_allocations() as found, found.range("step"):
        step(batch)
    used = found.usage("step")
    return used.peak_bytes - used.start_bytes


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Collect what is written to the log of trainfit."""
    log, lines = logging.getLogger("trainfit"), Lines()
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    yield lines.lines
    log.removeHandler(lines)


def compared(name: str, before: int, share: float) -> dict[str, Any]:
    """Return what came out of a training with a plan beside one without, and what was measured."""
    torch.set_num_threads(1)
    with logged() as lines:
        return _compared(name, before, share, lines)


def _compared(name: str, before: int, share: float, lines: list[str]) -> dict[str, Any]:
    without, _, _ = trained(name, before, None)
    with known_speed(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with_it, done, (_, _, step) = trained(name, before, share)
    assert done is not None and done.plan is not None
    timeline, _ = replay_plan(done.plan, done.trace)
    batch = batches(name)[0]
    # What is exchanged is held a moment longer by a thread of gloo's, now and then: not in all of the steps.
    rises = [rise_of(step, batch) for _ in range(6)]
    return {
        "same": same(with_it, without),
        "lines": lines,
        "warnings": [str(one.message) for one in said if "plan" in str(one.message)],
        "fits": done.fits,
        "plan": repr(done.plan.regions),
        "own": (done.needed_bytes, done.budget_bytes),
        "ranks": [(r.rank, r.needed_bytes, r.budget_bytes, r.planned_bytes, r.fits) for r in done.ranks],
        "promised_rise": done.ranks[dist.get_rank()].planned_bytes - timeline.persistent_bytes,
        "measured_rise": min(rises),
    }


def all_compared(cases: list[tuple[str, int]], share: float) -> list[dict[str, Any]]:
    return [compared(name, before, share) for name, before in cases]


def error_of(function: Callable[[], Any]) -> str:
    try:
        function()
    except trainfit.TrainfitError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def failing() -> dict[str, Any]:
    """Return what is said where a process fails, or where no plan can be made together."""
    rank = dist.get_rank()
    model, optimizer, step = make_loop("ddp")
    [batch] = batches("ddp")[0]

    def without_data() -> None:
        if rank == 0:
            raise ValueError("rank 0 has no data")
        step([batch])

    def sending() -> None:
        step([batch])
        dist.send(batch, 1) if rank == 0 else dist.recv(torch.empty_like(batches("ddp")[0][0][:ROWS]), 0)

    def with_objects() -> None:
        dist.broadcast_object_list([rank], 0)
        step([batch])

    static = DistributedDataParallel(Tied(), static_graph=True)
    before = state_of(model, optimizer)
    with known_speed():
        found: dict[str, Any] = {
            "own": error_of(lambda: trainfit.autoplan(model, without_data, optimizer=optimizer)),
            "small": error_of(lambda: trainfit.autoplan(model, step, [batch], budget="1MiB")),
            "static": error_of(lambda: trainfit.autoplan(static, lambda: static(batch).sum().backward())),
            "sent": error_of(lambda: trainfit.autoplan(model, sending, budget="1GiB")),
            "objects": error_of(lambda: trainfit.autoplan(model, with_objects, budget="1GiB")),
        }
    assert same(state_of(model, optimizer), before)
    step([batch])
    return {**found, "trained": not same(state_of(model, optimizer), before)}
