"""Process group and bytes of each collective: `torch.distributed._tools.fake_collectives`.

Nothing has to be registered for them: with a process group of the backend `fake`, collectives on fake tensors
return a `Work` by themselves in the torch that trainfit needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup, Work
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from trainfit.operators.collectives import collective_kind

_resolved: Any = torch._C._distributed_c10d._resolve_process_group
c10d = torch.ops.c10d
_c10d_functional = torch.ops._c10d_functional
_c10d_functional_autograd = torch.ops._c10d_functional_autograd
_dtensor = torch.ops._dtensor


def _overloads(namespace: Any, names: str) -> set[OpOverload]:
    return {getattr(namespace, name).default for name in names.split()}


_gathers = _overloads(_c10d_functional, "all_gather_into_tensor") | _overloads(
    _c10d_functional_autograd, "all_gather_into_tensor"
)
_reduce_scatters = _overloads(_c10d_functional, "reduce_scatter_tensor") | _overloads(
    _c10d_functional_autograd, "reduce_scatter_tensor"
)
_exchanges = (
    _overloads(_c10d_functional, "all_to_all_single")
    | _overloads(_c10d_functional_autograd, "all_to_all_single")
    | _overloads(_dtensor, "shard_dim_alltoall")
)

non_functional_collectives: set[OpOverload] = _overloads(
    c10d,
    "broadcast_ allreduce_ reduce_ send recv_ recv_any_source_ allgather_ _allgather_base_ reduce_scatter_ "
    "_reduce_scatter_base_ gather_ scatter_ alltoall_ alltoall_base_ barrier monitored_barrier_",
)
functional_collectives: set[OpOverload] = {
    *_gathers,
    *_reduce_scatters,
    *_exchanges,
    *_overloads(
        _c10d_functional,
        "broadcast broadcast_ all_reduce all_reduce_ all_reduce_coalesced all_reduce_coalesced_ "
        "all_gather_into_tensor_out all_gather_into_tensor_coalesced reduce_scatter_tensor_out "
        "reduce_scatter_tensor_coalesced isend irecv batch_p2p_ops wait_tensor",
    ),
}
sync_ops: set[OpOverload] = _overloads(c10d, "barrier monitored_barrier_") | _overloads(
    _c10d_functional, "wait_tensor"
)
collective_ops: set[OpOverload] = functional_collectives | non_functional_collectives


def _group_place(func: OpOverload) -> int | None:
    """Return which argument the process group, or its name, is."""
    names = [argument.name for argument in func._schema.arguments]
    return next((names.index(name) for name in ("process_group", "group_name") if name in names), None)


def _with_group_at(ops: Iterable[OpOverload], place: int) -> set[OpOverload]:
    return {func for func in ops if _group_place(func) == place}


def _work_place(func: OpOverload) -> int | None:
    """Return which of its results the `Work` is."""
    types = [str(result.type) for result in func._schema.returns]
    return next((place for place, name in enumerate(types) if name.endswith(".Work")), None)


def _with_work_at(ops: Iterable[OpOverload], place: int) -> set[OpOverload]:
    return {func for func in ops if _work_place(func) == place}


class CollectiveOp:
    """What a collective exchanges, and with whom.

    The sets say where it is found. `PG_ARG_*`: the process group, for 1 and 2 an object as second or third
    argument, for 3 to 5 a name as third to fifth. `WK`, `WK_ARG_1`: the `Work`, which is the result or the
    second part of it. `COMM_TENSOR_*`: the bytes.
    """

    PG_ARG_1 = _with_group_at(non_functional_collectives, 1)
    PG_ARG_2 = _with_group_at(non_functional_collectives, 2)
    PG_ARG_3 = _with_group_at(functional_collectives, 2)
    PG_ARG_4 = _with_group_at(functional_collectives, 3)
    PG_ARG_5 = _with_group_at(functional_collectives, 4)

    WK = _with_work_at(collective_ops, 0)
    WK_ARG_1 = _with_work_at(collective_ops, 1)

    COMM_TENSOR_ARG_0 = _overloads(
        c10d, "allreduce_ send recv_ recv_any_source_ allgather_ gather_ reduce_ broadcast_"
    ) | _overloads(_c10d_functional, "all_reduce_coalesced all_reduce_coalesced_")
    COMM_TENSOR_ARG_1 = _overloads(c10d, "reduce_scatter_ scatter_")
    COMM_TENSOR_ARG_RES = _gathers
    COMM_TENSOR_SINGLE_UNTYPED_STORAGE = (
        _overloads(c10d, "_allgather_base_")
        | _overloads(_c10d_functional, "broadcast broadcast_ all_reduce all_reduce_")
        | _reduce_scatters
    )
    COMM_TENSOR_ARG_0_AND_RES = _exchanges
    COMM_TENSOR_RES_SUM = _overloads(
        _c10d_functional, "all_gather_into_tensor_coalesced reduce_scatter_tensor_coalesced"
    )

    @staticmethod
    def sum_tensors(arg: Any) -> int:
        """Return the bytes of all tensors in lists, tuples and dicts; of a view only its own part."""
        tensors = (leaf for leaf in tree_leaves(arg) if isinstance(leaf, torch.Tensor))
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @staticmethod
    def get_process_group(func: OpOverload, args: Any) -> ProcessGroup:
        """Return the group that exchanges; `wait_tensor` has none."""
        place = _group_place(func) if collective_kind(str(func)) else None
        if place is None:
            raise TypeError(f"{func} has no process group; the collectives are {_listed(collective_ops)}")
        group = args[place]
        if isinstance(group, str):
            group = _resolved(group)
        return group if isinstance(group, ProcessGroup) else ProcessGroup.unbox(group)

    @staticmethod
    def get_comm_tensor_size(func: OpOverload, res: Any, args: Any, kwargs: Any) -> int:
        """Return the bytes that are exchanged: the largest of what goes in and what comes out."""
        if collective_kind(str(func)) in (None, "barrier"):
            some = _listed(collective_ops - sync_ops)
            raise TypeError(f"{func} exchanges no tensor; the collectives that do are {some}")
        if func in CollectiveOp.COMM_TENSOR_RES_SUM:
            return CollectiveOp.sum_tensors(res)
        return max(map(CollectiveOp.sum_tensors, (*args, *(kwargs or {}).values(), res)))

    @staticmethod
    def get_work(func: OpOverload, res: Any) -> Work:
        """Return what the caller of a collective waits for; functional ones return tensors instead."""
        place = _work_place(func) if collective_kind(str(func)) else None
        if place is None:
            raise TypeError(f"{func} returns no Work; those that do are {_listed(CollectiveOp.WK)}")
        return Work.unbox(res[place] if isinstance(res, tuple | list) else res)


def _listed(ops: Iterable[OpOverload]) -> str:
    return ", ".join(sorted(map(str, ops)))
