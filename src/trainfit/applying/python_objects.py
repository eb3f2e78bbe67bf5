"""What Python code changes while a region runs: attributes of its modules, and objects passed to it.

A region that is recomputed has to begin as it began in forward: with the caches that it was passed (keys
and values of attention) and its modules' attributes as they were. And what it changes then must not be seen
by anyone: it has been done in forward, and some results have no values now.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import enum
import itertools
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from trainfit.applying.sharded_modules import has_own_hooks, is_distributed
from trainfit.changes.hidden_forward import FORWARD

_NEVER_CHANGED = (
    *(int, float, complex, str, bytes, type(None), type, enum.Enum, torch.Tensor, torch.dtype, torch.device),
    *(torch.Size, torch.Generator, nn.Module, types.ModuleType, types.FunctionType, types.MethodType),
)
_SIMPLE = frozenset((int, float, bool, str, type(None)))
"""The most frequent of these."""
_NEVER_HOLDS = (tuple, types.BuiltinFunctionType, torch.memory_format, torch.layout)
"""What holds no tensors, if there are only simple values in a tuple."""
_CONTAINERS = (list, dict, set, collections.OrderedDict, collections.defaultdict, collections.deque)
_FIRST = list(vars(nn.Module()))
_OF_TORCH = frozenset(_FIRST) - {"training"} | {FORWARD}
"""The attributes that torch itself gives a module: parameters, submodules, hooks; and a plan's `forward`."""
_DEEPEST = 4
"""How deep to look into the attributes of a module: `self.a.b["c"].d` is at depth 4."""
_MOST_CHANGES = 16
"""After as many, the attributes of a module are looked at each time."""
_LONGEST = 256
"""Longer containers hold data; they are remembered, but not looked into."""


OfTensor = Callable[[torch.Tensor], torch.Tensor]


def copy_structure(value: Any, of_tensor: OfTensor | None = None, memo: dict[int, Any] | None = None) -> Any:
    """Copy what can change in a value: containers and objects, but not the tensors and modules in them.

    `of_tensor` may put something else in a tensor's place.
    """
    if isinstance(value, _NEVER_CHANGED) or is_distributed(type(value)):
        return of_tensor(value) if of_tensor is not None and isinstance(value, torch.Tensor) else value
    memo = {} if memo is None else memo
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, tuple):
        return _tuple(value, of_tensor, memo)
    if type(value) is list or type(value) is dict:
        plain: Any = value.copy()
        memo[id(value)] = plain
        _copy_items(plain, of_tensor, memo)
        return plain
    contains = isinstance(value, _CONTAINERS)
    if not contains and not hasattr(value, "__dict__") and not _slots(type(value)):
        return value
    try:
        copied = copy.copy(value)
    except Exception:
        # It cannot be copied, so it is used as it is.
        return value
    memo[id(value)] = copied
    if copied is not value:
        _copy_items(copied, of_tensor, memo)
        _copy_attributes(copied, of_tensor, memo)
    return copied


def _tuple(value: tuple[Any, ...], of_tensor: OfTensor | None, memo: dict[int, Any]) -> Any:
    items = tuple(copy_structure(item, of_tensor, memo) for item in value)
    if all(map(operator.is_, items, value)):
        return value
    if type(value) is tuple:
        return items
    make = getattr(value, "_make", None)
    return value if make is None else make(items)


def _copy_items(copied: Any, of_tensor: OfTensor | None, memo: dict[int, Any]) -> None:
    if isinstance(copied, dict):
        places: Any = list(copied)
    elif isinstance(copied, list | collections.deque):
        places = range(len(copied))
    else:
        return
    for place in places:
        item = copy_structure(copied[place], of_tensor, memo)
        if item is not copied[place]:
            copied[place] = item


def _copy_attributes(copied: Any, of_tensor: OfTensor | None, memo: dict[int, Any]) -> None:
    for name, item in getattr(copied, "__dict__", {}).items():
        vars(copied)[name] = copy_structure(item, of_tensor, memo)
    for name in _slots(type(copied)):
        if hasattr(copied, name):
            # Not the class's own, which refuses in a frozen dataclass.
            object.__setattr__(copied, name, copy_structure(getattr(copied, name), of_tensor, memo))


def _slots(kind: type) -> tuple[str, ...]:
    """Return the attributes of a class that lie outside of `__dict__`."""
    found = [vars(each).get("__slots__", ()) for each in kind.__mro__]
    names = [name for slots in found for name in ((slots,) if isinstance(slots, str) else slots)]
    return tuple(name for name in names if not name.startswith("__"))


class ModuleAttributes:
    """The attributes of a module and of those below it, as they were at some time.

    With what lies in them: containers and attributes of objects, as deep as code usually reaches from `self`.
    """

    def __init__(self, module: nn.Module) -> None:
        """Remember the attributes as they are now."""
        self._rows = [
            (each, vars(each).copy(), vars(each)["_buffers"].copy()) for each in _with_inner(module)
        ]
        self._own: list[list[tuple[str, Any]]] = []
        """The attributes of each module without those that torch sets, which are not replaced."""
        self._held: list[tuple[Any, Any]] = []
        self._inner = [tuple(attributes["_modules"].values()) for _, attributes, _ in self._rows]
        self.is_known = True
        """Whether all that lies in them was looked at, and there are no tensors among it but buffers."""
        seen: set[int] = set()
        for _, attributes, _ in self._rows:
            own = _own_items(attributes)
            self._own.append(own)
            for _, value in own:
                if type(value) not in _SIMPLE:
                    self._hold(value, seen, _DEEPEST)

    def _hold(self, value: Any, seen: set[int], depth: int) -> None:
        # What FSDP remembers on its units is its own business: it changes when parameters are gathered.
        if isinstance(value, _NEVER_CHANGED) or id(value) in seen or is_distributed(type(value)):
            if isinstance(value, torch.Tensor) or is_distributed(type(value)):
                self.is_known = False
            return
        seen.add(id(value))
        # The attributes of an object are a dict themselves.
        holder = value if type(value) in _CONTAINERS else getattr(value, "__dict__", None)
        if not isinstance(holder, _CONTAINERS):
            self.is_known &= isinstance(value, _NEVER_HOLDS) and _SIMPLE.issuperset(map(type, _items(value)))
            return
        self._held.append((holder, copy.copy(holder)))
        if depth > 1 and len(holder) <= _LONGEST:
            for item in holder.values() if isinstance(holder, dict) else holder:
                self._hold(item, seen, depth - 1)
        elif holder:
            self.is_known = False

    @property
    def modules(self) -> Iterator[nn.Module]:
        """The module and those below it."""
        return (module for module, *_ in self._rows)

    def is_present(self) -> bool:
        """Return whether the attributes are still the same objects, with the same items."""
        for (module, attributes, buffers), own in zip(self._rows, self._own):
            now = vars(module)
            if len(now) != len(attributes) or not _same(now["_buffers"], buffers):
                return False
            for name, value in own:
                if now.get(name) is not value:
                    return False
        return all(_same_items(holder, items) for holder, items in self._held)

    def without_owner(self) -> ModuleAttributes:
        """Return the same without the module itself, and without its `forward`, which may hold these."""
        found = copy.copy(self)
        _, attributes, buffers = self._rows[0]
        attributes = {name: value for name, value in attributes.items() if name != FORWARD}
        found._rows = [(nn.Module.__new__(nn.Module), attributes, buffers), *self._rows[1:]]
        return found

    def of_owner(self, module: nn.Module) -> ModuleAttributes:
        """Return the same as the attributes of this module, which has them."""
        found = copy.copy(self)
        found._rows = [(module, vars(module).copy(), self._rows[0][2]), *self._rows[1:]]
        return found

    def is_as_if_new(self, owner: nn.Module) -> bool:
        """Return whether looking at this module anew would find the same, down to what torch itself sets."""
        for number, ((module, attributes, buffers), inner) in enumerate(zip(self._rows, self._inner)):
            now = vars(module) if number else {n: v for n, v in vars(owner).items() if n != FORWARD}
            if (
                list(now) != list(attributes)
                or not all(map(operator.is_, now.values(), attributes.values()))
                or tuple(now["_modules"].values()) != inner
                or ((buffers or now["_buffers"]) and not _same(now["_buffers"], buffers))
            ):
                return False
        return all(_same_items(holder, items) for holder, items in self._held)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Let the attributes be as they were, for the length of a block that may change them.

        Where nothing has changed them so far, the block is not expected to do so either.
        """
        if self.is_present():
            yield
            return
        now = [(module, dict(vars(module)), dict(vars(module)["_buffers"])) for module, *_ in self._rows]
        held_now = [(holder, copy.copy(holder)) for holder, _ in self._held]
        _put(self._rows, self._held)
        try:
            yield
        finally:
            _put(now, held_now)


class LastAttributes:
    """The attributes of one module when it was called last, which are the same as long as nothing changes.

    They are held without the module: whoever holds them belongs to it, and it is to die when it is let go.
    """

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._last: ModuleAttributes | None = None
        self._given: weakref.ref[ModuleAttributes] | None = None
        """What was returned last, as long as somebody has it."""
        self._changes = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies begin anew."""
        return LastAttributes, ()

    def now(self, module: nn.Module) -> ModuleAttributes:
        """Return the attributes as they are now; to compare them takes a third of looking at them."""
        last = self._last
        if last is not None and last.is_as_if_new(module):
            found = None if self._given is None else self._given()
            found = last.of_owner(module) if found is None else found
            self._given = weakref.ref(found)
            return found
        self._changes += 1
        found = ModuleAttributes(module)
        self._given = weakref.ref(found)
        # Not held beyond backward if there may be tensors in them, or if they are others each time.
        is_lasting = found.is_known and self._changes <= _MOST_CHANGES
        self._last = found.without_owner() if is_lasting else None
        return found


def _items(value: Any) -> Iterable[Any]:
    return value if isinstance(value, tuple) else ()


def _own_items(attributes: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the attributes of a module without those that torch gives it."""
    if list(attributes)[: len(_FIRST)] == _FIRST:
        # As a rule torch's come first.
        own = list(attributes.items())[len(_FIRST) :]
        own.append(("training", attributes["training"]))
        return own if FORWARD not in attributes else [item for item in own if item[0] != FORWARD]
    return [(name, value) for name, value in attributes.items() if name not in _OF_TORCH]


def _with_inner(module: nn.Module) -> Iterable[nn.Module]:
    """Return a module and those below it, each once, in torch's order: quicker than `modules`."""
    found: dict[nn.Module, None] = {}
    pending = [module]
    while pending:
        each = pending.pop()
        if each not in found:
            found[each] = None
            pending += [inner for inner in reversed(vars(each)["_modules"].values()) if inner is not None]
    return found


def _put(rows: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]], held: list[tuple[Any, Any]]) -> None:
    of_modules = [(vars(module), attributes) for module, attributes, _ in rows]
    of_buffers = [(vars(module)["_buffers"], buffers) for module, _, buffers in rows]
    for holder, items in (*of_modules, *of_buffers, *held):
        if not _same_items(holder, items):
            # The container itself stays, for all who know it.
            holder.clear()
            add = holder.extend if isinstance(holder, list | collections.deque) else holder.update
            add(items)


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return len(one) == len(other) and not any(value is not other.get(name) for name, value in one.items())


def _same_items(one: Any, other: Any) -> bool:
    if len(one) != len(other):
        return False
    if isinstance(one, dict):
        return _same(one, other)
    return one == other if isinstance(one, set) else all(map(operator.is_, one, other))


def has_hooks_inside(modules: Iterable[nn.Module]) -> bool:
    """Whether a module below the first has hooks that see its results, when it is recomputed as well."""
    if nn.modules.module._global_forward_hooks or nn.modules.module._global_forward_pre_hooks:
        return True
    inside = itertools.islice(modules, 1, None)
    return any(
        has_own_hooks((*each._forward_hooks.values(), *each._forward_pre_hooks.values()))
        for each in inside
        if each._forward_hooks or each._forward_pre_hooks
    )
