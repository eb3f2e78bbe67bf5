"""Regions that are recomputed as a whole: nothing is kept, so no op needs to be followed.

The first call is run like any other region's. If it did nothing but compute its result from its inputs, the
same can be expected of the next call in the same circumstances (kinds of arguments, attributes of the
modules, autocast), and that is just computed again under a checkpoint, which needs much less of the host.
What can be checked at almost no cost still is: that no parameter, buffer or input was written to.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from trainfit.applying.call_arguments import without_untouched
from trainfit.applying.execution import execution
from trainfit.applying.modes import facts_of
from trainfit.applying.op_results import parts_of
from trainfit.applying.python_objects import ModuleAttributes, copy_structure, has_hooks_inside
from trainfit.applying.randomness import generators_at, state_of
from trainfit.applying.recording import RegionRecorder
from trainfit.applying.records import VALUE, Record, modified_error
from trainfit.applying.saved_tensors import SavedTensors, nobody_watches, run_alone
from trainfit.plans.recomputation import NOBODY

_top_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks
_active_modes: Any = torch._C._len_torch_dispatch_stack
_VALUES = (
    *(type(None), bool, int, float, complex, str, bytes, enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_MOST_KINDS = 16
"""Kinds of calls remembered per region: batches come in a few sizes, but a growing number never returns."""
_MOST_CHANGES = 8
"""Changes of attributes after which no call is expected to be like one before."""
_DEVICES = ("cpu", "cuda")
OnFollowed = Callable[[ModuleAttributes, RegionRecorder], None]
"""Hears of a call that was followed op by op and went as planned: its modules before it, and what it did."""


class Circumstances(NamedTuple):
    """What the course of a call may depend on, besides the modules themselves."""

    key: Hashable
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[torch.Tensor]
    """Those among the arguments, in containers too."""


class Expected(NamedTuple):
    """What such a call has shown of the calls to come."""

    circumstances: Circumstances
    """Those of the call to come."""
    attributes: ModuleAttributes
    """Those of the modules before it."""
    weights: list[dict[str, Any]]
    """The parameters and buffers of its modules."""
    generators: tuple[torch.Generator, ...]
    """Those that it draws from."""
    untouched: tuple[int, ...]
    """Which of the tensors among its arguments it never looks at."""


class KnownCalls:
    """What is known of the calls of one region."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._attributes: ModuleAttributes | None = None
        self._weights: list[dict[str, Any]] = []
        self._known: dict[Hashable, tuple[tuple[torch.Generator, ...], tuple[int, ...]]] = {}
        self._changes = 0

    def expected(self, circumstances: Circumstances) -> Expected | None:
        """Return what to expect of a call, if that is known."""
        if self._attributes is None or circumstances.key not in self._known:
            return None
        if not self._attributes.is_present():
            # Not held any longer than that: there may be tensors among the attributes.
            self._attributes, self._weights, self._known = None, [], {}
            self._changes += 1
            return None
        if has_hooks_inside(self._attributes.modules):
            return None
        return Expected(circumstances, self._attributes, self._weights, *self._known[circumstances.key])

    def learn(
        self, circumstances: Circumstances, attributes: ModuleAttributes, recorder: RegionRecorder
    ) -> None:
        """Look at a call that was followed, and remember it if it can be repeated without following it."""
        if self._changes > _MOST_CHANGES or len(self._known) == _MOST_KINDS:
            return
        generators = _generators_if_repeatable(recorder.record)
        if generators is None:
            return
        if not attributes.is_present():
            self._changes += 1
            return
        if self._attributes is None:
            self._attributes = attributes
            holders = [held for m in attributes.modules for held in (m._parameters, m._buffers)]
            self._weights = [held for held in holders if held]
        numbers = enumerate(map(recorder.number_of, circumstances.tensors))
        untouched = tuple(place for place, number in numbers if number == NOBODY)
        self._known[circumstances.key] = (generators, untouched)


def _generators_if_repeatable(record: Record) -> tuple[torch.Generator, ...] | None:
    """Return what a call drew from, or None if it did more than compute from inputs and weights.

    Where Python code read values, the next call may take another branch, and draw there or write.
    """
    makers = record.flow.makers
    for row in record.ops:
        if row.kind is VALUE or not isinstance(row.func, torch._ops.OpOverload):
            return None
        if facts_of(row.func).statistics or any(makers[storage][0] == NOBODY for storage, _ in row.writes):
            return None
    generators = tuple({row.generator: None for row in record.ops if row.generator is not None})
    usual = {torch.default_generator, *torch.cuda.default_generators}
    if record.flow.unseen_writes or record.values_read or not usual.issuperset(generators):
        return None
    return generators


def circumstances_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Circumstances | None:
    """Return what a call's course may depend on, or None if that cannot be told."""
    if _top_hooks(False) is not None or _active_modes():
        # Someone else watches what is saved, or every op.
        return None
    tensors: list[torch.Tensor] = []
    try:
        kinds = (_kind(args, tensors), _kind(kwargs, tensors))
    except (_Unpredictable, RecursionError):
        return None
    autocast = tuple(
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) for device in _DEVICES
    )
    return Circumstances((kinds, autocast), args, kwargs, tensors)


class _Unpredictable(Exception):
    """An argument is an object, in which anything may change."""


def _kind(value: Any, tensors: list[torch.Tensor]) -> Hashable:
    """Return what can be said of an argument before the call; tensors are added to the list."""
    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        tensors.append(value)
        return (value.shape, value.dtype, value.device, value.requires_grad)
    if isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
        tensors += parts_of(value)
        return (kind.__name__, value.shape, value.dtype, value.device, value.requires_grad, *_context(value))
    if isinstance(value, _VALUES):
        return (kind, value)
    if isinstance(value, tuple) or kind is list:
        return (kind, *[_kind(item, tensors) for item in value])
    if kind is not dict and not (dataclasses.is_dataclass(value) and hasattr(value, "__dict__")):
        raise _Unpredictable
    items = value if kind is dict else vars(value)
    return (kind, *[(name, _kind(item, tensors)) for name, item in items.items()])


def _context(tensor: Any) -> tuple[Hashable, ...]:
    """Return what tells tensors of a subclass apart besides their parts: a distributed one's placements."""
    _, context = tensor.__tensor_flatten__()
    try:
        hash(context)
    except TypeError:
        raise _Unpredictable from None
    return (context, *[(part.shape, part.dtype) for part in parts_of(tensor)])


class PlainCheckpoint:
    """Runs a region's forward under a checkpoint, and again as a whole."""

    def __init__(
        self, name: str, forward: Callable[..., Any], expected: Expected, on_backward: Callable[[], None]
    ) -> None:
        """Prepare one call."""
        self._name = name
        self._forward = forward
        self._attributes = expected.attributes
        self._on_backward = on_backward
        args, kwargs, given = expected.circumstances[1:]
        # Containers may be changed by whoever gets them.
        self._arguments = copy_structure((args, kwargs))
        if expected.untouched:
            untouched = {id(given[number]) for number in expected.untouched}
            given = [tensor for tensor in given if id(tensor) not in untouched]
            self._arguments = without_untouched((args, kwargs), lambda tensor: id(tensor) not in untouched)
        weights = [each for held in expected.weights for each in held.values() if each is not None]
        self._reads = [(each, each._version) for each in (*given, *weights) if not each.is_inference()]
        """What it may read, and how often that had been written to."""
        self._states = {generator: state_of(generator) for generator in expected.generators}

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run forward; the results are those of the module without a plan."""
        if nobody_watches():
            return run_alone(self._run_alone, args, kwargs)
        arguments = [(args, kwargs)]

        def forward() -> Any:
            return self._first(*arguments.pop()) if arguments else self._again()

        # Random states are ours: torch asks the arguments for their devices, and is given none.
        return checkpoint(forward, use_reentrant=False, preserve_rng_state=False)

    def _run_alone(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run forward where torch's own checkpoint is not needed."""
        saved = SavedTensors(self._again)
        with saved_tensors_hooks(saved.pack, saved.unpack):
            return self._first(args, kwargs)

    def _first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with execution.forward():
            result = self._forward(*args, **kwargs)
        self._check_unchanged("by itself, which it did not do before")
        return result

    def _again(self) -> Any:
        self._on_backward()
        self._check_unchanged("between forward and backward")
        args, kwargs = copy_structure(self._arguments)
        with execution.recomputation(), generators_at(self._states), self._attributes.restored():
            return self._forward(*args, **kwargs)

    def _check_unchanged(self, when: str) -> None:
        for tensor, version in self._reads:
            if tensor._version != version:
                raise modified_error(f"a tensor of shape {list(tensor.shape)} that {self._name} reads", when)
