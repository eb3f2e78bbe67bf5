"""What autograd saves of a region: dropped, and computed again when backward asks for it.

It is what `torch.utils.checkpoint` does (without reentrant autograd), with the same checks, for a region that
nobody else watches. Torch's own costs the host up to 30 µs for each tensor that autograd saves: it has to get
along with compilers, tracers and other people's contexts, and detaches under the mode that follows a region,
as if that were an op. Where any of those is there, torch's own runs.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint as torchs

_top_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks
_modes: Any = torch._C._len_torch_dispatch_stack
_function_modes: Any = torch._C._len_torch_function_stack
_task: Any = torch._C._current_graph_task_id
_group: Any = torch._C._get_graph_exec_group
_NO_TASK = -1
_SETTINGS = ("_enable_checkpoint_early_stop", "_checkpoint_debug_enabled")
"""How torch is told, for a block of code, to compute again otherwise."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_DEVICES = ("cpu", "cuda")


def nobody_watches() -> bool:
    """Whether nobody else wants to know what autograd saves here, or what runs."""
    return (
        _top_hooks(False) is None
        and not _modes()
        and not _function_modes()
        and all(getattr(torchs, setting, None) is None for setting in _SETTINGS)
    )


class Saved:
    """Stands in the graph for a tensor that autograd saved."""

    __slots__ = ("__weakref__", "again")

    def __init__(self) -> None:
        """Nothing has been computed again yet."""
        self.again: dict[Hashable, torch.Tensor] = {}
        """The tensor, by the backward that it was computed again for; taken out when that asks for it."""


class SavedTensors:
    """The tensors that autograd saves of one call: `pack` and `unpack` are hooks for them."""

    def __init__(self, compute_again: Callable[[], object]) -> None:
        """`compute_again` runs the same once more; autograd saves the same tensors in it."""
        self._compute_again = compute_again
        self._saved: list[weakref.ref[Saved]] = []
        self._kinds: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self._done: set[Hashable] = set()
        """The backwards that it has been computed again for."""
        self._autocast = _autocast()

    def pack(self, tensor: torch.Tensor) -> Saved:
        """Drop a tensor that autograd saves."""
        saved = Saved()
        self._saved.append(weakref.ref(saved))
        self._kinds.append((tensor.shape, tensor.dtype, tensor.device))
        return saved

    def unpack(self, saved: Saved) -> torch.Tensor:
        """Return a tensor that autograd has saved; the first that a backward asks for computes all again."""
        backward: Hashable = _group()
        if backward is None:
            backward = _task()
            if backward == _NO_TASK:
                # Someone looks at a node of the graph.
                backward = object()
        if backward not in self._done:
            self._all_again(backward)
        try:
            return saved.again.pop(backward)
        except KeyError:
            raise torchs.CheckpointError(
                "a tensor that autograd saved in a region of the plan is asked for twice in one backward; "
                "with ctx.saved_tensors, ask once"
            ) from None

    def _all_again(self, backward: Hashable) -> None:
        again = _SavedAgain(self._saved, self._kinds, backward)
        all_there = contextlib.suppress(torchs._StopRecomputationError)
        hooks, autocast = saved_tensors_hooks(again.pack, _as_it_is), self._autocast_as_in_forward()
        with all_there, hooks, torch.enable_grad(), autocast:
            run_alone(self._compute_again)
        self._done.add(backward)
        again.check()

    def _autocast_as_in_forward(self) -> contextlib.AbstractContextManager[object]:
        then, now = self._autocast, _autocast()
        if then == now and not any(enabled for enabled, _ in then[1:]):
            # Entering a context of autocast takes 20 µs.
            return contextlib.nullcontext()
        cached, contexts = then[0], contextlib.ExitStack()
        for device, (enabled, dtype) in zip(_DEVICES, then[1:]):
            contexts.enter_context(torch.autocast(device, dtype, enabled, cached))
        return contexts


def _autocast() -> tuple[Any, ...]:
    """Return what autocast is set to: whether it caches, then for each device."""
    return (
        torch.is_autocast_cache_enabled(),
        *[(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _DEVICES],
    )


class _SavedAgain:
    """The same tensors in the same order, computed again for one backward."""

    def __init__(self, saved: list[weakref.ref[Saved]], kinds: list[Any], backward: Hashable) -> None:
        self._saved = saved
        self._kinds = kinds
        self._backward = backward
        self._count = 0
        self._other: list[str] = []

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note a tensor for who stands for it in the graph; with the last one, all is there."""
        place, kinds = self._count, self._kinds
        self._count = place + 1
        if place >= len(kinds):
            # Its code has caught what was raised below, and goes on.
            self.check()
        if tensor.requires_grad:
            # Now, not later: its code may give it another shape in place.
            if type(tensor) in _PLAIN:
                # Whoever follows or replays ops is not to see it.
                with torch._C._DisableTorchDispatch():
                    tensor = tensor.detach()
            else:
                tensor = tensor.detach()
        saved = self._saved[place]()
        if saved is not None:
            saved.again[self._backward] = tensor
            if (tensor.shape, tensor.dtype, tensor.device) != kinds[place]:
                self._other.append(_difference(place, kinds[place], tensor))
        if place + 1 == len(kinds):
            raise torchs._StopRecomputationError
        return tensor

    def check(self) -> None:
        """Refuse if other tensors were saved than in forward."""
        if self._count != len(self._kinds):
            raise torchs.CheckpointError(
                f"a region of the plan did something else when it was recomputed in backward: autograd saved "
                f"{self._count} tensors, and {len(self._kinds)} in forward"
            )
        if self._other:
            raise torchs.CheckpointError(
                "a region of the plan did something else when it was recomputed in backward: "
                + "; ".join(self._other)
            )


def _difference(place: int, kind: tuple[torch.Size, torch.dtype, torch.device], tensor: torch.Tensor) -> str:
    here = f"{list(tensor.shape)} ({tensor.dtype}, {tensor.device})"
    there = f"{list(kind[0])} ({kind[1]}, {kind[2]})"
    return f"of the tensors that autograd saved, number {place} is {here}, which was {there} in forward"


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def run_alone(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that runs a region: neither it nor what is in it is compiled."""
    return _uncompiled()(function, *args)


@functools.cache
def _uncompiled() -> Callable[..., Any]:
    disabled: Any = torch.compiler.disable(_call)
    return disabled  # type: ignore[no-any-return]


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)
