"""`ModTracker` of `torch.distributed._tools.mod_tracker`: which modules run now, in forward or in backward.

The backward of a module begins with the first gradient of one of its outputs, and ends with the gradients of
its inputs, or with backward itself where no input needs one. Tensors are found in whatever a module takes and
returns, keyword arguments and dataclasses too; a module that is in two places has one name, its first.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from trainfit.capturing.modules import ModuleTable
from trainfit.capturing.plain_tensors import tensors_in
from trainfit.capturing.replacing import replaced

__all__ = ["ModTracker"]

_GLOBAL = "Global"
_HOOKS = ("pre_fw_hook", "post_fw_hook", "pre_bw_hook", "post_bw_hook")
Hook = Callable[..., Any]


class ModTracker:
    """Knows, while it is entered, the names of the modules that run."""

    def __init__(self) -> None:
        """Start with no module."""
        self.parents: set[str] = {_GLOBAL}
        """The names of the modules that run now, and `Global`."""
        self._running: Counter[str] = Counter()
        self._modules = ModuleTable()
        self._hooks: dict[str, Hook] = {}
        self._ends_with_backward: list[Callable[[], None]] = []
        self._in_backward = False
        self._entered = contextlib.ExitStack()

    @property
    def is_bw(self) -> bool:
        """Whether autograd's engine runs."""
        return torch._C._current_graph_task_id() != -1

    def get_known_fqn(self, mod: nn.Module) -> str | None:
        """Return the name of a module, which begins with the class of its root; None if it was never seen."""
        number = self._modules.find(mod)
        return None if number is None else self._modules.name(number)

    def register_user_hooks(
        self,
        pre_fw_hook: Hook | None = None,
        post_fw_hook: Hook | None = None,
        pre_bw_hook: Hook | None = None,
        post_bw_hook: Hook | None = None,
    ) -> None:
        """Call functions around the forward and backward of each module; one of each kind at a time.

        They get the module and its inputs (`pre_fw_hook`), also its output (`post_fw_hook`), or gradients. In
        backward the module is None if it is gone.
        """
        given = dict(zip(_HOOKS, (pre_fw_hook, post_fw_hook, pre_bw_hook, post_bw_hook)))
        twice = [name for name, hook in given.items() if hook is not None and name in self._hooks]
        if twice:
            raise AssertionError(f"there is a {twice[0]} already; clear_user_hooks removes it")
        self._hooks |= {name: hook for name, hook in given.items() if hook is not None}

    def clear_user_hooks(self) -> None:
        """Forget the functions that were registered."""
        self._hooks = {}

    def __enter__(self) -> Self:
        """Begin to follow modules."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(nn.Module, "__call__", self._following))
            self._entered = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop."""
        self._entered.close()

    # Forward --------------------------------------------------------------------------------------------

    def _following(self, original: Any) -> Any:
        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(module, *args, **kwargs)
            name = self._modules.name(self._modules.index(module))
            self._begin(name)
            try:
                self._call_hook("pre_fw_hook", module, args)
                if not self.is_bw:
                    self._end_backward_with_inputs(module, name, (args, kwargs))
                output = None  # recomputation ends with an exception as soon as it has what it needs
                try:
                    output = original(module, *args, **kwargs)
                finally:
                    self._call_hook("post_fw_hook", module, args, output)
            finally:
                self._end(name)
            if not self.is_bw:
                self._begin_backward_with_outputs(module, name, output)
            return output

        return __call__

    def _call_hook(self, kind: str, *values: Any) -> None:
        if kind in self._hooks:
            self._hooks[kind](*values)

    def _begin(self, name: str) -> None:
        self._running[name] += 1
        self.parents.add(name)

    def _end(self, name: str) -> None:
        self._running[name] -= 1
        if self._running[name] <= 0:
            del self._running[name]
            self.parents.discard(name)

    # Backward -------------------------------------------------------------------------------------------

    def _begin_backward_with_outputs(self, module: nn.Module, name: str, output: Any) -> None:
        reference = weakref.ref(module)

        def begin(*gradients: Any) -> None:
            self._expect_end()
            self._begin(name)
            self._call_hook("pre_bw_hook", reference(), gradients)

        tensors = _differentiable(output)
        if tensors:
            register_multi_grad_hook(tensors, begin, mode="any")

    def _end_backward_with_inputs(self, module: nn.Module, name: str, given: Any) -> None:
        reference = weakref.ref(module)

        def end(*gradients: Any) -> None:
            self._call_hook("post_bw_hook", reference(), gradients)
            self._end(name)

        tensors = _differentiable(given)
        if tensors:
            register_multi_grad_hook(tensors, end)
        else:
            self._ends_with_backward.append(end)

    def _expect_end(self) -> None:
        """Let the engine tell when it is done, and which modules are done then."""
        if self._in_backward:
            return
        self._in_backward = True
        engine: Any = torch.autograd.Variable._execution_engine
        for end in (*reversed(self._ends_with_backward), self._backward_is_over):
            engine.queue_callback(end)
        self._ends_with_backward = []

    def _backward_is_over(self) -> None:
        self.parents = {_GLOBAL}
        self._running.clear()
        self._in_backward = False


def _differentiable(value: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in(value) if tensor.requires_grad]
