"""One rank of a cluster: what its process finds, what is refused, and that nothing is left behind."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_steps import fsdp
from torch import nn
from torch.distributed import init_process_group
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_param

from trainfit.capturing import capture
from trainfit.capturing.distributed.lazy_chunks import Chunks
from trainfit.devices.cluster import Cluster
from trainfit.errors import CaptureError, OptionError, TrainfitError, UserCodeError
from trainfit.steps.step import Step
from trainfit.traces.trace import Trace

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def small_step(in_build: Callable[[], Any], in_run: Callable[[], Any] = lambda: None) -> Callable[[], Step]:
    """A step that calls something of the test's when it is built, and when it runs."""

    def build() -> Step:
        in_build()
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def run() -> torch.Tensor:
            in_run()
            loss = model(torch.ones(2, 4)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return Step(model=model, optimizer=optimizer, run=run)

    return build


def test_a_process_finds_what_torchrun_tells_it() -> None:
    seen: dict[str, str] = {}

    def look() -> None:
        seen.update({name: os.environ[name] for name in VARIABLES[:4]})
        init_process_group("nccl")
        seen["answers"] = f"{dist.get_rank()} of {dist.get_world_size()} on {dist.get_backend()}"

    trace = capture(small_step(look), cluster=Cluster(20, 17, gpus_per_node=8))
    # Rank 17 is on the third node, which has only four of twenty.
    assert [seen[name] for name in VARIABLES[:4]] == ["17", "20", "1", "4"]
    assert seen["answers"] == "17 of 20 on nccl"
    assert trace.cluster == Cluster(20, 17, gpus_per_node=8)


def test_groups_of_a_mesh_have_the_ranks_that_they_would_have() -> None:
    found: list[list[int]] = []

    def look() -> None:
        mesh = init_device_mesh("cpu", (3, 4), mesh_dim_names=("dp", "tp"))
        found[:] = [dist.get_process_group_ranks(mesh[name].get_group()) for name in ("dp", "tp")]
        assert dist.new_group([0, 7]).size() == 2
        assert dist.new_group([1, 2]) is dist.GroupMember.NON_GROUP_MEMBER

    capture(small_step(look), cluster=Cluster(12, 7))
    assert found == [[3, 7, 11], [4, 5, 6, 7]]


def state() -> tuple[Any, ...]:
    """What a capture replaces or sets, a sample of it."""
    return (
        {name: os.environ.get(name) for name in VARIABLES},
        dist.is_initialized(),
        sys.excepthook,
        dist.init_process_group,
        dist.all_reduce,
        DeviceMesh.__init__,
        _fsdp_param._chunk_with_empty,
        dist.Work.wait,
        torch.cuda.device_count,
        init_process_group,
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_nothing_is_left_behind(device: str) -> None:
    before = state()
    capture(partial(fsdp, device), cluster=Cluster(4, 1), device=device)
    assert state() == before


@pytest.mark.parametrize("where", ["build", "run"])
def test_nothing_is_left_behind_by_a_step_that_raises(where: str) -> None:
    def fail() -> None:
        init_device_mesh("cpu", (2, 2))
        raise ValueError("as the step pleases")

    step = small_step(fail) if where == "build" else small_step(lambda: None, fail)
    before = state()
    with pytest.raises(UserCodeError, match="as the step pleases"):
        capture(step, cluster=Cluster(4))
    assert state() == before


def test_a_group_may_be_made_again_and_destroyed_by_the_step() -> None:
    def begin() -> None:
        init_process_group("gloo")
        init_process_group("gloo")
        dist.destroy_process_group()
        init_process_group("gloo")

    capture(small_step(begin), cluster=Cluster(4))
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("cluster", "says"),
    [
        (Cluster(4, 4), "there is no rank 4 in a world of 4: ranks go from 0 to 3"),
        (Cluster(4, -1), "there is no rank -1"),
        (Cluster(0), "the world size must be a whole number from 1"),
        (Cluster(4, gpus_per_node=0), "GPUs per node must be a whole number from 1"),
        (Cluster(8, mesh=(("dp", 4), ("tp", 4))), "the mesh dp=4,tp=4 has 16 ranks, but the world size is 8"),
        (Cluster(16, mesh=(("dp", 4), ("dp", 4))), "has the dimension dp twice"),
        (Cluster(4, mesh=(("dp", 0),)), "a size from 1 on"),
        (Cluster(4, network_bytes_per_second=0.0), "network must be above zero"),
    ],
)
def test_what_makes_no_sense_about_a_cluster_is_said(cluster: Cluster, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        capture(small_step(lambda: None), cluster=cluster)


@pytest.mark.parametrize(
    ("begin", "says"),
    [
        (lambda: init_process_group("carrier-pigeon"), "backend 'carrier-pigeon', which torch does not know"),
        (lambda: init_process_group("gloo", rank=0, world_size=2), "world size 2, but the capture is for 4"),
        (lambda: init_device_mesh("cuda", (4,)), "mesh of cuda devices, but the capture is for cpu"),
        (lambda: init_device_mesh("cpu", (3, 2)), "bigger than default world size 4"),
        (lambda: (init_process_group("gloo"), dist.new_group([0, 9])), "Rank 9 is out of range"),
        (lambda: dist.recv_object_list([None], src=1), "receives a Python object from another process"),
    ],
)
def test_a_mistake_with_groups_is_one_message(begin: Callable[[], Any], says: str) -> None:
    with pytest.raises(TrainfitError, match=says):
        capture(small_step(begin), cluster=Cluster(4))


def test_a_mesh_of_the_cpu_is_refused_for_a_gpu() -> None:
    with pytest.raises(CaptureError, match="mesh of cpu devices, but the capture is for cuda"):
        capture(partial(fsdp, "cpu"), cluster=Cluster(4), device="cuda")


def test_the_gpu_of_another_rank_is_refused() -> None:
    def begin() -> None:
        assert torch.cuda.device_count() == 4
        torch.cuda.set_device(1)
        assert torch.ones(2, device="cuda").device == torch.device("cuda", 1)
        torch.ones(2, device="cuda:0")

    with pytest.raises(CaptureError, match=r"uses cuda:0 .* the rank that is captured is cuda:1"):
        capture(small_step(begin), cluster=Cluster(8, 5, gpus_per_node=4), device="cuda")


def test_distributed_tensors_need_a_cluster() -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
    try:
        with pytest.raises(CaptureError, match="--world-size N"):
            capture(partial(fsdp, "cpu"))
        with pytest.raises(CaptureError, match="belongs to a process group already"):
            capture(partial(fsdp, "cpu"), cluster=Cluster(2))
    finally:
        dist.destroy_process_group()


def test_ranks_are_taken_to_have_the_same_known_values() -> None:
    seen: dict[str, Any] = {}

    def look() -> None:
        init_process_group("gloo")
        count, largest, everyone = torch.tensor(3), torch.tensor([7, 8]), [torch.zeros(2) for _ in range(6)]
        dist.all_reduce(count)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        dist.all_gather(everyone, torch.tensor([1.0, 2.0]))
        names: list[Any] = [None] * 6
        dist.all_gather_object(names, "me")
        seen.update(count=count.item(), largest=largest.tolist(), gathered=everyone[5].tolist(), names=names)

    capture(small_step(look), cluster=Cluster(6))
    assert seen == {"count": 18, "largest": [7, 8], "gathered": [1.0, 2.0], "names": ["me"] * 6}


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 20])
def test_a_chunk_is_what_torch_makes(count: int) -> None:
    tensor = torch.arange(14).view(7, 2)
    whole = list(torch.chunk(tensor, count, dim=0))
    chunks = Chunks(tensor, count, 0)
    assert len(chunks) == count
    for number, chunk in enumerate(chunks):
        expected = whole[number] if number < len(whole) else tensor.new_empty(0)
        assert torch.equal(chunk, expected)


def test_sixteen_thousand_ranks_are_no_more_work_than_four() -> None:
    def ops(world: int) -> Trace:
        return capture(partial(fsdp, "cpu"), cluster=Cluster(world, 3))

    few, many = ops(4), ops(16_384)
    assert [few.op_name(n) for n in range(len(few.ops))] == [many.op_name(n) for n in range(len(many.ops))]
    sizes = {s.collective.group_size for s in many.signatures if s.collective}
    assert sizes == {16_384}
