"""Functions of `torch.distributed` that are replaced while one rank is captured, each with its reason."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from trainfit.capturing.distributed.collective_calls import reductions_stated, waits_seen
from trainfit.capturing.replacing import replaced
from trainfit.capturing.values import script_line
from trainfit.errors import CaptureError

if TYPE_CHECKING:
    from trainfit.capturing.session import Session


@contextlib.contextmanager
def in_one_process(session: Session) -> Iterator[None]:
    """Install all replacements for the length of a capture; few of them for a step of one process."""
    session.recorder.queues.waits_are_seen = True
    with contextlib.ExitStack() as stack:
        stack.enter_context(waits_seen(session))
        stack.enter_context(reductions_stated())
        if session.cluster is not None:
            stack.enter_context(_of_many(session))
        yield


@contextlib.contextmanager
def _of_many(session: Session) -> Iterator[None]:
    # Loading these takes a second, which a step of one process does not need.
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    from trainfit.capturing.distributed.conversions import conversions_counted
    from trainfit.capturing.distributed.lazy_chunks import without_work_per_rank
    from trainfit.capturing.distributed.object_messages import objects_exchanged
    from trainfit.capturing.distributed.pipelines import stages_of
    from trainfit.capturing.distributed.ring_attention import rings_left_as_found
    from trainfit.capturing.distributed.sharded_units import units_followed
    from trainfit.capturing.distributed.sharding_kernels import SHARDING_HANDLERS
    from trainfit.capturing.distributed.shared_strategies import strategies_shared

    assert session.cluster is not None
    session.mode.of_cluster = True
    session.mode.handlers = {**session.mode.handlers, **SHARDING_HANDLERS}
    with contextlib.ExitStack() as stack:
        stack.enter_context(rings_left_as_found())
        stack.enter_context(replaced(ShardingPropagator, "_propagate_tensor_meta_non_cached", _without_modes))
        stack.enter_context(replaced(DeviceMesh, "__init__", lambda o: _meshes_noted(session, o)))
        # What torch takes for a mesh without a device type.
        stack.enter_context(
            replaced(torch._C, "_get_accelerator", lambda o: lambda *_: torch.device(session.device))
        )
        stack.enter_context(without_work_per_rank())
        stack.enter_context(strategies_shared())
        stack.enter_context(units_followed(session.mode))
        stack.enter_context(conversions_counted(session.mode.recorder))
        spoken = session.cluster.rank, session.messages, session.listener
        stack.enter_context(stages_of(*spoken, session.values))
        stack.enter_context(objects_exchanged(*spoken))
        # It compares the models of all processes, of which there is one.
        stack.enter_context(
            replaced(
                torch.nn.parallel.distributed, "_verify_param_shape_across_processes", lambda o: _nothing
            )
        )
        if session.device == "cuda":
            ddp = torch.nn.parallel.DistributedDataParallel
            stack.enter_context(replaced(ddp, "_check_comm_hook", _as_with_nccl))
        yield


def _as_with_nccl(original: Any) -> Any:
    """Allow the hooks that a build for GPUs allows: torch asks which CUDA it was built with."""

    def check(self: Any, hook: Any) -> None:
        try:
            original(self, hook)
        except TypeError as error:
            if "NCCL" not in str(error):
                raise

    return check


def _meshes_noted(session: Session, original: Any) -> Any:
    """Note the mesh of all ranks; refuse those of another kind of device, whose memory would be elsewhere."""
    kind = session.device

    def __init__(self: DeviceMesh, device_type: str, *args: Any, **kwargs: Any) -> None:
        if device_type not in (kind, "meta"):
            raise CaptureError(
                f"{script_line()} makes a mesh of {device_type} devices, but the capture is for {kind}: "
                "name another device, or give the function that builds the step a parameter named device, "
                f"which gets {kind!r} here."
            )
        original(self, device_type, *args, **kwargs)
        cluster = session.cluster
        if cluster is None or cluster.mesh or cluster.own_mesh or self.size() != cluster.world_size:
            return
        names = self.mesh_dim_names or tuple(f"dim{number}" for number in range(self.ndim))
        session.cluster = replace(cluster, own_mesh=tuple(zip(names, self.shape)))

    return __init__


def _nothing(*args: Any) -> None:
    pass


def _without_modes(original: Any) -> Any:
    """Let a function compute on fake tensors of its own: what it makes is no part of the step."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
            return original(*args, **kwargs)

    return call
