"""torch's compiler during a capture: compiled code runs eagerly, the compiler is loaded only if it is used.

Importing `torch._dynamo` takes as long as importing torch, and an eager step needs nothing of it. Yet fake
tensors read a few of its settings, and every function that torch keeps out of graphs (`zero_grad`, reference
kernels) calls it for that. A stand-in answers those; code that needs more gets the real compiler.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from trainfit.capturing.compiled import noticed
from trainfit.capturing.replacing import originals, while_set

_NAME = "torch._dynamo"
_DISABLED = "__dynamo_disable"
"""The attribute of a function in which torch remembers what `torch._dynamo.disable` made of it."""
# What fake tensors read: torch's defaults, which cannot change without loading the compiler.
_SETTINGS = {
    "fake_tensor_cache_enabled": True,
    "fake_tensor_cache_crosscheck_enabled": False,
    "_custom_ops_profile": None,
}


@contextlib.contextmanager
def eager_only(note: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Run compiled functions as their eager originals, without loading the compiler for that.

    `note` is called whenever one is called.
    """
    loaded = sys.modules.get(_NAME)
    if isinstance(loaded, _StandIn):
        with while_set(loaded, "note", note):
            yield
        return
    with contextlib.ExitStack() as stack:
        if loaded is not None:
            _run_eagerly(stack, note)
        else:
            stand_in = _StandIn(stack, note)
            stack.callback(stand_in.withdraw)
        yield


def _run_eagerly(stack: contextlib.ExitStack, note: Callable[[], None]) -> None:
    stack.enter_context(torch.compiler.set_stance("force_eager"))
    stack.enter_context(noticed(note))


class _StandIn(ModuleType):
    """Stands in `sys.modules` where the compiler would be, until something of it is needed."""

    def __init__(self, stack: contextlib.ExitStack, note: Callable[[], None]) -> None:
        super().__init__(_NAME)
        self._stack = stack
        self.note = note
        self._functions: list[Callable[..., Any]] = []
        self._settings = _Settings(self)
        sys.modules[_NAME] = self
        sys.modules[f"{_NAME}.config"] = self._settings

    def disable(
        self, fn: Any = None, recursive: bool = True, *, wrapping: bool = True, **options: Any
    ) -> Any:
        """Keep a function out of compiled graphs, of which there are none."""
        if fn is None or not recursive or wrapping or options:
            return self.real().disable(fn, recursive, wrapping=wrapping, **options)
        self._functions.append(fn)
        return fn

    def graph_break(self, msg: str = "") -> None:
        """Optimizers end a graph around their steps; there is none."""

    def real(self) -> ModuleType:
        """Load the compiler and step aside; what it compiles during the capture runs eagerly."""
        if sys.modules.get(_NAME) is not self:
            return importlib.import_module(_NAME)
        self.withdraw()
        with originals(), torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            compiler = importlib.import_module(_NAME)
            # It keeps a table of torch's functions, which it makes when it is first asked.
            compiler.trace_rules.get_torch_obj_rule_map()
        _run_eagerly(self._stack, lambda: self.note())
        return compiler

    def withdraw(self) -> None:
        """Leave everything as it was before; code that still holds the stand-in reaches the real compiler."""
        for function in self._functions:
            vars(function).pop(_DISABLED, None)
        self._functions.clear()
        for name, module in ((_NAME, self), (f"{_NAME}.config", self._settings)):
            if sys.modules.get(name) is module:
                del sys.modules[name]

    def __getattr__(self, name: str) -> Any:
        if name == "config":
            return self._settings
        # `inspect` asks every module for its file. A package's path is asked for to load a part of it.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        return getattr(self.real(), name)


class _Settings(ModuleType):
    """The compiler's settings that fake tensors read; all others, and all changes, are the real ones'."""

    def __init__(self, stand_in: _StandIn) -> None:
        super().__init__(f"{_NAME}.config")
        vars(self).update(_SETTINGS, _stand_in=stand_in)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._stand_in.real().config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):
            vars(self)[name] = value  # the import system's own marks
        else:
            setattr(self._stand_in.real().config, name, value)
