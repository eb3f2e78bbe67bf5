"""A module whose parameters are DTensors, and whose forward computes with their local parts.

So modules that every rank has whole (norms, embeddings of positions), and those whose parts are put together
elsewhere (experts), need no DTensor inside, while the optimizer sees one kind of parameter everywhere:
foreach optimizers refuse a mixture.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate


def compute_with_local_parts(
    module: nn.Module, method: str = "forward", *, partial_gradients: bool = False
) -> None:
    """Let a method of the module see plain tensors in place of the module's own DTensor parameters.

    With `partial_gradients`, each rank computes a part of the gradients of parameters that all ranks have
    whole; the sum of the parts is taken in backward.
    """
    compute = getattr(module, method)

    @functools.wraps(compute)
    def with_local_parts(*args: Any, **kwargs: Any) -> Any:
        with _local_parts(module, _summed if partial_gradients else DTensor.to_local):
            return compute(*args, **kwargs)

    setattr(module, method, with_local_parts)


@contextmanager
def _local_parts(module: nn.Module, local: Callable[[DTensor], torch.Tensor]) -> Iterator[None]:
    # A dictionary of plain tensors in the place of parameters: `nn.Module` itself would refuse them.
    held: dict[str, Any] = module._parameters
    before = dict(held)
    for name, parameter in before.items():
        if isinstance(parameter, DTensor):
            held[name] = local(parameter)
    try:
        yield
    finally:
        held.update(before)


def _summed(parameter: DTensor) -> torch.Tensor:
    """Return the local part of a parameter that all ranks have whole; its gradient is summed over them."""
    mesh, whole = parameter.device_mesh, [Replicate()] * parameter.device_mesh.ndim
    copy = DTensor.from_local(parameter.to_local(), mesh, whole, run_check=False)
    return copy.to_local(grad_placements=[Partial()] * mesh.ndim)
