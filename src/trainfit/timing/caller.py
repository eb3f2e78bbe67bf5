"""One operator with made-up arguments, ready to be called again and again as the step would call it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from trainfit.operators.families import FACTORISATIONS, RECURRENT
from trainfit.operators.recorded_calls import nbytes
from trainfit.timing.input_values import index_bounds
from trainfit.timing.locality import MIDDLE, NEAR, Locality
from trainfit.timing.memory import Memory, touch
from trainfit.traces import arguments
from trainfit.traces.trace import Signature
from trainfit.workspace.made_up_arguments import CannotRunAlone, find_operator, make_arguments

REFUSED = (CannotRunAlone, RuntimeError, ValueError, IndexError, TypeError, AssertionError)
"""What an operator raises that does not accept made-up inputs."""

# Their inputs have values that mean something, or hidden state: they keep what `make_arguments` made.
_KEEP_VALUES = RECURRENT | FACTORISATIONS


@dataclass(frozen=True)
class _Cut:
    """Stands for a float input, which is cut out of the block of its dtype anew for each call."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    extent: int
    where: int
    written: bool


class Caller:
    """Calls an operator; before each call its inputs and its results' memory are put where they belong."""

    def __init__(self, signature: Signature, locality: Locality, memory: Memory, most_bytes: float) -> None:
        """Make up the arguments; raises one of `REFUSED` where that is not possible."""
        total = sum(map(nbytes, signature.inputs)) + sum(map(nbytes, signature.outputs))
        if total > most_bytes:
            raise CannotRunAlone("its tensors would fill this machine's memory")
        self.function: Any = find_operator(signature.name)
        # Some kernels keep state for backward only while gradients are recorded (recurrent layers).
        self.records = "backward" not in signature.name
        self._memory = memory
        with _tensors_on(memory.device):
            made = make_arguments(signature)
        numbered = _numbered(signature, *made)
        _draw_indices(signature, numbered)
        self._cuts = self._choose_cuts(signature, locality, numbered, made)
        self._template = tree_map(lambda leaf: self._cuts.get(id(leaf), leaf), made)
        self._near = [
            storage_of(tensor)
            for number, tensor in numbered.items()
            if id(tensor) not in self._cuts and locality.inputs[number] == NEAR and tensor.numel()
        ]
        self._cuts_in_order = list(self._cuts.values())
        for dtype in {cut.dtype for cut in self._cuts_in_order}:
            memory.reserve(dtype, [cut.extent for cut in self._cuts_in_order if cut.dtype == dtype])
        self.warm_code = locality.warm_code
        self._results = locality.results
        self.result_sizes = [] if signature.in_place else [nbytes(spec) for spec in signature.outputs]
        self._to_renew: list[torch.Tensor] = []

    def prepare(self) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments for the next call, with everything in its place."""
        pieces = [self._memory.cut(cut.dtype, cut.extent) for cut in self._cuts_in_order]
        self._to_renew = [piece for cut, piece in zip(self._cuts_in_order, pieces) if cut.written]
        middle = [piece for cut, piece in zip(self._cuts_in_order, pieces) if cut.where == MIDDLE]
        for piece in middle:
            touch(piece)
        if self._results == MIDDLE:
            self._memory.free_warm(self.result_sizes)
        if middle or self._results == MIDDLE:
            self._memory.flush_own_cache()
        if self._results == NEAR:
            self._memory.free_warm(self.result_sizes)
        views: dict[int, torch.Tensor] = {}
        for cut, piece in zip(self._cuts_in_order, pieces):
            views[id(cut)] = piece.as_strided(cut.size, cut.stride)
        prepared: tuple[list[Any], dict[str, Any]] = tree_map(
            lambda leaf: views.get(id(leaf), leaf), self._template
        )
        for piece in self._near:
            touch(piece)
        for cut, piece in zip(self._cuts_in_order, pieces):
            if cut.where == NEAR:
                touch(piece)
        return prepared

    def finish(self, result: Any) -> None:
        """Undo what the operator wrote, before repetition lets it drift, and keep the result for a while."""
        for piece in self._to_renew:
            self._memory.renew(piece)
        self._to_renew = []
        self._memory.keep(result, sum(self.result_sizes))

    def _choose_cuts(
        self, signature: Signature, locality: Locality, numbered: dict[int, torch.Tensor], made: Any
    ) -> dict[int, _Cut]:
        if signature.name in _KEEP_VALUES:
            return {}
        written = {id(tensor) for tensor in _mutated(self.function, *made)}
        return {
            id(tensor): _Cut(
                tensor.dtype,
                tensor.size(),
                tensor.stride(),
                tensor.untyped_storage().nbytes() // tensor.element_size(),
                locality.inputs[number],
                id(tensor) in written,
            )
            for number, tensor in numbered.items()
            if (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel()
        }


def _tensors_on(device: str) -> contextlib.AbstractContextManager[object]:
    """Let tensors be made on this device; on the CPU they are anyway."""
    return torch.device(device) if device != "cpu" else contextlib.nullcontext()


def storage_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor's memory as one row of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _numbered(
    signature: Signature, positional: list[Any], keyword: dict[str, Any]
) -> dict[int, torch.Tensor]:
    """Return the made-up tensors by their input number."""
    encoded, encoded_keyword = arguments.decode(signature.arguments)
    codes = tree_leaves([encoded, [*encoded_keyword.values()]], is_leaf=lambda code: isinstance(code, dict))
    values = tree_leaves([positional, [keyword[name] for name in encoded_keyword]])
    return {
        code["tensor"]: value
        for code, value in zip(codes, values, strict=True)
        if isinstance(code, dict) and isinstance(value, torch.Tensor)
    }


def _draw_indices(signature: Signature, numbered: dict[int, torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(0)
    for number, bound in index_bounds(signature).items():
        tensor = numbered[number]
        if all(stride for stride in tensor.stride()):
            tensor.copy_(torch.randint(0, bound, tensor.shape, generator=generator))


def _mutated(function: Any, positional: list[Any], keyword: dict[str, Any]) -> Iterator[torch.Tensor]:
    for position, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = positional[position] if position < len(positional) else keyword.get(argument.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
