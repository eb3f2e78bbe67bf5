"""The results of an operator that is not run: tensors without memory, over new or over its own storages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trainfit.capturing.hollow import tensor_over
from trainfit.capturing.ledger import LiveStorage
from trainfit.capturing.metadata import InputAlias, NewTensor, Output
from trainfit.capturing.schemas import Operator
from trainfit.capturing.values import FILLED_LATER

if TYPE_CHECKING:
    from trainfit.capturing.dispatch import CaptureMode

NewStorages = dict[int, tuple[LiveStorage, torch.UntypedStorage]]
"""What an operator's results lie over, by the group of results that share it."""


def made(
    mode: CaptureMode,
    output: Output | list[Output],
    operator: Operator,
    lives: list[LiveStorage],
    new: NewStorages,
) -> Any:
    """Make one result; `lives` are the storages of the operator's inputs, `new` collects what is made."""
    if isinstance(output, NewTensor):
        if output.group not in new:
            # Memory that may be filled with known values later, or is filled with assumed ones.
            may_be_known = operator.uninitialised or operator.name in FILLED_LATER
            keep_values = may_be_known and mode.values.worth_knowing(output.dtype, output.size.numel())
            new[output.group] = mode.ledger.allocate(
                output.storage_bytes, operator.name, keep_values=keep_values
            )
        storage = new[output.group][1]
        return tensor_over(storage, output.dtype, output.size, output.stride, output.offset)
    if isinstance(output, InputAlias):
        source = lives[output.tensor]
        return mode.ledger.tensor(source, output.dtype, output.size, output.stride, output.offset)
    if isinstance(output, list):
        return [made(mode, item, operator, lives, new) for item in output]
    return output


def fit_out(
    mode: CaptureMode, given: Any, output: Output | list[Output], operator: Operator, new: NewStorages
) -> None:
    """Give an `out=` tensor of another shape the memory that the kernel would give it."""
    if isinstance(output, InputAlias) and isinstance(given, torch.Tensor) and given.shape != output.size:
        nbytes = output.size.numel() * given.element_size()
        live, storage = mode.ledger.allocate(nbytes, operator.name, keep_values=False)
        given.set_(storage, 0, output.size, output.stride)
        new[-1] = (live, storage)


def storage_of_out(value: Any) -> torch.UntypedStorage | None:
    """Return the storage of a tensor that is given as `out=`, if that is what the value is."""
    strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return value.untyped_storage() if strided else None
