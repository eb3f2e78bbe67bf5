"""While ranks are measured, whatever process group the user's code asks for is a silent one.

`init_process_group("nccl")`, `new_group`, `init_device_mesh` and the like run as they are; only where torch
makes the group itself, `silent_group.py` takes the place of the backend that was named. `get_backend` still
answers with that name. A second `init_process_group` does nothing: a step is built several times.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from trainfit.capturing.replacing import replaced
from trainfit.errors import StepError
from trainfit.verifying.rank_links import RankLinks
from trainfit.verifying.silent_group import SilentGroup

BACKEND = "trainfit_silent"
_KEPT_AS_THEY_ARE = ("fake", BACKEND)
_USUAL_SECONDS = 600.0


class _Run:
    """The connections of this process, made with its first group, and how many default groups there were."""

    def __init__(self) -> None:
        self.links: RankLinks | None = None
        self.default_groups = 0

    def group(self, options: Any, _: Any) -> SilentGroup:
        """Make a group, as torch asks a backend to."""
        ranks = list(options.global_ranks_in_group)
        if not ranks:
            self.default_groups += 1
            ranks = list(range(options.group_size))
        if self.links is None:
            if len(ranks) != options.group_size or self.default_groups != 1:
                raise StepError("a process group was made before the default one.")
            limit = options.timeout
            seconds = limit.total_seconds() if isinstance(limit, timedelta) else _USUAL_SECONDS
            self.links = RankLinks(options.store, options.group_rank, options.group_size, seconds)
        # A default group that is made again has the same name as before.
        name = f"{self.default_groups}.{options.group_id}"
        return SilentGroup(self.links, options.group_rank, ranks, name)

    def close(self) -> None:
        if self.links is not None:
            self.links.close()
        self.links = None


_RUN = _Run()


def register() -> None:
    """Make the backend known to torch by its name."""
    if BACKEND.upper() not in dist.Backend._plugins:
        # Looked up when it is called: connections are made anew when ranks are measured again.
        dist.Backend.register_backend(
            BACKEND, lambda options, more: _RUN.group(options, more), extended_api=True, devices=["cpu"]
        )


@contextlib.contextmanager
def silent_groups() -> Iterator[None]:
    """Make every process group that is asked for while the block runs a silent one, and end them after it."""
    register()
    if dist.is_initialized():
        raise StepError(
            "there is a process group already, with a backend of its own. Let the function that builds the "
            "step make it: verify has to see only what the step itself allocates."
        )
    with (
        replaced(distributed_c10d, "_new_process_group_helper", _on_silent_backend),
        replaced(distributed_c10d, "init_process_group", _once),
        replaced(dist, "init_process_group", lambda original: distributed_c10d.init_process_group),
    ):
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            _RUN.close()
            _RUN.default_groups = 0


def _once(original: Any) -> Any:
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        if not dist.is_initialized():
            original(*args, **kwargs)

    return init_process_group


def _on_silent_backend(original: Any) -> Any:
    def _new_process_group_helper(
        group_size: int, group_rank: int, ranks: list[int], backend: Any, *args: Any, **kwargs: Any
    ) -> Any:
        asked = str(backend)
        if asked in _KEPT_AS_THEY_ARE:
            return original(group_size, group_rank, ranks, backend, *args, **kwargs)
        if asked == "mpi":
            raise StepError(
                "the step makes process groups of MPI, which torchrun does not start: name gloo or nccl."
            )
        kwargs = {**kwargs, "backend_options": None, "device_id": None}
        group, store = original(group_size, group_rank, ranks, dist.Backend(BACKEND), *args, **kwargs)
        if group in distributed_c10d._world.pg_map:
            distributed_c10d._world.pg_map[group] = (asked, store)
        return group, store

    return _new_process_group_helper
