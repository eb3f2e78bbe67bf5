"""Python state that a captured step changes, and how it was before, for a program that goes on training.

A step that was built for a capture may change what it likes. One that belongs to a running program may not:
afterwards every counter, list, attribute and random generator that it can reach has to be as it was. All of
them are visited before the capture, and what they hold is noted, so that it can be put back in place.

Not followed: data sets, and what belongs to threads, processes and logging, where others may be at work
meanwhile. What cannot be put back is an iterator that was advanced: that is an error.
"""

from __future__ import annotations

import enum
import functools
import random
import re
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePath
from typing import Any

import numpy
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from trainfit.capturing.plain_tensors import is_distributed
from trainfit.capturing.python_parts import is_own, variables_of
from trainfit.capturing.stopped_iterators import IteratorPlaces, is_iterator

_ATOMS = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum, PurePath, re.Pattern, range, slice,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.UntypedStorage,
    types.CodeType, types.BuiltinFunctionType, weakref.ref, numpy.generic,
)  # fmt: skip
_LEFT_ALONE = frozenset(
    (
        *("threading", "_thread", "queue", "multiprocessing", "concurrent", "asyncio", "contextvars"),
        *("logging", "subprocess", "socket", "selectors", "io", "_io", "trainfit"),
        *("datasets", "pyarrow", "pandas", "tokenizers", "wandb", "tensorboard", "mlflow"),
    )
)
"""Packages whose objects are not followed: others work on them meanwhile, or they hold no state of a step."""
_MOST_COPIED_BYTES = 64 << 20
"""Larger arrays are not copied, but may not be written to."""
_OUR_FOLDER = str(Path(__file__).parents[1])
_ABSENT = object()
_Undo = Callable[[], None]


class PythonRollback:
    """What everything that some objects refer to holds now, and the tensors among it."""

    def __init__(self, *roots: tuple[str, object], apart: Iterable[object] = ()) -> None:
        """Visit everything that is reached from the roots, which have names for messages.

        What is set `apart`, such as a data set, is not visited.
        """
        self.tensors: dict[int, torch.Tensor] = {}
        self.optimizers: list[torch.optim.Optimizer] = []
        self.replicas: list[DistributedDataParallel] = []
        self._undo: list[_Undo] = []
        self._locked: list[numpy.ndarray[Any, Any]] = []
        self._iterators = IteratorPlaces()
        self._seen: dict[int, object] = {id(one): one for one in apart}
        self._pending: list[tuple[str, object]] = list(roots)
        while self._pending:
            name, value = self._pending.pop()
            # A proxy whose object is gone cannot even be asked what it is.
            if type(value) in weakref.ProxyTypes or isinstance(value, _ATOMS):
                continue
            if id(value) not in self._seen:
                self._seen[id(value)] = value  # held, so that its id stays its own
                self._pending.extend(self._visit(name, value))
        del self._seen

    def lock(self) -> None:
        """Let writing to arrays that are too large to be copied fail."""
        for array in self._locked:
            array.flags.writeable = False

    def restore(self) -> None:
        """Put everything back; an error says which iterators cannot be."""
        for array in self._locked:
            array.flags.writeable = True
        for undo in self._undo:
            undo()
        self._iterators.check()

    def _visit(self, name: str, value: Any) -> Iterable[tuple[str, object]]:
        """Note what a value holds, and return its parts."""
        if isinstance(value, torch.Tensor):
            return self._tensor(name, value)
        if isinstance(value, dict | list | set | deque | bytearray):
            return self._container(name, value)
        if isinstance(value, tuple | frozenset):
            return _items(name, value)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            return [(name, value.__self__), (name, value.__func__)]
        if isinstance(value, types.BuiltinMethodType | types.MethodWrapperType):
            return [(name, value.__self__)]
        if isinstance(value, types.CellType):
            return self._cell(name, value)
        if isinstance(value, functools.partial):
            return [(name, value.func), (name, value.args), (name, value.keywords), (name, vars(value))]
        if isinstance(value, numpy.ndarray):
            return self._array(value)
        if isinstance(value, type | types.ModuleType):
            return self._names_in(value) if _is_program(value) else []
        return self._object(name, value)

    def _object(self, name: str, value: Any) -> Iterable[tuple[str, object]]:
        undo = _generator_state(value)
        if undo is not None:
            self._undo.append(undo)
            return []
        if isinstance(value, types.GeneratorType):
            if value.gi_running or value.gi_frame is None:
                return []
            self._iterators.note(name, value)
            return variables_of(value.gi_frame)
        if is_iterator(value):
            return self._iterators.note(name, value)
        root = (type(value).__module__ or "").partition(".")[0]
        if root in _LEFT_ALONE or isinstance(value, Dataset):
            return []
        if isinstance(value, DataLoader):
            self._seen[id(value.dataset)] = value.dataset
        if isinstance(value, torch.optim.Optimizer):
            self.optimizers.append(value)
        if isinstance(value, DistributedDataParallel):
            self.replicas.append(value)
        return self._instance(name, value)

    def _instance(self, name: str, value: Any) -> Iterator[tuple[str, object]]:
        found = getattr(value, "__dict__", None)
        if type(found) is dict:
            yield name, found
        for kind in type(value).__mro__:
            for slot, member in vars(kind).items():
                if isinstance(member, types.MemberDescriptorType):
                    held = getattr(value, slot, _ABSENT)
                    if "__slots__" in vars(kind):  # not what classes written in C only show
                        self._undo.append(functools.partial(_restore_slot, value, slot, held))
                    yield slot, held
        if isinstance(value, dict | list | set | deque):
            return
        yield from ((kind.__name__, kind) for kind in type(value).__mro__ if _is_program(kind))

    def _container(self, name: str, value: Any) -> Iterable[tuple[str, object]]:
        self._undo.append(_contents(value))
        parts = _items(name, value)
        if type(value) in (dict, list, set, bytearray, deque):
            return parts
        return [*parts, *self._instance(name, value)]

    def _tensor(self, name: str, value: torch.Tensor) -> Iterable[tuple[str, object]]:
        self.tensors[id(value)] = value
        parts: list[tuple[str, object]] = [(name, vars(value))] if getattr(value, "__dict__", None) else []
        parts.append((name, value._backward_hooks))
        parts.append((name, getattr(value, "_post_accumulate_grad_hooks", None)))
        if type(value).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl:
            parts.append((name, value._base if value._is_view() else None))
        if is_distributed(type(value)):
            inner, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]
            parts.extend((name, getattr(value, part)) for part in inner)
        if value.is_leaf:
            parts.append((f"{name}.grad", value.grad))
        return parts

    def _function(self, value: types.FunctionType) -> Iterator[tuple[str, object]]:
        code = value.__code__
        yield from zip(code.co_freevars, value.__closure__ or ())
        yield from ((value.__name__, default) for default in value.__defaults__ or ())
        yield value.__name__, value.__kwdefaults__
        yield value.__name__, vars(value)
        if not _is_program_file(code.co_filename):
            return
        for name in _names(code):
            held = value.__globals__.get(name, _ABSENT)
            self._undo.append(functools.partial(_restore_item, value.__globals__, name, held))
            if held is not _ABSENT:
                yield name, held

    def _cell(self, name: str, cell: types.CellType) -> Iterable[tuple[str, object]]:
        try:
            held = cell.cell_contents
        except ValueError:
            held = _ABSENT  # not filled yet
        self._undo.append(functools.partial(_restore_cell, cell, held))
        return [(name, held)]

    def _array(self, value: numpy.ndarray[Any, Any]) -> Iterable[tuple[str, object]]:
        if not value.flags.writeable:
            return []
        if value.nbytes <= _MOST_COPIED_BYTES and not isinstance(value, numpy.memmap):
            self._undo.append(functools.partial(numpy.copyto, value, value.copy()))
        elif value.flags.owndata:
            self._locked.append(value)
        return []

    def _names_in(self, value: type | types.ModuleType) -> Iterator[tuple[str, object]]:
        """Note the values in a class or module of the program: a counter may be there."""
        for name, held in list(vars(value).items()):
            if name.startswith("__"):
                continue
            if isinstance(held, bool | int | float | complex | str | type(None)):
                self._undo.append(functools.partial(_restore_attribute, value, name, held))
            elif isinstance(held, list | dict | set | deque | torch.Tensor) or (
                isinstance(value, type) and isinstance(held, types.FunctionType)
            ):
                yield name, held


def _items(name: str, value: Any) -> list[tuple[str, object]]:
    """Return the items of a container that may hold something, by name; keys that are objects as well."""
    if isinstance(value, bytearray):
        return []
    if isinstance(value, dict):
        keys = [key for key in dict.keys(value) if not isinstance(key, _ATOMS)]
        return [
            *((key if isinstance(key, str) else name, item) for key, item in dict.items(value)),
            *((name, key) for key in keys),
        ]
    if all(issubclass(kind, _ATOMS) for kind in set(map(type, value))):
        return []
    return [(name, item) for item in value]


def _contents(value: Any) -> _Undo:
    """Return what puts a container's contents back, if they have changed."""
    if isinstance(value, dict):
        # Not by methods that a subclass may have changed; an ordered one has an order of its own.
        base = OrderedDict if isinstance(value, OrderedDict) else dict
        return functools.partial(_restore_dict, base, value, list(base.items(value)))
    if isinstance(value, list):
        return functools.partial(_restore_list, value, list(value))
    if isinstance(value, bytearray):
        return functools.partial(value.__setitem__, slice(None), bytes(value))
    return functools.partial(_restore_others, value, type(value).__mro__, list(value))


def _restore_dict(base: type[dict[Any, Any]], value: dict[Any, Any], items: list[tuple[Any, Any]]) -> None:
    now = list(base.items(value))
    if len(now) == len(items) and all(
        key is other and held is found for (key, held), (other, found) in zip(now, items)
    ):
        return
    base.clear(value)
    for key, held in items:
        base.__setitem__(value, key, held)


def _restore_list(value: list[Any], items: list[Any]) -> None:
    if len(value) != len(items) or any(now is not before for now, before in zip(value, items)):
        list.__setitem__(value, slice(None), items)


def _restore_others(value: Any, kinds: tuple[type, ...], items: list[Any]) -> None:
    now = list(value)
    if len(now) == len(items) and all(one is other for one, other in zip(now, items)):
        return
    if set in kinds:
        set.clear(value)
        set.update(value, items)
    else:
        deque.clear(value)
        deque.extend(value, items)


def _restore_slot(owner: Any, name: str, held: Any) -> None:
    if getattr(owner, name, _ABSENT) is held:
        return
    if held is _ABSENT:
        object.__delattr__(owner, name)
    else:
        object.__setattr__(owner, name, held)


def _restore_item(owner: dict[str, Any], name: str, held: Any) -> None:
    if held is _ABSENT:
        owner.pop(name, None)
    else:
        owner[name] = held


def _restore_cell(cell: types.CellType, held: Any) -> None:
    if held is _ABSENT:
        del cell.cell_contents
    else:
        cell.cell_contents = held


def _restore_attribute(owner: Any, name: str, held: Any) -> None:
    if vars(owner).get(name, _ABSENT) is not held:
        setattr(owner, name, held)


def _restore_generator(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)


def _generator_state(value: Any) -> _Undo | None:
    """Return what puts a generator of random numbers back; None for other values."""
    if isinstance(value, torch.Generator):
        return functools.partial(_restore_generator, value, value.get_state())
    if isinstance(value, numpy.random.RandomState):
        return functools.partial(value.set_state, value.get_state(legacy=False))
    if isinstance(value, numpy.random.Generator):
        bits = value.bit_generator
        return functools.partial(setattr, bits, "state", bits.state)
    if isinstance(value, random.SystemRandom):
        return lambda: None
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    return None


@functools.cache
def _names(code: types.CodeType) -> frozenset[str]:
    """Return the names that a function, or a function in it, uses: globals, and attributes among them."""
    inner = [_names(part) for part in code.co_consts if isinstance(part, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


def _is_program(value: type | types.ModuleType) -> bool:
    """Whether a class or module belongs to the program that is running, not to a library."""
    name = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return is_own(value) and not name.startswith("torch.") and _is_program_file(file)


@functools.cache
def _is_program_file(filename: str) -> bool:
    library = "-packages" in filename or filename.startswith((_OUR_FOLDER, "<frozen"))
    return not library and not filename.startswith(str(Path(random.__file__).parent))
