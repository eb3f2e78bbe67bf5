"""Targets that are a function of the user's own: in a file, in an importable module, or passed as it is."""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from trainfit.basics.user_errors import raise_as_user_error
from trainfit.errors import StepError, TargetError
from trainfit.models.recipe import StepOptions
from trainfit.steps.step import Step
from trainfit.targets.cluster_mesh import device_mesh
from trainfit.targets.executed_code import ExecutedCode
from trainfit.targets.function_arguments import arguments_of, settings_of
from trainfit.targets.target import Kind, Target


def load_file(path: str, function: str, options: StepOptions) -> Target:
    """Execute the file and find `function` in it."""
    file = Path(os.path.expanduser(path))
    if not os.path.isfile(file):
        raise TargetError(_missing_file(path, file))
    # As `python file.py` does, so that the file can import its neighbours.
    _make_importable(str(file.resolve().parent))
    execute = partial(_execute_file, path, file, function)
    code = ExecutedCode(str(file.resolve()), execute, str(file.resolve().parent))
    return _found_in(code, path, function, options, "file")


def _execute_file(path: str, file: Path, function: str) -> ModuleType:
    name = f"_trainfit_target_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file.resolve())
    if spec is None or spec.loader is None:
        raise TargetError(f"{path!r} is not a Python file; its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickling look their module up by name.
    sys.modules[name] = module
    try:
        with _as_a_plain_script(path):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        _refuse_relative_import(error, file, function)
        raise_as_user_error(error, f"importing {path}")
    return module


def load_module(name: str, function: str, options: StepOptions) -> Target:
    """Import the module and find `function` in it."""
    if not all(part.isidentifier() for part in name.split(".")):
        raise TargetError(f"{name!r} is neither a file that ends in .py nor the dotted name of a module.")
    # As `python -m` does, so that a package in the current folder is found.
    _make_importable(os.getcwd())
    code = ExecutedCode(name, partial(_import_module, name), os.getcwd())
    return _found_in(code, name, function, options, "module")


def _import_module(name: str) -> ModuleType:
    importlib.invalidate_caches()  # or a file written a moment ago may not be seen
    try:
        with _as_a_plain_script(name):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise TargetError(
                f"there is no module {error.name!r}, neither installed nor in the current folder; "
                "for a file write its path, as in folder/file.py:build."
            ) from None
        raise_as_user_error(error, f"importing {name}")
    except (Exception, SystemExit) as error:
        raise_as_user_error(error, f"importing {name}")


def load_function(function: Callable[..., Any], options: StepOptions) -> Target:
    """Take a function that Python code passes: it gets the same arguments as one that is named."""
    if not callable(function) or isinstance(function, nn.Module):
        raise TargetError(
            "a target is the name of one, or a function that builds a trainfit.Step; "
            f"got {type(function).__name__}."
        )
    name = getattr(function, "__name__", "step")
    return _target(function, lambda: function, name, f"{name}()", options, "function")


def _found_in(code: ExecutedCode, place: str, function: str, options: StepOptions, kind: Kind) -> Target:
    module = code.module
    target = getattr(module, function, None)
    if target is None and not hasattr(module, function):
        raise TargetError(_missing_function(module, place, function))
    if not callable(target):
        raise TargetError(f"{function!r} in {place} is of type {type(target).__name__}, not a function.")
    label = f"{function}() in {place}"
    current = partial(_current, code, function)
    return _target(target, current, f"{place}:{function}", label, options, kind)


def _current(code: ExecutedCode, function: str) -> Any:
    return getattr(code.current(), function)


def _target(
    function: Callable[..., Any],
    current: Callable[[], Callable[..., Any]],
    name: str,
    label: str,
    options: StepOptions,
    kind: Kind,
) -> Target:
    """Return the target that a function is; `current` returns it as it is when the step is built."""
    arguments = arguments_of(function, label, options)
    place, _, in_place = name.rpartition(":")

    def build() -> Step:
        # A function that Python code passes is part of a program, whose command line is its own.
        script = place if kind != "function" else None
        now = current()
        mesh = {"mesh": device_mesh(options)} if options.cluster is not None and options.cluster.mesh else {}
        try:
            with _as_a_plain_script(script):
                step = now(**arguments | mesh)
        except (Exception, SystemExit) as error:
            if kind == "file":
                _refuse_relative_import(error, Path(place), in_place)
            raise_as_user_error(error, label)
        if not isinstance(step, Step):
            raise StepError(_not_a_step(step, label))
        return replace(step, run=_running_as_a_plain_script(step.run, script))

    return Target(name, build, kind, settings_of(function, arguments))


@contextlib.contextmanager
def _as_a_plain_script(name: str | None) -> Iterator[None]:
    """Let code that reads the command line see none, as if the file were run without arguments."""
    before = sys.argv
    sys.argv = before if name is None else [name]
    try:
        yield
    finally:
        sys.argv = before


def _running_as_a_plain_script(run: Callable[[], Any], name: str | None) -> Callable[[], Any]:
    def run_without_arguments() -> Any:
        with _as_a_plain_script(name):
            return run()

    return run if name is None else run_without_arguments


def _not_a_step(result: object, label: str) -> str:
    if inspect.iscoroutine(result):
        result.close()  # or Python warns that it was never awaited
    returned = "None (is the return missing?)" if result is None else f"a {type(result).__name__}"
    return (
        f"{label} returned {returned}, not a trainfit.Step; "
        "end it with return trainfit.Step(model=..., optimizer=..., run=...)."
    )


def _refuse_relative_import(error: BaseException, file: Path, function: str) -> None:
    """Say how a file that imports its neighbours relatively is named: as a module of its package."""
    if not isinstance(error, ImportError) or "attempted relative import" not in str(error):
        return
    folder = file.resolve().parent
    parts = [file.stem, folder.name]
    while (folder / "__init__.py").is_file() and (folder.parent / "__init__.py").is_file():
        folder = folder.parent
        parts.append(folder.name)
    raise TargetError(
        f"{file} has a relative import (from . import ...), which works only inside of a package: in the "
        f"folder {folder.parent} name it as a module, {'.'.join(reversed(parts))}:{function}."
    ) from None


def _missing_file(path: str, file: Path) -> str:
    if os.path.isdir(file):
        return f"{path!r} is a folder, not a Python file."
    neighbours = [entry.name for entry in file.parent.glob("*.py")] if os.path.isdir(file.parent) else []
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
