"""The arguments of a region's call, to call it again with what they were."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from trainfit.applying.chaining import Link, was_passed_on
from trainfit.applying.execution import execution
from trainfit.applying.offloaded_results import HostCopy
from trainfit.applying.op_results import TensorLayout, can_be_absent, has_storage
from trainfit.applying.python_objects import copy_structure
from trainfit.capturing.hollow import absent_storage

_TENSOR = object()
_storage_id: Any = torch._C._storage_id  # type: ignore[attr-defined]


def without_untouched(arguments: Any, is_touched: Callable[[torch.Tensor], bool]) -> Any:
    """Copy arguments, with tensors that have no memory in the place of those that nobody looks at."""

    def of_tensor(tensor: torch.Tensor) -> torch.Tensor:
        if not has_storage(tensor) or is_touched(tensor) or not can_be_absent(tensor):
            return tensor
        return over_absent(tensor)

    return copy_structure(arguments, of_tensor)


def over_absent(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor like another one, without memory."""
    storage = absent_storage(tensor.untyped_storage().nbytes(), tensor.device)
    return TensorLayout.of(tensor).over(storage).requires_grad_(tensor.requires_grad)


class CallArguments:
    """The arguments of one call: remembered when it begins, and used each time it runs."""

    def __init__(self, args: Any, kwargs: dict[str, Any], holds_tensors: bool, continues: bool) -> None:
        """Remember them; with the tensors, if nobody else holds those, but for one that was passed on."""
        values = (*args, *kwargs.values())
        self._count, self._names = len(args), tuple(kwargs)
        self.linked: torch.Tensor | None = next(filter(was_passed_on, values), None) if continues else None
        """What the region before will compute again; held only until forward is over."""
        passed_in = [
            not holds_tensors and isinstance(value, torch.Tensor) and value is not self.linked
            for value in values
        ]
        self.tensors = tuple(value for value, passed in zip(values, passed_in) if passed)
        """Those that torch passes in, each time."""
        self._others = [_TENSOR if passed else value for value, passed in zip(values, passed_in)]
        # What is no tensor may be changed by the region: a cache of keys and values, say.
        self._before = copy_structure(
            [Link(value) if value is self.linked else value for value in self._others]
            if self.linked is not None
            else self._others
        )
        self._first = True
        self._on_host: dict[int, HostCopy] = {}
        """What is in the host's memory, by the identity of the tensor without memory in its place."""

    def forget_untouched(self, is_touched: Callable[[torch.Tensor], bool]) -> None:
        """Let go of tensors that the region never looks at, such as the keys of other layers in a cache."""
        self._before = without_untouched(self._before, is_touched)
        self.linked = None

    def leave_on_host(self, copies: Mapping[int, HostCopy]) -> None:
        """Let go of tensors that are in the host's memory, by the numbers of their storages."""

        def of_tensor(tensor: torch.Tensor) -> torch.Tensor:
            copy = copies.get(_storage_id(tensor)) if has_storage(tensor) else None
            if copy is None:
                return tensor
            if id(tensor) not in placed:
                absent = over_absent(tensor)
                # An argument that is there twice is the same tensor again.
                placed[id(tensor)] = absent
                self._on_host[id(absent)] = copy
            return placed[id(tensor)]

        placed: dict[int, torch.Tensor] = {}
        self._before = copy_structure(self._before, of_tensor)

    def _fetched(self) -> Any:
        """Return copies of the arguments, with what is in the host's memory on the device again."""
        if not self._on_host:
            return copy_structure(self._before)
        storages: dict[HostCopy, torch.UntypedStorage] = {}
        fetched: dict[int, torch.Tensor] = {}

        def of_tensor(tensor: torch.Tensor) -> torch.Tensor:
            copy = self._on_host.get(id(tensor))
            if copy is None:
                return tensor
            if copy not in storages:
                storages[copy] = copy.taken().untyped_storage()
            if id(tensor) not in fetched:
                here = TensorLayout.of(tensor).over(storages[copy])
                fetched[id(tensor)] = here.requires_grad_(tensor.requires_grad)
            return fetched[id(tensor)]

        # No op of the region: whoever replays those is not to see it.
        with execution.unwatched():
            return copy_structure(self._before, of_tensor)

    def call(self, function: Callable[..., Any], tensors: tuple[Any, ...]) -> Any:
        """Call `function`: the first time with the arguments, then with copies of what they were."""
        others = self._others if self._first else self._fetched()
        self._first, self._others = False, []
        given = iter(tensors)
        values = [next(given) if value is _TENSOR else value for value in others]
        values = [value.tensor() if isinstance(value, Link) else value for value in values]
        return function(*values[: self._count], **dict(zip(self._names, values[self._count :])))
