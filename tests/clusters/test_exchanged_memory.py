"""What counts as `communication`: buffers that are made to be exchanged, and nothing that is a result."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from trainfit import Step
from trainfit.capturing import capture
from trainfit.traces.ranks import Cluster
from trainfit.traces.trace import Trace

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
WIDTH, BATCH = 512, 64
ACTIVATION = 4 * BATCH * WIDTH
WEIGHT = 4 * WIDTH * WIDTH


def place_of(device: str) -> torch.device:
    dist.init_process_group("gloo")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if device == "cuda" else torch.device("cpu")


def layers(place: torch.device, count: int = 2) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))).to(place)


def step_of(
    model: nn.Module,
    place: torch.device,
    after_loss: Callable[[torch.Tensor], Any] = lambda loss: None,
    before_step: Callable[[], Any] = lambda: None,
    parts: int = 1,
) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(BATCH, WIDTH).to(place)

    def run() -> torch.Tensor:
        for part in range(parts):
            if parts > 1:
                model.set_requires_gradient_sync(part == parts - 1)  # type: ignore[operator]
            loss: torch.Tensor = model(data).sum()
            loss.backward()
        after_loss(loss.detach())
        before_step()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Step(model=model, optimizer=optimizer, run=run)


def captured(build: Callable[[str], Step], device: str) -> Trace:
    return capture(lambda: build(device), device=device, cluster=Cluster(4, 1))


def of_category(trace: Trace, category: str) -> list[int]:
    """Return the bytes of all storages of a category that have some, largest first."""
    sizes = (
        max([one.bytes, *(size for _, size in one.resizes)])
        for one in trace.storages
        if one.category == category
    )
    return sorted(filter(None, sizes), reverse=True)


def loss_is_averaged(device: str) -> Step:
    place = place_of(device)
    return step_of(layers(place), place, after_loss=lambda loss: dist.all_reduce(loss, dist.ReduceOp.AVG))


def gradients_are_averaged(device: str) -> Step:
    place = place_of(device)
    model = layers(place)

    def average() -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)

    return step_of(model, place, before_step=average)


def losses_are_gathered(device: str) -> Step:
    """Into zeros that nobody needs; what is sent is the loss itself."""
    place = place_of(device)

    def gather(loss: torch.Tensor) -> None:
        received = [torch.zeros(1, device=place) for _ in range(4)]
        dist.all_gather(received, loss.view(1))

    return step_of(layers(place), place, after_loss=gather)


def a_count_is_summed(device: str) -> Step:
    """It begins as zeros, but the step adds to it before it is exchanged."""
    place = place_of(device)

    def total(loss: torch.Tensor) -> torch.Tensor:
        count = torch.zeros(3, device=place)
        count += loss
        dist.all_reduce(count)
        return count

    return step_of(layers(place), place, after_loss=total)


def own_reduce_scatter(device: str) -> Step:
    """Gradients are copied into a buffer, reduced into another, and copied back."""
    place = place_of(device)
    model = layers(place, 1)

    def reduce() -> None:
        (gradient,) = (parameter.grad for parameter in model.parameters())
        assert gradient is not None
        buffer, part = torch.empty(WIDTH * WIDTH, device=place), torch.empty(WIDTH * WIDTH // 4, device=place)
        buffer.copy_(gradient.flatten())
        dist.reduce_scatter_single(part, buffer)
        gradient.flatten()[: WIDTH * WIDTH // 4].copy_(part)

    return step_of(model, place, before_step=reduce)


DEVICES = pytest.mark.parametrize("device", ["cpu", "cuda"])


@DEVICES
def test_a_loss_that_is_averaged_is_no_buffer(device: str) -> None:
    trace = captured(loss_is_averaged, device)
    assert any(op for op in trace.ops if trace.signatures[op.signature].collective)
    assert of_category(trace, "communication") == []


@DEVICES
def test_gradients_that_are_averaged_in_place_are_gradients(device: str) -> None:
    trace = captured(gradients_are_averaged, device)
    assert of_category(trace, "communication") == []
    assert of_category(trace, "gradient") == [WEIGHT, WEIGHT]


@DEVICES
def test_what_is_received_into_is_a_buffer_what_is_summed_is_not(device: str) -> None:
    assert of_category(captured(losses_are_gathered, device), "communication") == [4] * 4
    assert of_category(captured(a_count_is_summed, device), "communication") == []


@DEVICES
def test_what_gradients_are_copied_into_to_be_reduced_is_a_buffer(device: str) -> None:
    trace = captured(own_reduce_scatter, device)
    assert of_category(trace, "communication") == [WEIGHT, WEIGHT // 4]
    assert of_category(trace, "gradient") == [WEIGHT]


def tensor_parallel(device: str) -> Step:
    place = place_of(device)
    mesh = init_device_mesh(device, (4,))
    model = nn.Sequential(layers(place), layers(place))
    plan = {
        f"{n}.{m}": style() for n in range(2) for m, style in ((0, ColwiseParallel), (1, RowwiseParallel))
    }
    parallelize_module(model, mesh, plan)
    return step_of(model, place)


@DEVICES
def test_the_sums_of_tensor_parallel_layers_are_results(device: str) -> None:
    """Each pair of layers ends in a sum over all ranks: an activation; backward's is temporary."""
    trace = captured(tensor_parallel, device)
    assert of_category(trace, "communication") == []
    made = {
        trace.storages[number].category: trace.storages[number].bytes
        for op in trace.ops
        if trace.signatures[op.signature].collective is not None
        for number in op.creates
    }
    assert made == {"activation": ACTIVATION, "temporary": ACTIVATION}


def fsdp(device: str, parts: int = 1, **how: Any) -> Step:
    place = place_of(device)
    mesh = init_device_mesh(device, (4,))
    model = layers(place)
    for layer in model:
        fully_shard(layer, mesh=mesh, **how)
    fully_shard(model, mesh=mesh, **how)
    return step_of(model, place, parts=parts)


@DEVICES
def test_the_buffers_of_fsdp(device: str) -> None:
    """Two units, each gathered in forward and in backward, and reduced."""
    trace = captured(fsdp, device)
    assert of_category(trace, "communication") == [WEIGHT] * 6
    assert of_category(trace, "gradient") == [WEIGHT, WEIGHT, WEIGHT // 4, WEIGHT // 4]


@DEVICES
def test_gradients_that_wait_to_be_reduced_are_gradients_in_any_dtype(device: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    trace = captured(lambda device: fsdp(device, parts=2, mp_policy=policy), device)
    kept = [one for one in trace.storages if one.bytes == WEIGHT and one.category == "gradient"]
    assert len(kept) == 2  # in four bytes: added to in the second part
    reduced = [one for one in trace.storages if one.bytes == WEIGHT and one.category == "communication"]
    assert len(reduced) == 2


def ddp(device: str) -> Step:
    place = place_of(device)
    return step_of(DistributedDataParallel(layers(place)), place)


@DEVICES
def test_the_buckets_of_ddp(device: str) -> None:
    trace = captured(ddp, device)
    assert of_category(trace, "communication") == [WEIGHT, WEIGHT]  # the first has 1 MiB
    assert of_category(trace, "gradient") == [WEIGHT, WEIGHT]
