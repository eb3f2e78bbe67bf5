"""Process groups of any size in one process: every backend is torch's `fake`, which exchanges nothing.

`init_process_group` and `new_group` make such groups, whatever backend they are asked for; `get_backend`
answers with the name that was asked for. A step may be built several times, so that initialising twice is no
mistake.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed import fake_pg as _registers_itself  # noqa: F401

from trainfit.capturing.distributed.rank_environment import rank_variables
from trainfit.capturing.replacing import replaced, replaced_by_name
from trainfit.capturing.values import script_line
from trainfit.errors import CaptureError
from trainfit.traces.ranks import Cluster

_c10d: Any = distributed_c10d
_dist: Any = dist
_FAKE = distributed_c10d.Backend.FAKE
_TIMEOUT = distributed_c10d.default_pg_timeout
_current: Cluster | None = None
"""The cluster whose process this one is at the moment."""


@contextlib.contextmanager
def rank_of(cluster: Cluster | None, *, running: bool = False) -> Iterator[None]:
    """Be one process of a cluster, until the block ends; then no group of it is left. None changes nothing.

    It may be nested: what an inner block made is gone after it, what was there before it stays. A program
    that is `running` is such a process already: its own groups stay, and what the capture does in them
    reaches no other process, because collectives are recorded and not called (`collective_calls.py`).
    """
    global _current
    if cluster is None:
        yield
        return
    if _current is None and dist.is_initialized() and not running:
        raise CaptureError(
            "this process belongs to a process group already, and a step of another cluster cannot be "
            "captured in it: destroy the group first, or predict in a process of its own."
        )
    outer, _current = _current, cluster
    groups, excepthook = _GroupsFound(), sys.excepthook
    try:
        with contextlib.nullcontext() if running else rank_variables(cluster), _faked(cluster):
            yield
    finally:
        groups.put_back()
        sys.excepthook = excepthook  # torch's names the rank in front of every error
        _current = outer


@contextlib.contextmanager
def _faked(cluster: Cluster) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        # A mesh makes the group itself if there is none, by a name of its own for the function.
        for owner in (_c10d, dist, dist.device_mesh):
            stack.enter_context(replaced(owner, "init_process_group", lambda o: _init(cluster, o)))
            stack.enter_context(replaced(owner, "split_group", lambda o: _split_group(o)))
        stack.enter_context(replaced(_c10d, "_new_process_group_helper", _new_group))
        stack.enter_context(replaced(dist, "TCPStore", lambda o: _alone))
        # It warns of NCCL where torch was built without.
        stack.enter_context(replaced(_c10d, "_get_default_timeout", lambda o: lambda backend: _TIMEOUT))
        stack.enter_context(replaced_by_name(_c10d, dist))
        yield


class _GroupsFound:
    """The process groups that exist now."""

    def __init__(self) -> None:
        self._groups = set(_c10d._world.pg_map)
        self._meshes = len(_mesh_stack())

    def put_back(self) -> None:
        """Destroy all groups that were made since."""
        with torch.utils._python_dispatch._disable_current_modes():
            if not self._groups and dist.is_initialized():
                dist.destroy_process_group()
            for group in set(_c10d._world.pg_map) - self._groups:
                dist.destroy_process_group(group)
        del _mesh_stack()[self._meshes :]
        _forget_meshes()


def _forget_meshes() -> None:
    """Let DTensor forget how it divided operators: what it remembers has meshes whose groups are gone.

    A mesh of a later capture is equal to one of them, and would get it back.
    """
    from torch.distributed.tensor import debug

    debug._clear_sharding_prop_cache()


def _mesh_stack() -> list[Any]:
    stack: list[Any] = dist.device_mesh._mesh_resources.mesh_stack
    return stack


def _init(cluster: Cluster, original: Any) -> Any:
    def init_process_group(
        backend: str | None = None,
        init_method: str | None = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        for name, given, wanted in (
            ("world size", world_size, cluster.world_size),
            ("rank", rank, cluster.rank),
        ):
            if given not in (-1, wanted):
                raise CaptureError(
                    f"{script_line()} makes a process group with the {name} {given}, but the capture is for "
                    f"{wanted}: let it take RANK and WORLD_SIZE from the environment, or give the same."
                )
        refuse_unknown_backend(backend)
        if dist.is_initialized():
            return
        _wanted.append(backend)
        try:
            original(
                _FAKE,
                timeout=timeout,
                world_size=cluster.world_size,
                rank=cluster.rank,
                store=_dist.HashStore(),
            )
        finally:
            _wanted.pop()

    return init_process_group


_wanted: list[str | None] = []
"""The backend that the default group is asked for, while it is made."""


def _new_group(original: Any) -> Any:
    def _new_process_group_helper(
        group_size: Any, group_rank: Any, ranks: Any, backend: Any, store: Any, *args: Any, **kwargs: Any
    ) -> Any:
        asked = _wanted[-1] if _wanted else backend
        refuse_unknown_backend(asked)
        kwargs["backend_options"] = None
        kwargs["device_id"] = None
        group, group_store = original(group_size, group_rank, ranks, _FAKE, store, *args, **kwargs)
        if group in _c10d._world.pg_map:
            name = _backend_name(asked)
            _c10d._world.pg_map[group] = (_c10d.Backend(name), group_store)
            _c10d._world.pg_backend_config[group] = name if ":" in name else f"cpu:{name},cuda:{name}"
        return group, group_store

    return _new_process_group_helper


def _split_group(original: Any) -> Any:
    """Make the group of a split that has this rank; without NCCL there is nothing to split."""

    def split_group(parent_pg: Any = None, split_ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        parent = _c10d._get_default_group() if parent_pg is None else parent_pg
        members = dist.get_process_group_ranks(parent)
        for part in split_ranks:
            ranks = [members[number] for number in part]
            if dist.get_rank() in ranks:
                return dist.new_group(ranks, group_desc=kwargs.get("group_desc"))
        return None

    return split_group


def _alone(*args: Any, **kwargs: Any) -> Any:
    """Make a store of one process, which waits for no other."""
    return _dist.HashStore()


def _backend_name(asked: str | None) -> str:
    """Return the name that `get_backend` answers with; without one torch takes what suits the device."""
    if asked is None or asked == "undefined":
        return "nccl" if torch.cuda.is_available() else "gloo"
    return str(asked).lower()


def refuse_unknown_backend(asked: str | None) -> None:
    """Refuse a backend that neither torch nor a loaded library has: what it does is not known."""
    known = {*_c10d.Backend.backend_list, *(name.lower() for name in _c10d.Backend._plugins)}
    named = [part.rpartition(":")[2].strip().lower() for part in str(asked or "undefined").split(",")]
    strange = [name for name in named if name not in known]
    if strange:
        raise CaptureError(
            f"{script_line()} asks for the communication backend {strange[0]!r}, which torch does not know; "
            f"known are {', '.join(sorted(known - {'undefined'}))}."
        )
