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
from trainfit.errors import CaptureError, OptionError, TrainfitError, UserCodeError
from trainfit.steps.step import Step
from trainfit.traces.ranks import Cluster
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
        (
            lambda: (init_process_group("gloo"), dist.recv_object_list([None], src=1)),
            "rank 1 of the step waits for what another rank says, which waits for it",
        ),
        (
            lambda: (init_process_group("gloo"), dist.recv_object_list([None])),
            r"from whichever rank sends first.*say from which, as in dist.recv_object_list\(..., src=0\)",
        ),
        (
            lambda: (init_process_group("gloo"), dist.recv(torch.ones(2))),
            r"say from which, as in dist.recv\(..., src=0\)",
        ),
        (
            lambda: (init_process_group("gloo"), dist.broadcast_object_list([torch.ones(2)], src=1)),
            "sends tensors as Python objects, which a capture cannot follow",
        ),
    ],
)
def test_a_mistake_with_groups_is_one_message(begin: Callable[[], Any], says: str) -> None:
    with pytest.raises(TrainfitError, match=says):
        capture(small_step(begin), cluster=Cluster(4))


def test_the_source_of_a_broadcast_keeps_its_objects() -> None:
    objects = ["mine"]

    def begin() -> None:
        init_process_group("gloo")
        dist.broadcast_object_list(objects, src=3)
        dist.broadcast_object_list(objects, group_src=3)

    capture(small_step(begin), cluster=Cluster(4, 3))
    assert objects == ["mine"]


def test_objects_of_another_rank_are_what_it_sends() -> None:
    """In two builds and several runs, as many messages."""
    seen: dict[str, Any] = {}

    def begin() -> None:
        init_process_group("gloo")
        rank = dist.get_rank()
        settings = [{"width": 8, "rank": rank}, None] if rank == 1 else [None, None]
        dist.broadcast_object_list(settings, src=1)
        again = ["second"] if rank == 1 else [None]
        dist.broadcast_object_list(again, group_src=1)
        own: list[Any] = [None]
        dist.scatter_object_list(own, ["a", "b", "c", "d"] if rank == 0 else None, src=0)
        sent: list[Any] = [None]
        if rank == 0:
            dist.send_object_list(["for 2"], dst=2)
        elif rank == 2:
            dist.recv_object_list(sent, src=0)
        everyone: list[Any] = [None] * 4
        dist.gather_object("me", everyone if rank == 2 else None, dst=2)
        seen.update(settings=settings, again=again, own=own, sent=sent, everyone=everyone)

    in_run: list[Any] = []

    def each_time() -> None:
        told = [len(in_run)] if dist.get_rank() == 3 else [None]
        dist.broadcast_object_list(told, src=3)
        in_run.append(told[0])

    capture(small_step(begin, each_time), cluster=Cluster(4, 2))
    assert seen == {
        "settings": [{"width": 8, "rank": 1}, None],
        "again": ["second"],
        "own": ["c"],
        "sent": ["for 2"],
        "everyone": ["me"] * 4,
    }
    assert None not in in_run


def test_other_ways_to_make_groups() -> None:
    found: dict[str, Any] = {}

    def begin() -> None:
        init_process_group(backend="cpu:gloo,cuda:nccl", device_id=torch.device("cpu"))
        found["backend"] = dist.get_backend()
        group, groups = dist.new_subgroups(group_size=2)
        found["subgroups"] = dist.get_process_group_ranks(group), len(groups)
        group, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
        found["enumerated"] = dist.get_process_group_ranks(group)
        part = dist.split_group(split_ranks=[[0, 1], [2, 3]])
        found["split"] = dist.get_process_group_ranks(part)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        flat = mesh["dp", "tp"]._flatten("both")
        found["flat"] = dist.get_process_group_ranks(flat.get_group()), flat.get_local_rank()
        dist.barrier()
        dist.destroy_process_group()

    capture(small_step(begin), cluster=Cluster(4, 3))
    assert found == {
        "backend": "cpu:gloo,cuda:nccl",
        "subgroups": ([2, 3], 2),
        "enumerated": [0, 3],
        "split": [2, 3],
        "flat": ([0, 1, 2, 3], 3),
    }


def test_tensors_between_ranks() -> None:
    """Each collective of `torch.distributed` is recorded with what it is, and nothing waits for ever."""

    def exchange() -> None:
        ones, zeros = torch.ones(4), [torch.zeros(4) for _ in range(2)]
        dist.reduce(ones, 0)
        dist.gather(ones, zeros, dst=1)
        dist.scatter(ones, None, src=0)
        dist.all_to_all(zeros, [torch.ones(4), torch.ones(4)])
        dist.all_to_all_single(torch.zeros(4), ones)
        dist.send(ones, 0)
        dist.recv(ones, 0)
        for work in (dist.isend(ones, 0), dist.irecv(ones, 0)):
            assert work is not None and work.wait()
        ops = [dist.P2POp(dist.isend, ones, 0), dist.P2POp(dist.irecv, zeros[0], 0)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    trace = capture(small_step(lambda: init_process_group("gloo"), exchange), cluster=Cluster(2, 1))
    kinds = [one.kind for op in trace.ops if (one := trace.signatures[op.signature].collective)]
    together = ["reduce", "gather", "scatter", "all_to_all", "all_to_all"]
    assert kinds == [*together, "send", "recv", "send", "recv", "send", "recv"]


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
