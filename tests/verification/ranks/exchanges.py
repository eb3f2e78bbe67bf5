"""Every kind of exchange on so many ranks, by gloo and by silent groups: what each rank got, and took.

    python exchanges.py RANKS FILE

Writes a list with one entry per rank: results of gloo, results of silent groups, bytes that the profiler saw.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from cluster_cases import CASES
from forked_ranks import run_ranks
from trainfit.capturing.replacing import replaced
from trainfit.verifying.silent_backend import silent_groups
from trainfit.workspace.profiler import profile_allocations

Results = dict[str, torch.Tensor]


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return what this rank gives; every rank something else."""
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def reductions() -> Results:
    found: Results = {}
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        for name in ("SUM", "AVG", "MAX", "MIN", "PRODUCT"):
            tensor = drawn(5, 3, dtype=dtype)
            dist.all_reduce(tensor, getattr(dist.ReduceOp, name))
            found[f"all_reduce {dtype} {name}"] = tensor
    found["all_reduce int64"] = torch.arange(6) * (dist.get_rank() + 1)
    dist.all_reduce(found["all_reduce int64"])
    ranks = dist.get_world_size()
    tensor = drawn(4 * ranks, 3)
    found["reduce_scatter_tensor"] = torch.empty(4, 3)
    dist.reduce_scatter_tensor(found["reduce_scatter_tensor"], tensor, dist.ReduceOp.AVG)
    found["reduce_scatter"] = torch.empty(4, 3)
    dist.reduce_scatter(found["reduce_scatter"], list(tensor.chunk(ranks)))
    root = drawn(3)
    dist.reduce(root, 1)
    if dist.get_rank() == 1:
        found["reduce"] = root
    return found


def copies() -> Results:
    found: Results = {}
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tensor = drawn(4, 3)
    found["all_gather_into_tensor"] = torch.empty(4 * ranks, 3)
    dist.all_gather_into_tensor(found["all_gather_into_tensor"], tensor)
    turned = [torch.empty(3, 4).t() for _ in range(ranks)]
    dist.all_gather(turned, tensor)
    found["all_gather into strided tensors"] = torch.stack(turned)
    found["broadcast"] = drawn(3)
    dist.broadcast(found["broadcast"], 1)
    gathered = [torch.empty(3) for _ in range(ranks)] if rank == 0 else None
    dist.gather(drawn(3), gathered, 0)
    if gathered:
        found["gather"] = torch.stack(gathered)
    found["scatter"] = torch.empty(3)
    dist.scatter(found["scatter"], [drawn(3, seed=i) for i in range(ranks)] if rank == 1 else None, 1)
    found["all_to_all_single"] = torch.empty(2 * ranks, 2)
    dist.all_to_all_single(found["all_to_all_single"], drawn(2 * ranks, 2))
    sizes = [number + 1 for number in range(ranks)]
    found["all_to_all_single by sizes"] = torch.empty(ranks * (rank + 1), 2)
    given = drawn(sum(sizes), 2)
    dist.all_to_all_single(found["all_to_all_single by sizes"], given, [rank + 1] * ranks, sizes)
    objects = [{"rank": rank}]
    dist.broadcast_object_list(objects, 1)
    found["broadcast_object_list"] = torch.tensor(objects[0]["rank"])
    return found


def between_two() -> Results:
    found: Results = {}
    rank = dist.get_rank()
    peer = rank ^ 1
    received = torch.empty(4)
    if rank < peer:
        dist.send(drawn(4), peer)
        dist.recv(received, peer)
    else:
        dist.recv(received, peer)
        dist.send(drawn(4), peer)
    found["send and recv"] = received
    first, second = torch.empty(4), torch.empty(4)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, drawn(4, seed=1), peer),
            dist.P2POp(dist.irecv, first, peer),
            dist.P2POp(dist.isend, drawn(4, seed=2), peer),
            dist.P2POp(dist.irecv, second, peer),
        ]
    )
    for work in reversed(works):
        work.wait()
    found["batch_isend_irecv"] = torch.stack([first, second])
    if rank == 0:
        anyone = torch.empty(2)
        found["recv from anyone, who"] = torch.tensor(dist.recv(anyone))
        found["recv from anyone, what"] = anyone
    elif rank == 1:
        dist.send(drawn(2), 0)
    dist.barrier()
    return found


def groups_and_handles() -> Results:
    found: Results = {}
    rank, ranks = dist.get_rank(), dist.get_world_size()
    halves = [dist.new_group(list(range(first, ranks, 2))) for first in range(2)]
    found["new_group"] = drawn(3)
    dist.all_reduce(found["new_group"], group=halves[rank % 2])
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("outer", "inner"))
    found["mesh"] = functional.all_gather_tensor(drawn(3), 0, mesh["inner"]) + 0
    found["functional reduce_scatter"] = (
        functional.reduce_scatter_tensor(drawn(2 * ranks, 2), "avg", 0, dist.group.WORLD) + 0
    )
    found["functional all_to_all"] = (
        functional.all_to_all_single(drawn(2 * ranks, 2), None, None, dist.group.WORLD) + 0
    )
    one, other = drawn(3, seed=5), drawn(3, seed=6)
    works = [dist.all_reduce(one, async_op=True), dist.all_reduce(other, async_op=True)]
    works[1].wait()
    works[0].wait()
    found["waited for in another order"] = torch.stack([one, other])
    future = dist.all_reduce(drawn(3, seed=7), async_op=True).get_future()
    future.wait()
    found["future"] = future.value()[0]
    with dist._coalescing_manager(async_ops=True) as manager:
        parts = [drawn(3, seed=8), drawn(2, seed=9)]
        for part in parts:
            dist.all_reduce(part)
    manager.wait()
    found["coalesced"] = torch.cat(parts)
    return found


def training() -> Results:
    """Train for three steps, which make their own use of the group that is there.

    On two ranks: with more the order of sums differs, and what an optimizer makes of that.
    """
    found: Results = {}
    if dist.get_world_size() > 2:
        return found
    for name in ("fsdp-clip", "ddp", "tp"):
        with replaced(dist, "init_process_group", lambda original: lambda *_, **__: None):
            torch.manual_seed(0)
            step = CASES[name].build()
        found[f"losses of {name}"] = torch.stack([step.run().detach() for _ in range(3)])
        weights = [parameter.detach() for parameter in step.model.parameters()]
        local = [one.to_local() if isinstance(one, DTensor) else one for one in weights]
        found[f"weights of {name}"] = torch.cat([one.flatten() for one in local])
    return found


def seen_bytes() -> int:
    """Return the most that the profiler sees while tensors are exchanged that are there already."""
    ranks = dist.get_world_size()
    piece, whole, other = drawn(1000), torch.empty(1000 * ranks), torch.empty(1000 * ranks)
    with profile_allocations() as log, log.range("exchange"):
        dist.all_reduce(piece)
        dist.all_gather_into_tensor(whole, piece)
        dist.reduce_scatter_tensor(piece, whole)
        dist.broadcast(piece, 0)
        dist.all_to_all_single(other, whole)
        dist.all_gather(list(other.chunk(ranks)), piece)
    return log.usage("exchange").peak_bytes


def on_this_rank(silent: bool) -> tuple[Results, int]:
    with silent_groups() if silent else contextlib.nullcontext():
        dist.init_process_group("gloo")
        assert dist.get_backend() == "gloo"
        found = {**reductions(), **copies(), **between_two(), **groups_and_handles(), **training()}
        seen = seen_bytes() if silent else 0
        dist.barrier()
        if not silent:
            dist.destroy_process_group()
    assert not dist.is_initialized()
    # As lists: tensors that go through a pipe are files that end with their process.
    return {name: (str(tensor.dtype), tensor.double().tolist()) for name, tensor in found.items()}, seen


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    ranks = int(sys.argv[1])
    gloo, silent = (run_ranks(functools.partial(on_this_rank, kind), ranks) for kind in (False, True))
    torch.save([(one, *other) for (one, _), other in zip(gloo, silent)], sys.argv[2])
