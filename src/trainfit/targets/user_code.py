"""Targets that are a function of the user's own, in a file or in an importable module."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from trainfit.errors import OptionError, StepError, TargetError
from trainfit.models.recipe import StepOptions, flag_of
from trainfit.step import Step
from trainfit.user_errors import raise_as_user_error

_OPTION_NAMES = ("batch", "seq", "image_size", "dtype", "optimizer", "device")


def load_file(path: str, function: str, options: StepOptions) -> Callable[[], Step]:
    """Execute the file and return a function that calls `function` in it."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise TargetError(_missing_file(path, file))
    # As `python file.py` does, so that the file can import its neighbours.
    _make_importable(str(file.resolve().parent))
    name = f"_trainfit_target_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file.resolve())
    if spec is None or spec.loader is None:
        raise TargetError(f"{path!r} is not a Python file; its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickling look their module up by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise_as_user_error(error, f"importing {path}")
    return _caller(module, path, function, options)


def load_module(name: str, function: str, options: StepOptions) -> Callable[[], Step]:
    """Import the module and return a function that calls `function` in it."""
    if not all(part.isidentifier() for part in name.split(".")):
        raise TargetError(f"{name!r} is neither a file that ends in .py nor the dotted name of a module.")
    # As `python -m` does, so that a package in the current folder is found.
    _make_importable(os.getcwd())
    importlib.invalidate_caches()  # or a file written a moment ago may not be seen
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise TargetError(
                f"there is no module {error.name!r}, neither installed nor in the current folder; "
                "for a file write its path, as in folder/file.py:build."
            ) from None
        raise_as_user_error(error, f"importing {name}")
    except (Exception, SystemExit) as error:
        raise_as_user_error(error, f"importing {name}")
    return _caller(module, name, function, options)


def _caller(module: ModuleType, place: str, function: str, options: StepOptions) -> Callable[[], Step]:
    target = getattr(module, function, None)
    label = f"{function}() in {place}"
    if target is None and not hasattr(module, function):
        raise TargetError(_missing_function(module, place, function))
    if not callable(target):
        raise TargetError(f"{function!r} in {place} is of type {type(target).__name__}, not a function.")
    arguments = _arguments(target, label, options)

    def build() -> Step:
        try:
            step = target(**arguments)
        except (Exception, SystemExit) as error:
            raise_as_user_error(error, label)
        if not isinstance(step, Step):
            raise StepError(_not_a_step(step, label))
        return step

    return build


def _arguments(function: Callable[..., Any], label: str, options: StepOptions) -> dict[str, int | str]:
    """Choose the keyword arguments: every option the user gave, and the device if there is a parameter."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # some functions written in C have no signature
        parameters = inspect.signature(lambda: None).parameters
    by_keyword = [
        name
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    arguments = options.given()
    for name in arguments:
        if name not in by_keyword and not takes_any:
            raise OptionError(
                f"{flag_of(name)} cannot be passed on: {label} has no parameter named {name}. "
                f"Add one, or leave {flag_of(name)} out."
            )
    if "device" in by_keyword:
        arguments["device"] = options.device
    required = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    _refuse_missing([name for name in required if name not in arguments], label)
    return arguments


def _refuse_missing(missing: list[str], label: str) -> None:
    if not missing:
        return
    flags = [flag_of(name) for name in missing if name in _OPTION_NAMES]
    if len(flags) == len(missing):
        raise TargetError(f"{label} needs {', '.join(missing)}; pass {' '.join(flags)}, or give a default.")
    raise TargetError(
        f"{label} needs {', '.join(missing)}, but it is called without arguments; give a default. "
        f"Only parameters named {', '.join(_OPTION_NAMES)} are filled in from the command line."
    )


def _not_a_step(result: object, label: str) -> str:
    if inspect.iscoroutine(result):
        result.close()  # or Python warns that it was never awaited
    returned = "None (is the return missing?)" if result is None else f"a {type(result).__name__}"
    return (
        f"{label} returned {returned}, not a trainfit.Step; "
        "end it with return trainfit.Step(model=..., optimizer=..., run=...)."
    )


def _missing_file(path: str, file: Path) -> str:
    if file.is_dir():
        return f"{path!r} is a folder, not a Python file."
    neighbours = [entry.name for entry in file.parent.glob("*.py")] if file.parent.is_dir() else []
    close = difflib.get_close_matches(file.name, neighbours, n=3)
    meant = f" Did you mean {' or '.join(str(file.parent / name) for name in close)}?" if close else ""
    return f"there is no file {path!r} (the current folder is {os.getcwd()}).{meant}"


def _missing_function(module: ModuleType, place: str, function: str) -> str:
    defined = _defined_functions(module)
    close = difflib.get_close_matches(function, defined, n=3)
    if close:
        return f"{place} has no function {function!r}. Did you mean {' or '.join(close)}?"
    listed = f"it defines {', '.join(defined)}" if defined else "it defines none"
    return f"{place} has no function {function!r}; {listed}."


def _defined_functions(module: ModuleType) -> list[str]:
    """Names of the functions that the module itself defines, not those it imports."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError):  # a module without source
        return []
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


def _make_importable(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)
