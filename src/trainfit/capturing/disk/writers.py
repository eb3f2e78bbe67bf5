"""The functions that write tensors to disk, and how each is skipped while a capture runs.

They are replaced from within, by other code under the same function object: scripts import them by name
(`from safetensors.torch import save_file`) before a capture begins. Outside of the threads that a capture
follows they do what they always do.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import importlib.abc
import importlib.machinery
import inspect
import io
import operator
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy
import torch

if TYPE_CHECKING:
    from trainfit.capturing.disk.pretended import Disk, Instead

TOKEN = b"tensors that trainfit did not write: "
"""What is written instead of tensors saved to memory (`io.BytesIO`); a number and a line end follow."""
Arguments = dict[str, Any]
Skip = Callable[["Disk", Arguments], Any]


def _torch_save(disk: Disk, given: Arguments) -> None:
    if in_memory(given["f"]):
        given["f"].write(disk.token_of(given["obj"]))
    else:
        _refuse_missing_folder(given["f"])
        disk.skip("torch.save", given["f"], given["obj"])


def _refuse_missing_folder(place: Any) -> None:
    """Raise what torch's writer of files raises."""
    if isinstance(place, str | os.PathLike):
        folder = os.path.dirname(os.fspath(place))
        if folder and not os.path.isdir(folder):
            raise RuntimeError(f"Parent directory {folder} does not exist.")


def _package(disk: Disk, given: Arguments) -> Any:
    """Write a package to nowhere: everything in it goes through the class that is made here."""
    if isinstance(given["f"], str | os.PathLike):
        _refuse_missing_folder(given["f"])
        disk.skip("torch.package.PackageExporter", given["f"])
        given["f"] = _Nowhere()
    return NotImplemented


class _Nowhere(io.RawIOBase):
    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        return len(content)


def _reader(place: str) -> Skip:
    """Let a function that opens files without Python read from where their content is."""

    def read(disk: Disk, given: Arguments) -> Any:
        given[place] = disk.readable(given[place])
        return NotImplemented

    return read


def _torch_load(disk: Disk, given: Arguments) -> Any:
    return disk.load(given["f"], given.get("map_location"))


def _safetensors_save(disk: Disk, given: Arguments) -> None:
    content = disk.tensor_file(given["tensors"], given.get("metadata"))
    disk.skip("safetensors' save_file", given["filename"], content)


def _skipped(name: str, place: str, *, not_memory: bool = False, in_folder: bool = False) -> Skip:
    """Skip a writer: `place` is its parameter for the file.

    `not_memory`: what it writes to memory does no harm, and may be read again. `in_folder`: it writes only to
    folders that are there.
    """

    def skip(disk: Disk, given: Arguments) -> Any:
        if not_memory and in_memory(given[place]):
            return NotImplemented
        if in_folder:
            _refuse_missing_folder(given[place])
        return disk.skip(name, given.get(place))

    return skip


_numpy_save = functools.partial(_skipped, not_memory=True)
_jit_save = functools.partial(_skipped, place="f", not_memory=True, in_folder=True)


def _async_save(disk: Disk, given: Arguments) -> concurrent.futures.Future[None]:
    disk.skip("torch.distributed.checkpoint.async_save", given.get("checkpoint_id"))
    future: concurrent.futures.Future[None] = concurrent.futures.Future()
    future.set_result(None)
    return future


_NUMPY = "numpy.lib._npyio_impl"
_CHECKPOINT = "torch.distributed.checkpoint.state_dict_saver"
# (module, function): what happens instead. `NotImplemented` means: what always happens.
_FUNCTIONS: dict[tuple[str, str], Skip] = {
    ("torch.serialization", "save"): _torch_save,
    ("torch.serialization", "load"): _torch_load,
    ("safetensors.torch", "save_file"): _safetensors_save,
    ("safetensors.numpy", "save_file"): _skipped("safetensors' save_file", "filename"),
    (_NUMPY, "save"): _numpy_save("numpy.save", "file"),
    (_NUMPY, "savez"): _numpy_save("numpy.savez", "file"),
    (_NUMPY, "savez_compressed"): _numpy_save("numpy.savez_compressed", "file"),
    (_NUMPY, "savetxt"): _numpy_save("numpy.savetxt", "fname"),
    (_CHECKPOINT, "save"): _skipped("torch.distributed.checkpoint.save", "checkpoint_id"),
    (_CHECKPOINT, "async_save"): _async_save,
    ("torch.jit._serialization", "save"): _jit_save("torch.jit.save"),
    ("torch.jit._serialization", "load"): _reader("f"),
    # Not replaced in the class: classes of traced modules have the same function.
    ("torch.jit._script", "RecursiveScriptModule.save"): _jit_save("ScriptModule.save"),
    ("torch.jit._script", "RecursiveScriptModule._save_for_lite_interpreter"): _jit_save("ScriptModule.save"),
    ("torch.package.package_exporter", "PackageExporter.__init__"): _package,
    ("torch.package.package_importer", "PackageImporter.__init__"): _reader("file_or_buffer"),
    ("torch.export", "save"): _skipped("torch.export.save", "f"),
    ("torchvision.utils", "save_image"): _skipped("save_image", "fp"),
}
_disk: Disk | None = None


@contextlib.contextmanager
def writers_skipped(disk: Disk) -> Iterator[None]:
    """Skip every writer of the table for the length of a capture, also those imported meanwhile."""
    global _disk
    swapped = _Swapped()
    _disk = disk
    sys.meta_path.insert(0, swapped)
    try:
        for name in swapped.modules:
            if name in sys.modules:
                swapped.swap(sys.modules[name])
        yield
    finally:
        sys.meta_path.remove(swapped)
        swapped.put_back()
        _disk = None


class _Swapped(importlib.abc.MetaPathFinder):
    """The functions whose code is ours for now; modules of the table get theirs when they are imported."""

    modules = frozenset(module for module, _ in _FUNCTIONS)

    def __init__(self) -> None:
        self._functions: list[tuple[FunctionType, CodeType]] = []

    def swap(self, module: ModuleType) -> None:
        """Give the functions of one module our code."""
        for key in _FUNCTIONS:
            if key[0] != module.__name__:
                continue
            try:
                function = _implementation(operator.attrgetter(key[1])(module))
            except AttributeError:  # another version of the library does not have it
                continue
            self._functions.append((function, function.__code__))
            _ORIGINALS[key] = _copy(function)
            function.__code__ = _instead.__code__.replace(co_name=":".join(key))

    def put_back(self) -> None:
        """Give every function its own code again."""
        for function, code in self._functions:
            function.__code__ = code
        _ORIGINALS.clear()

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Find a module of the table as usual, and swap its functions once it is loaded."""
        if name not in self.modules:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                self.swap(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_ORIGINALS: dict[tuple[str, str], FunctionType] = {}


def _instead(*args: Any, **kwargs: Any) -> Any:
    # Runs with the globals of the module whose function it replaces, so it has to import what it needs.
    import sys

    from trainfit.capturing.disk.writers import called

    return called(sys._getframe().f_code.co_name, args, kwargs)


def called(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of the table was called."""
    module, _, function = name.partition(":")
    original = _ORIGINALS[module, function]
    if _disk is None or not _disk.in_capture:
        return original(*args, **kwargs)
    bound = inspect.signature(original).bind(*args, **kwargs)
    answer = _FUNCTIONS[module, function](_disk, bound.arguments)
    return original(*bound.args, **bound.kwargs) if answer is NotImplemented else answer


def _implementation(function: Any) -> FunctionType:
    """Return the Python function under the decorators of torch and numpy."""
    found: FunctionType = inspect.unwrap(getattr(function, "_implementation", function))
    return found


def _copy(function: FunctionType) -> FunctionType:
    code, defaults, closure = function.__code__, function.__defaults__, function.__closure__
    copy = FunctionType(code, function.__globals__, function.__name__, defaults, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def in_memory(file: Any) -> bool:
    """Whether something that can be written to is memory, and no file."""
    if isinstance(getattr(file, "name", file), str | bytes | os.PathLike):
        return False
    try:
        file.fileno()
    except (AttributeError, OSError):
        return True
    return False


# Pickles --------------------------------------------------------------------------------------------------


def _pickle_dump(disk: Disk, original: Any, obj: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
    # Into memory, a tensor's storage is pickled by `torch.save`, and loaded again by `torch.load`.
    if in_memory(file) or not _has_tensors(obj):
        return NotImplemented
    return disk.skip("pickle.dump", file)


def _has_tensors(thing: Any) -> bool:
    spotter = _Spotter(io.BytesIO())
    # What cannot be pickled raises where the user's own call does.
    with contextlib.suppress(Exception):
        spotter.dump(thing)
    return spotter.found


class _Spotter(pickle.Pickler):
    found = False

    def persistent_id(self, thing: Any) -> Any:
        if isinstance(thing, torch.Tensor | torch.UntypedStorage | CapturedArray):
            self.found = True
            return "tensor"
        return None


def _write_file(disk: Disk, original: Any, storage: Any, file: Any, *args: Any, **kwargs: Any) -> None:
    disk.skip("UntypedStorage._write_file", file)


INSTEAD: Instead = {(pickle, "dump"): _pickle_dump, (torch.UntypedStorage, "_write_file"): _write_file}


# Arrays ---------------------------------------------------------------------------------------------------


class CapturedArray(numpy.ndarray):
    """The values of a tensor as an array, and what is computed from it: no such array is written to disk."""

    def tofile(self, fid: Any, *args: Any, **kwargs: Any) -> None:
        """Skip it during a capture."""
        if _disk is not None and _disk.in_capture:
            _disk.skip("ndarray.tofile", fid)
        else:
            super().tofile(fid, *args, **kwargs)

    def dump(self, file: Any) -> None:
        """Skip it during a capture."""
        if _disk is not None and _disk.in_capture:
            _disk.skip("ndarray.dump", file)
        else:
            super().dump(file)

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        """Sums and means are scalars, as those of other arrays."""
        return array[()] if return_scalar else array.view(type(self))

    def __reduce__(self) -> Any:
        """A pickled array is an ordinary one: where it is loaded, there may be no capture."""
        return numpy.array(self, subok=False).__reduce__()


# Code that asks for the name of an array's type takes it for an array.
CapturedArray.__module__, CapturedArray.__name__, CapturedArray.__qualname__ = "numpy", "ndarray", "ndarray"
