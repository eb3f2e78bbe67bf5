"""Results of operators as data: enough to return them again without running the operator."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from trainfit.capturing.plain_tensors import is_plain, strided_parts

CONSTANTS = (int, float, complex, bool, str, type(None), torch.dtype, torch.device, torch.layout)
"""What an operator returns that can be returned again as it is."""


class TensorLayout(NamedTuple):
    """How a tensor lies in its storage."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorLayout:
        """Return the layout of a tensor."""
        return TensorLayout(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return a tensor of this layout over a storage."""
        with torch._C._DisableTorchDispatch():
            empty = torch.empty(0, dtype=self.dtype, device=storage.device)
            return empty.set_(storage, self.offset, self.size, self.stride)


class Argument(NamedTuple):
    """A result that is one of the operator's own tensors."""

    number: int


class Alias(NamedTuple):
    """A result that shares the storage of one of the operator's tensors."""

    number: int
    layout: TensorLayout


class Created(NamedTuple):
    """A result in a storage that the operator made."""

    storage: int
    layout: TensorLayout


class Constant(NamedTuple):
    """A result that is no tensor."""

    value: Any


Result = Argument | Alias | Created | Constant | list[Any] | tuple[Any, ...]
StorageOf = Callable[[int], torch.UntypedStorage]


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor is an ordinary one: strided, over a storage of its own kind."""
    return tensor.layout is torch.strided and torch._C._has_storage(tensor) and not tensor.is_meta


def parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors that operators see of a tensor: itself, or what a subclass consists of."""
    return (tensor,) if is_plain(type(tensor)) else tuple(strided_parts(tensor))


def can_be_absent(tensor: torch.Tensor) -> bool:
    """Whether a tensor without memory can be made in the tensor's place."""
    return (tensor.is_cpu or tensor.is_cuda) and is_plain(type(tensor))


def make(result: Result, tensors: Sequence[torch.Tensor], storage_of: StorageOf) -> Any:
    """Return a result again: `tensors` are the operator's arguments now, `storage_of` finds what it made."""
    if isinstance(result, Created):
        return result.layout.over(storage_of(result.storage))
    if isinstance(result, Argument):
        return tensors[result.number]
    if isinstance(result, Alias):
        return result.layout.over(tensors[result.number].untyped_storage())
    if isinstance(result, Constant):
        return result.value
    return type(result)([make(item, tensors, storage_of) for item in result])


def tensors_in(args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors among an operator's arguments, in order."""
    found: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found.extend(item for item in value if isinstance(item, torch.Tensor))
    return found


def with_tensors(
    args: tuple[Any, ...], kwargs: dict[str, Any], replacements: dict[int, torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with some of their tensors replaced, by their number in `tensors_in`."""
    # The function does not call itself: that would keep the tensors until cycles are collected.
    numbers = itertools.count()

    def new(value: Any) -> Any:
        return replacements.get(next(numbers), value) if isinstance(value, torch.Tensor) else value

    found = [
        type(value)([new(item) for item in value]) if isinstance(value, list | tuple) else new(value)
        for value in (*args, *kwargs.values())
    ]
    return tuple(found[: len(args)]), dict(zip(kwargs, found[len(args) :]))
