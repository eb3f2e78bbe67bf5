"""Communication between processes: which collective an operator is, in each of torch's spellings."""

from __future__ import annotations

NAMESPACES = ("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
"""Where torch keeps the operators of `torch.distributed`."""

WAITS = frozenset(
    f"{namespace}.{name}.default"
    for namespace in NAMESPACES
    for name in ("wait_tensor", "_wrap_tensor_autograd")
)
"""What waits for a collective, at once or when its result is used: they return what they are given."""

_KINDS = {
    "all_gather": "allgather all_gather_into_tensor allgather_into_tensor _allgather_base",
    "reduce_scatter": "reduce_scatter reduce_scatter_tensor _reduce_scatter_base",
    "all_reduce": "allreduce all_reduce",
    "broadcast": "broadcast",
    "all_to_all": "alltoall alltoall_base all_to_all_single shard_dim_alltoall",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send isend batch_p2p_ops",
    "recv": "recv irecv recv_any_source",
    "barrier": "barrier monitored_barrier",
}
"""Names without the endings `_` (in place), `_out` and `_coalesced` (several tensors in one call)."""
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names.split()}


def fills_outputs(name: str) -> bool:
    """Whether an operator writes to tensors that it is given, and returns what to wait for."""
    return name.partition(".")[0] == "c10d"


def communicates(name: str) -> bool:
    """Whether an operator such as `c10d.allreduce_.default` belongs to `torch.distributed`."""
    return name.partition(".")[0] in NAMESPACES


def collective_kind(name: str) -> str | None:
    """Return what an operator does between processes; None if nothing (`wait_tensor` only waits).

    One of `all_gather`, `reduce_scatter`, `all_reduce`, `broadcast`, `all_to_all`, `reduce`, `gather`,
    `scatter`, `send`, `recv` and `barrier`. A batch of sends and receives counts as `send`.
    """
    if not communicates(name):
        return None
    base = name.split(".")[1]
    for ending in ("_", "_out", "_coalesced"):
        base = base.removesuffix(ending)
    return _KIND_OF.get(base)
