"""What recording and replaying have in common: which operator calls count as ops of a region.

They are those that a capture records: the same calls in the same order.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from trainfit.applying.execution import execution
from trainfit.applying.randomness import may_draw
from trainfit.capturing.own_kernels import OWN_KERNELS
from trainfit.capturing.schemas import Operator, aten, describe
from trainfit.operators.collectives import WAITS
from trainfit.operators.memory_use import STATISTICS, TOUCH_NO_DATA
from trainfit.operators.value_use import SHOW_VALUES, reads_metadata_only


@dataclass(frozen=True, slots=True)
class Facts:
    """What has to be known about an operator on every call, worked out once."""

    func: OpOverload
    operator: Operator
    runs_always: bool
    decomposes: bool
    asks_for_values: bool
    draws: bool
    reads_metadata_only: bool
    statistics: tuple[int, ...]
    """Positions of running statistics that it updates without declaring it."""


_facts: dict[int, Facts] = {}
"""By the operator's id: torch hashes operators in Python, which takes longer than all else here."""


def facts_of(func: OpOverload) -> Facts:
    """Return what is known of an operator."""
    found = _facts.get(id(func))
    if found is None or found.func is not func:
        operator = describe(func)
        arguments = enumerate(func._schema.arguments)
        found = _facts[id(func)] = Facts(
            func=func,
            operator=operator,
            runs_always=operator.invisible or operator.name in TOUCH_NO_DATA or operator.name in WAITS,
            decomposes=operator.composite and not operator.is_view and func not in OWN_KERNELS,
            asks_for_values=operator.name in SHOW_VALUES,
            draws=may_draw(func),
            reads_metadata_only=reads_metadata_only(operator.name),
            statistics=tuple(n for n, a in arguments if a.name in STATISTICS and a.alias_info is None),
        )
    return found


@functools.cache
def is_plain(kind: type) -> bool:
    """Whether tensors of a class are ordinary ones, that operators see as they are."""
    disabled = torch._C._disabled_torch_dispatch_impl
    return kind in (torch.Tensor, torch.nn.Parameter) or (
        getattr(kind, "__torch_dispatch__", disabled) is disabled
    )


class RegionMode(TorchDispatchMode):
    """Lets the operators of a region pass, and hands those that count to `handle`."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch wraps the method below in two more frames, on every operator call.
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions inside a region stay compiled."""
        return True

    def __init__(self) -> None:
        """Begin to listen when entered."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._level = 0
        self.saw_subclasses = False
        """Whether there were tensors that are not plain ones, such as distributed ones."""

    def __enter__(self) -> Any:
        """Listen to what runs in this recomputation, or in none, but not in those nested in it."""
        self._level = execution.level
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Handle one operator call."""
        if types and not all(map(is_plain, types)):
            # A tensor subclass unwraps itself, and its parts come back here.
            self.saw_subclasses = True
            return NotImplemented
        kwargs = kwargs or {}
        if execution.level != self._level:
            return self.handle_elsewhere(func, args, kwargs)
        with torch._C.DisableTorchFunction():
            return self._sort(func, args, kwargs)

    def _sort(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(func, OpOverload):
            return self.handle_unknown(func, args, kwargs)
        facts = facts_of(func)
        if facts.runs_always or _on_meta_device(args, kwargs):
            return func(*args, **kwargs)
        if facts.decomposes:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return self.handle(facts, func, args, kwargs)

    def handle(self, facts: Facts, func: OpOverload, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run, or answer, an operator that counts."""
        raise NotImplementedError

    def handle_elsewhere(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run what is no part of the region."""
        return func(*args, **kwargs)

    def handle_unknown(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run what is no ordinary operator, such as a higher-order one."""
        return func(*args, **kwargs)


def is_weight_cast(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call casts a weight for autocast, whose cache may have the result already."""
    if func is not aten._to_copy.default or not args[0].requires_grad or not args[0].is_leaf:
        return False
    # Whether autocast is on cannot be asked here: where it casts, it has stepped aside.
    device = args[0].device.type
    return torch.is_autocast_cache_enabled() and kwargs.get("dtype") == torch.get_autocast_dtype(device)


def _on_meta_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device") if kwargs else None
    if device is not None and torch.device(device).type == "meta":
        return True
    for value in args:
        if isinstance(value, torch.Tensor):
            return value.is_meta
    return False
