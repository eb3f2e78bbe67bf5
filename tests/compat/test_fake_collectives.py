"""`compat.fake_collectives`: process group, bytes and `Work` of each collective on tensors without memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork, ProcessGroup
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _functional_collectives as functional
from torch.distributed._tools import fake_collectives as theirs
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from trainfit.compat import fake_collectives as ours
from trainfit.compat.fake_collectives import CollectiveOp

pytestmark = pytest.mark.filterwarnings("ignore")  # torch deprecates some of its own collectives

c10d = torch.ops.c10d
_functional = torch.ops._c10d_functional
SMALL, LARGE = 100 * 4, 400 * 4
"""Bytes of a tensor of 100, and of 400 numbers."""


@pytest.fixture(scope="module")
def _four_processes() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


class Seen(TorchDispatchMode):
    """Keeps every collective that runs, with its results and arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[OpOverload, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in ours.collective_ops:
            self.calls.append((func, result, args, kwargs))
        return result


def seen(run: Callable[..., object]) -> tuple[OpOverload, Any, Any, Any]:
    """Run one collective on tensors of 100 and 400 numbers and lists of four, and return its call."""
    with FakeTensorMode(), Seen() as mode:
        small, large = torch.randn(100), torch.randn(400)
        run(small, large, [torch.randn(100) for _ in range(4)], [torch.randn(400) for _ in range(4)])
    return mode.calls[0]


def world() -> Any:
    return dist.group.WORLD


IN_PLACE: dict[str, tuple[Callable[..., object], int]] = {
    "broadcast_": (lambda x, y, xs, ys: dist.broadcast(x, src=0), SMALL),
    "allreduce_": (lambda x, y, xs, ys: dist.all_reduce(x), SMALL),
    "reduce_": (lambda x, y, xs, ys: dist.reduce(x, dst=0), SMALL),
    "send": (lambda x, y, xs, ys: dist.send(x, dst=1), SMALL),
    "recv_": (lambda x, y, xs, ys: dist.recv(x, src=1), SMALL),
    "recv_any_source_": (lambda x, y, xs, ys: dist.irecv(x), SMALL),
    "allgather_": (lambda x, y, xs, ys: dist.all_gather(xs, x), 4 * SMALL),
    "reduce_scatter_": (lambda x, y, xs, ys: dist.reduce_scatter(x, xs), 4 * SMALL),
    "_reduce_scatter_base_": (lambda x, y, xs, ys: dist.reduce_scatter_tensor(x, y), LARGE),
    "scatter_": (lambda x, y, xs, ys: dist.scatter(x, scatter_list=xs, src=0), 4 * SMALL),
    "gather_": (lambda x, y, xs, ys: dist.gather(x, gather_list=xs, dst=0), 4 * SMALL),
    "_allgather_base_": (lambda x, y, xs, ys: dist.all_gather_into_tensor(y, x), LARGE),
    "alltoall_": (lambda x, y, xs, ys: dist.all_to_all(xs, xs), 4 * SMALL),
    "alltoall_base_": (lambda x, y, xs, ys: dist.all_to_all_single(y, y), LARGE),
}
SPLITS = {"output_split_sizes": [0], "input_split_sizes": [1]}
RETURNING: dict[str, tuple[Callable[..., object], int]] = {
    "_c10d_functional.broadcast": (lambda x, y, xs, ys: functional.broadcast(x, 0, world()), SMALL),
    "_c10d_functional.all_reduce": (lambda x, y, xs, ys: functional.all_reduce(x, "avg", world()), SMALL),
    "_c10d_functional.all_gather_into_tensor": (
        lambda x, y, xs, ys: functional.all_gather_tensor(x, 0, world()),
        4 * SMALL,
    ),
    "_c10d_functional_autograd.all_gather_into_tensor": (
        lambda x, y, xs, ys: functional.all_gather_tensor_autograd(x, 0, world()),
        4 * SMALL,
    ),
    "_c10d_functional.reduce_scatter_tensor": (
        lambda x, y, xs, ys: functional.reduce_scatter_tensor(y, "sum", 0, world()),
        LARGE,
    ),
    "_c10d_functional_autograd.reduce_scatter_tensor": (
        lambda x, y, xs, ys: functional.reduce_scatter_tensor_autograd(y, "sum", 0, world()),
        LARGE,
    ),
    "_c10d_functional.all_to_all_single": (
        lambda x, y, xs, ys: functional.all_to_all_single(x, **SPLITS, group=world()),
        SMALL,
    ),
    "_c10d_functional_autograd.all_to_all_single": (
        lambda x, y, xs, ys: functional.all_to_all_single_autograd(x, **SPLITS, group=world()),
        SMALL,
    ),
    "_c10d_functional.all_reduce_coalesced": (
        lambda x, y, xs, ys: functional.all_reduce_coalesced(xs, "avg", world()),
        4 * SMALL,
    ),
    "_c10d_functional.all_gather_into_tensor_coalesced": (
        lambda x, y, xs, ys: functional.all_gather_into_tensor_coalesced(xs, world()),
        4 * LARGE,
    ),
    "_c10d_functional.reduce_scatter_tensor_coalesced": (
        lambda x, y, xs, ys: functional.reduce_scatter_tensor_coalesced(ys, "sum", [0] * 4, world()),
        4 * SMALL,
    ),
}


@pytest.mark.usefixtures("_four_processes")
@pytest.mark.parametrize("name", IN_PLACE)
def test_collectives_in_place(name: str) -> None:
    run, size = IN_PLACE[name]
    func, result, args, kwargs = seen(run)
    assert func is getattr(c10d, name).default
    assert CollectiveOp.get_process_group(func, args) == world()
    assert CollectiveOp.get_comm_tensor_size(func, result, args, kwargs) == size
    assert isinstance(CollectiveOp.get_work(func, result), FakeWork)
    assert theirs.CollectiveOp.get_comm_tensor_size(func, result, args, kwargs) == size


@pytest.mark.usefixtures("_four_processes")
@pytest.mark.parametrize("name", RETURNING)
def test_collectives_that_return_their_results(name: str) -> None:
    run, size = RETURNING[name]
    func, result, args, kwargs = seen(run)
    # Those of autograd are spelled as the others where fake tensors see them.
    assert str(func) == f"{name.replace('_autograd', '')}.default"
    group = CollectiveOp.get_process_group(func, args)
    assert isinstance(group, ProcessGroup) and group == world() and group.size() == 4
    assert CollectiveOp.get_comm_tensor_size(func, result, args, kwargs) == size
    assert theirs.CollectiveOp.get_comm_tensor_size(func, result, args, kwargs) == size
    with pytest.raises(TypeError, match="returns no Work"):
        CollectiveOp.get_work(func, result)


@pytest.mark.usefixtures("_four_processes")
def test_waiting_exchanges_nothing() -> None:
    func, result, args, kwargs = seen(lambda x, y, xs, ys: dist.barrier())
    assert func is c10d.barrier.default
    assert CollectiveOp.get_process_group(func, args) == world()
    assert isinstance(CollectiveOp.get_work(func, result), FakeWork)
    with pytest.raises(TypeError, match=r"barrier\.default exchanges no tensor; the collectives that do"):
        CollectiveOp.get_comm_tensor_size(func, result, args, kwargs)
    func, result, args, kwargs = seen(lambda x, y, xs, ys: functional.wait_tensor(x))
    with pytest.raises(TypeError, match=r"wait_tensor\.default has no process group"):
        CollectiveOp.get_process_group(func, args)
    with pytest.raises(TypeError, match="exchanges no tensor"):
        CollectiveOp.get_comm_tensor_size(func, result, args, kwargs)


def test_what_is_no_collective_is_refused() -> None:
    add = torch.ops.aten.add.Tensor
    x = torch.ones(2)
    with pytest.raises(TypeError, match=r"aten\.add\.Tensor has no process group"):
        CollectiveOp.get_process_group(add, (x, x))
    with pytest.raises(TypeError, match=r"aten\.add\.Tensor exchanges no tensor"):
        CollectiveOp.get_comm_tensor_size(add, x, (x, x), {})
    with pytest.raises(TypeError, match=r"aten\.add\.Tensor returns no Work"):
        CollectiveOp.get_work(add, x)


@pytest.mark.usefixtures("_four_processes")
def test_collectives_that_torch_does_not_know_the_bytes_of() -> None:
    name = world().group_name
    func, result, args, kwargs = seen(lambda x, y, xs, ys: _functional.isend(x, 1, 0, name))
    assert CollectiveOp.get_comm_tensor_size(func, result, args, kwargs) == SMALL
    with pytest.raises(TypeError):
        theirs.CollectiveOp.get_comm_tensor_size(func, result, args, kwargs)
    out, x = torch.empty(400), torch.empty(100)
    gather, scatter = (
        _functional.all_gather_into_tensor_out.default,
        _functional.reduce_scatter_tensor_out.default,
    )
    assert CollectiveOp.get_comm_tensor_size(gather, out, (x, 4, name), {"out": out}) == LARGE
    with pytest.raises(AttributeError):
        theirs.CollectiveOp.get_comm_tensor_size(gather, out, (x, 4, name), {"out": out})
    assert CollectiveOp.get_comm_tensor_size(scatter, x, (out, "sum", 4, name), {"out": x}) == LARGE
    assert CollectiveOp.get_process_group(scatter, (out, "sum", 4, name)) == world()
    named = {"input": out, "reduce_op": "sum", "group_size": 4, "group_name": name}
    assert CollectiveOp.get_comm_tensor_size(_functional.reduce_scatter_tensor.default, x, (), named) == LARGE


@pytest.mark.usefixtures("_four_processes")
def test_a_process_that_only_sends_its_part_counts_it() -> None:
    """gather on a rank that receives nothing, scatter on one that gives nothing: torch says 0 bytes."""
    handle = world().boxed()
    x = torch.empty(100)
    gather, scatter = c10d.gather_.default, c10d.scatter_.default
    assert CollectiveOp.get_comm_tensor_size(gather, None, ([[]], [x], handle, 1), {}) == SMALL
    assert CollectiveOp.get_comm_tensor_size(scatter, None, ([x], [[]], handle, 1), {}) == SMALL
    assert theirs.CollectiveOp.get_comm_tensor_size(gather, None, ([[]], [x], handle, 1), {}) == 0


@pytest.mark.usefixtures("_four_processes")
def test_an_exchange_counts_once_in_both_spellings() -> None:
    """torch adds what goes in and what comes out for the one that returns, and not for the one in place."""
    func, result, args, kwargs = seen(
        lambda x, y, xs, ys: functional.all_to_all_single(y, [100] * 4, [100] * 4, world())
    )
    assert CollectiveOp.get_comm_tensor_size(func, result, args, kwargs) == LARGE
    assert theirs.CollectiveOp.get_comm_tensor_size(func, result, args, kwargs) == 2 * LARGE


def test_tensors_are_summed_and_of_views_their_own_part() -> None:
    whole = torch.empty(1000, dtype=torch.float16)
    assert CollectiveOp.sum_tensors([whole, {"part": whole[:10]}, (3, None)]) == 2000 + 20
    assert theirs.CollectiveOp.sum_tensors(whole[:10]) == 2000


def test_the_sets_are_those_of_torch_but_for_what_it_has_wrong() -> None:
    for name in ("collective_ops", "functional_collectives", "non_functional_collectives", "sync_ops"):
        assert getattr(ours, name) == getattr(theirs, name), name
    more = {
        "PG_ARG_1": {c10d.monitored_barrier_.default},
        "PG_ARG_4": {_functional.reduce_scatter_tensor_out.default},
    }
    less = {"WK_ARG_1": {_functional.isend.default, _functional.irecv.default}}
    for name in filter(str.isupper, vars(theirs.CollectiveOp)):
        expected = (getattr(theirs.CollectiveOp, name) | more.get(name, set())) - less.get(name, set())
        assert getattr(CollectiveOp, name) == expected, name


def test_nothing_of_torch_has_to_be_imported_for_it() -> None:
    """In a process of its own: a collective on fake tensors returns a Work."""
    code = """
import sys, warnings
warnings.simplefilter("ignore")
import torch.distributed as dist, torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
import trainfit.compat.fake_collectives
dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
with FakeTensorMode():
    work = dist.all_reduce(torch.ones(3), async_op=True)
assert isinstance(work, dist.Work), work
assert "torch.distributed._tools.fake_collectives" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
