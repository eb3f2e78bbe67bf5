"""`HiddenForward`: an attribute of a module that hides the `forward` of its class, and gives it back."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

FORWARD = "forward"
"""The attribute of a module that hides its class's."""


class HiddenForward:
    """Takes the place of a module's `forward`, in copies and pickles of the module, too."""

    def __init__(self, module: nn.Module) -> None:
        """Remember what the module's own `forward` is, if it has one that is not its class's."""
        # Weak, so that the module does not keep itself alive.
        self._module = weakref.ref(module)
        self._own = vars(module).get(FORWARD)
        self.removed = False

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles refer to their own module."""
        return {**vars(self), "_module": self._module()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Undo `__getstate__`."""
        vars(self).update(state)
        self._module = weakref.ref(state["_module"])

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The module's original `forward`; what asks for a signature finds it here."""
        if self._own is not None:
            own: Callable[..., Any] = self._own
            return own
        module = self._module()
        assert module is not None, "a module's attribute outlives the module"
        return types.MethodType(type(module).forward, module)

    def hide(self, module: nn.Module) -> None:
        """Begin to be called instead."""
        object.__setattr__(module, FORWARD, self)

    def restore(self, module: nn.Module) -> None:
        """Give the module its `forward` back."""
        self.removed = True
        if vars(module).get(FORWARD) is not self:
            # Someone has wrapped it, and calls it still: it stays, and does nothing of its own.
            return
        if self._own is not None:
            object.__setattr__(module, FORWARD, self._own)
        else:
            object.__delattr__(module, FORWARD)
