"""Whether a model that runs a plan is divided among processes as it was when the plan was made."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from trainfit.applying.sharded_modules import is_unit
from trainfit.capturing.plain_tensors import is_plain, strided_parts
from trainfit.plans.plan import ModulePart
from trainfit.plans.plan_origin import other_part, other_world, sharded_since
from trainfit.traces.ranks import Cluster


def other_sharding(root: nn.Module, name: str, planned: Cluster | None, parts: tuple[ModulePart, ...]) -> str:
    """Say in what a model is divided otherwise than its plan was made for; empty if nothing shows.

    It is asked while the model runs: what FSDP has gathered just then does not show how it is divided.
    """
    processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if planned is None:
        return sharded_since() if processes > 1 and _is_sharded(root) else ""
    text = other_world(planned, processes)
    if text or processes == 1 or dist.get_rank() != planned.rank:
        # Other ranks may have other parts.
        return text
    modules = {f"{name}.{path}" if path else name: module for path, module in root.named_modules()}
    for part in parts:
        module = modules.get(part.module)
        here = list(_local_bytes(module)) if module is not None else []
        if here and sum(here) not in (part.bytes, part.gathered_bytes):
            return other_part(planned, part, sum(here))
    return ""


def _is_sharded(root: nn.Module) -> bool:
    return any(is_unit(module) or any(_local_bytes(module)) for module in root.modules())


def _local_bytes(module: nn.Module) -> Iterator[int]:
    """Yield what this rank has of a module's own parameters, if all of them are distributed tensors."""
    own = list(module.parameters(recurse=False))
    if any(is_plain(type(parameter)) for parameter in own):
        return
    seen: set[int] = set()
    for part in (part for parameter in own for part in strided_parts(parameter)):
        storage: torch.UntypedStorage = part.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            yield storage.nbytes()
