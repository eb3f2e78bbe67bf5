"""What the user's functions, modules and objects refer to, by name, for `python_state.py`."""

from __future__ import annotations

import functools
import sys
import sysconfig
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
)
"""Attributes in which torch keeps the user's functions that it calls in a step."""
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_LIBRARY = sysconfig.get_paths()["stdlib"]


def variables_of(frame: types.FrameType) -> list[tuple[str, object]]:
    """Return a frame's variables, with no side effect: up to Python 3.12 it keeps the dictionary it made.

    With it the frame would hold what was in the variables, such as the last batch of a loader.
    """
    found = frame.f_locals
    variables = list(found.items())
    if type(found) is dict:
        found.clear()
    return variables


def parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """Yield a function's closure, defaults and attributes, and the globals that its code names."""
    code = function.__code__
    if not _is_users(code.co_filename):
        return
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue  # not filled yet
    defaults = function.__defaults__ or ()
    positional = code.co_varnames[: code.co_argcount]
    yield from zip(positional[len(positional) - len(defaults) :], defaults)
    yield from (function.__kwdefaults__ or {}).items()
    yield from vars(function).items()
    yield from ((name, function.__globals__[name]) for name in _names(code) if name in function.__globals__)


def names_used(function: types.FunctionType) -> frozenset[str]:
    """Return the globals, attributes and keys that a function of the user's names."""
    return _words(function.__code__) if _is_users(function.__code__.co_filename) else frozenset()


def is_installed(function: types.FunctionType) -> bool:
    """Whether a function belongs to an installed library, not to the program that is captured."""
    return "-packages" in function.__code__.co_filename


@functools.cache
def _names(code: types.CodeType) -> tuple[str, ...]:
    """Return the global names and attributes that a function and the functions in it use."""
    inner = (name for part in code.co_consts if isinstance(part, types.CodeType) for name in _names(part))
    return tuple(dict.fromkeys((*code.co_names, *inner)))


@functools.cache
def _words(code: types.CodeType) -> frozenset[str]:
    """Return the names that code uses, and those behind the getters that it calls (`get_last_lr`)."""
    names = set(_names(code))
    # What a getter of torch returns is kept under this name.
    names |= {f"_{name.removeprefix('get_')}" for name in names if name.startswith("get_")}
    if names & {"param_groups", "_last_lr"}:
        names.add("last_epoch")  # a learning rate that is constant for many steps changes with it
    return frozenset(names)


def parts_of_module(module: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield the modules in a module and its hooks; for the user's classes also attributes and code."""
    yield from ((name, child) for name, child in module._modules.items() if child is not None)
    found = vars(module)
    yield from ((name, found[name]) for name in HOOKS if found.get(name))
    for name, parameter in module._parameters.items():
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
        if hooks:
            yield f"{name}._post_accumulate_grad_hooks", hooks
    if is_own(type(module)):
        yield from ((name, part) for name, part in found.items() if name not in _OF_EVERY_MODULE)
        yield from module._buffers.items()
        yield from _functions(type(module))


def parts_of_instance(value: Any) -> Iterator[tuple[str, object]]:
    """Yield the attributes of an object, in a dictionary or in slots, and the code of its class."""
    yield from vars(value).items() if hasattr(value, "__dict__") else ()
    for kind in type(value).__mro__:
        for name, slot in vars(kind).items():
            if isinstance(slot, types.MemberDescriptorType):
                yield name, getattr(value, name, None)
    yield from _functions(type(value))


def _functions(kind: type) -> Iterator[tuple[str, object]]:
    """Yield the class, and the functions of it and its bases: they may use globals."""
    for base in kind.__mro__:
        if is_own(base):
            yield base.__name__, base
            yield from ((n, part) for n, part in vars(base).items() if isinstance(part, types.FunctionType))


def is_own(kind: type | types.ModuleType) -> bool:
    """Whether a class or module is neither Python's nor torch's; torch's data loading counts as well."""
    name = kind.__name__ if isinstance(kind, types.ModuleType) else kind.__module__
    if name.startswith("torch.utils.data"):
        return True
    if name.split(".")[0] in ("torch", "numpy", "builtins", "trainfit"):
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is None or _is_users(file)


@functools.cache
def _is_users(filename: str) -> bool:
    """Whether a file is the user's, or belongs to a library other than Python's and torch."""
    in_library = filename.startswith(_LIBRARY) and "site-packages" not in filename
    return not in_library and "/torch/" not in filename and not filename.startswith("<frozen")
