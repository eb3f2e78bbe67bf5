"""What `torch.distributed` puts onto modules: FSDP's units, the hooks of tensor parallelism, their own state.

A region runs inside of its module's hooks. So a unit of FSDP can be a region: its parameters are gathered
before its `forward`, and before autograd comes to it in backward. In a region around units, their hooks run
with it. When it is recomputed, FSDP gathers those units that backward has not gathered yet, and leaves out
the others: so what it does for that is no part of the region (`quiet_units` in `torch_changes.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

_DISTRIBUTED = ("torch.distributed.", "torch._C._distributed")
_KNOWN_HOOKS = ("torch.distributed.tensor.", "torch.distributed.fsdp._fully_shard.")
_UNIT = "FSDPModule"
_CONNECTIONS = ("ProcessGroup", "Backend", "Store", "Work")
"""What other ranks see the state of: a class of somebody's own may be derived from these."""


_is_distributed: dict[type, bool] = {}


def is_distributed(kind: type) -> bool:
    """Whether a class is one of `torch.distributed`'s: meshes, groups, and FSDP's state.

    So is a process group written in Python. What it counts (its messages, for one) is never put back to what
    it was in forward: the next message would have the name of an old one, and ranks would wait for ever.
    """
    known = _is_distributed.get(kind)
    if known is None:
        connects = (base.__name__ in _CONNECTIONS and _is_of_torch(base) for base in kind.__mro__)
        known = _is_distributed[kind] = _is_of_torch(kind) or any(connects)
    return known


def _is_of_torch(kind: type) -> bool:
    return kind.__module__.startswith(_DISTRIBUTED)


def is_unit(module: nn.Module) -> bool:
    """Whether a module is a unit of FSDP: `fully_shard` has given it another class."""
    # By name: loading FSDP takes a second, and nobody needs it who has not loaded it.
    return any(kind.__name__ == _UNIT and _is_of_torch(kind) for kind in type(module).__mro__)


def has_distributed_weights(module: nn.Module) -> bool:
    """Whether tensor parallelism has divided a module, or one inside of it."""
    return any(_is_of_torch(type(parameter.data)) for parameter in module.parameters())


def has_own_hooks(hooks: Iterable[Any]) -> bool:
    """Whether some hooks are the user's.

    Those of tensor parallelism do nothing but call operators, and FSDP's do not look at values either.
    """
    return any(not (getattr(hook, "__module__", None) or "").startswith(_KNOWN_HOOKS) for hook in hooks)
