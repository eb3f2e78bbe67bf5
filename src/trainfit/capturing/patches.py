"""The few Python functions of torch that have to be replaced while a capture runs, each with its reason."""

from __future__ import annotations

import contextlib
import importlib.machinery
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from trainfit.capturing import without_operators
from trainfit.capturing.boundaries import followed
from trainfit.capturing.compiler import eager_only
from trainfit.capturing.describing import autocast_dtype
from trainfit.capturing.disk import untouched
from trainfit.capturing.disk.writers import CapturedArray
from trainfit.capturing.distributed.one_process import in_one_process
from trainfit.capturing.ledger import OUTSIDE
from trainfit.capturing.processes import plain_processes
from trainfit.capturing.replacing import replaced
from trainfit.capturing.values import script_line
from trainfit.capturing.waiting import read_without_operator
from trainfit.errors import CaptureError

if TYPE_CHECKING:
    from trainfit.capturing.session import Session


@contextlib.contextmanager
def installed(session: Session) -> Iterator[None]:
    """Install all replacements for the length of a capture."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(followed(session.recorder, session.optimizer_stepped))
        stack.enter_context(replaced(torch.autocast, "__enter__", lambda o: _autocast(session, o)))
        stack.enter_context(
            replaced(
                torch.autograd.graph, "disable_saved_tensors_hooks", lambda o: _without_hooks(session, o)
            )
        )
        for owner in (torch, torch.random):
            stack.enter_context(replaced(owner, "get_rng_state", lambda o: _random_state(session, o)))
        stack.enter_context(replaced(torch.Tensor, "tolist", lambda o: _tolist(session, o)))
        stack.enter_context(replaced(torch.Tensor, "numpy", lambda o: _numpy(session, o)))
        stack.enter_context(replaced(torch.Tensor, "__array__", lambda o: _array(session, o)))
        stack.enter_context(replaced(torch.Tensor, "__repr__", lambda o: _repr(session, o)))
        if session.device == "cpu":
            stack.enter_context(replaced(torch, "frombuffer", lambda o: _from_buffer(session, o)))
        storage = torch.UntypedStorage
        stack.enter_context(replaced(storage, "clone", lambda o: _clone_storage(session, o)))
        stack.enter_context(replaced(storage, "resize_", lambda o: _resize_storage(session, o)))
        for name in ("nbytes", "size", "__len__"):
            stack.enter_context(replaced(storage, name, lambda o: _storage_size(session, o)))
        stack.enter_context(replaced(threading.Thread, "run", lambda o: _thread_run(session, o)))
        loader = importlib.machinery.SourceFileLoader
        stack.enter_context(replaced(loader, "exec_module", _import_for_real))
        stack.enter_context(eager_only(lambda: _note_compiled(session)))
        stack.enter_context(replaced(FakeTensorMode, "__enter__", lambda o: _refuse_fake(session, o)))
        stack.enter_context(in_one_process(session))
        stack.enter_context(untouched(session))
        stack.enter_context(plain_processes(session))
        yield


def _refuse_fake(session: Session, original: Any) -> Any:
    """Refuse what traces with fake tensors, such as `torch.export`: they cannot be mixed with hollow ones."""

    def __enter__(self: FakeTensorMode) -> FakeTensorMode:
        # Capture asks fake tensors as well, but not while its own mode is on.
        if any(mode is session.mode for mode in _get_current_dispatch_mode_stack()):
            raise CaptureError(
                f"{script_line()} follows the operators of a model on fake tensors, as exporting does, which "
                "a capture cannot do meanwhile. This is a limit of the capture, not a mistake in the step."
            )
        entered: FakeTensorMode = original(self)
        return entered

    return __enter__


def _autocast(session: Session, original: Any) -> Any:
    # The dtype of autocast is part of the step's description.
    def __enter__(self: torch.autocast) -> Any:
        dtype = autocast_dtype(self)
        if dtype is not None:
            session.recorder.autocast.add(dtype)
        return original(self)

    return __enter__


def _thread_run(session: Session, original: Any) -> Any:
    # Modes and saved-tensor hooks belong to a thread; what the step computes in another one counts as well.
    def run(self: threading.Thread) -> None:
        with session.in_this_thread():
            original(self)

    return run


def _import_for_real(original: Any) -> Any:
    # A module that the step is the first to import outlives the capture, and so do the tensors in it.
    def exec_module(self: Any, module: Any) -> None:
        with torch._C._DisableTorchDispatch():
            original(self, module)

    return exec_module


def _note_compiled(session: Session) -> None:
    text = "torch.compile: the step was captured as eager PyTorch runs it, which may need another peak"
    if not any(assumption.kind == "compiled" for assumption in session.values.assumptions):
        session.values.note("compiled", text, script_line())


def _without_hooks(session: Session, original: Any) -> Any:
    # torch.func transforms refuse to run while saved-tensor hooks are installed.
    @contextlib.contextmanager
    def disable(error_message: str) -> Iterator[None]:
        with session.saved_tensor_hooks.suspended(), original(error_message):
            yield

    return disable


def _random_state(session: Session, original: Any) -> Any:
    # The state is a tensor (5 KB on the CPU) made without an operator call; checkpointing keeps many. That of
    # a GPU is on the host too.
    def get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
        state: torch.Tensor = original(*args, **kwargs)
        if session.device == "cuda":
            return state
        return without_operators.allocated(session.mode, state, "torch.get_rng_state")

    return get_rng_state


def _tolist(session: Session, original: Any) -> Any:
    # Reads memory directly, without an operator call.
    def tolist(self: torch.Tensor) -> Any:
        # A function mode would call this function again.
        with torch._C.DisableTorchFunction():
            values = original(without_operators.readable(session.mode, self, "torch.tolist"))
        session.values.note_array(values, self)
        return values

    return tolist


def _numpy(session: Session, original: Any) -> Any:
    def to_numpy(self: torch.Tensor, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            array = original(without_operators.readable(session.mode, self, "torch.numpy"), **kwargs)
        session.values.note_array(array, self)
        return array.view(CapturedArray)

    return to_numpy


def _array(session: Session, original: Any) -> Any:
    def __array__(self: torch.Tensor, dtype: Any = None) -> Any:
        array = without_operators.readable(session.mode, self, "torch.numpy").detach().numpy()
        return numpy.asarray(array, dtype=dtype)

    return __array__


def _repr(session: Session, original: Any) -> Any:
    # Printing a tensor reads it, partly where no mode sees it.
    def __repr__(self: torch.Tensor, *, tensor_contents: str | None = None) -> Any:
        in_capture = session.mode in _get_current_dispatch_mode_stack()
        live = session.ledger.find(self) if in_capture and self.layout is torch.strided else None
        if live is not None and tensor_contents is None and type(self) in (torch.Tensor, nn.Parameter):
            read_without_operator(session.mode, "torch.print", self, live)
            with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
                # A copy of its own, which may be read without being noticed again.
                known = self.detach().clone() if live.known else None
                values = torch.zeros((), dtype=self.dtype).expand(self.shape) if known is None else known
                tensor_contents = torch._tensor_str._tensor_str(values, len("tensor("))
        return original(self, tensor_contents=tensor_contents)

    return __repr__


def _from_buffer(session: Session, original: Any) -> Any:
    # Memory that torch's CPU allocator does not own, it does not count.
    def frombuffer(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor: torch.Tensor = original(*args, **kwargs)
        known = session.values.worth_knowing(tensor.dtype, tensor.numel())
        session.ledger.register(tensor, OUTSIDE, known=known, counts=False)
        return tensor

    return frombuffer


def _clone_storage(session: Session, original: Any) -> Any:
    # copy.deepcopy of a tensor copies its storage byte by byte: hollow storages have no bytes.
    def clone(self: torch.UntypedStorage) -> torch.UntypedStorage:
        return without_operators.cloned(session.mode, self)

    return clone


def _resize_storage(session: Session, original: Any) -> Any:
    # FSDP frees and restores parameters this way; it is not an operator call.
    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        live = session.ledger.find_storage(self)
        if live is None:
            return original(self, size)
        session.ledger.resize(live, int(size))
        return self

    return resize_


def _storage_size(session: Session, original: Any) -> Any:
    def size(self: torch.UntypedStorage) -> int:
        live = session.ledger.find_storage(self)
        return int(original(self)) if live is None or live.resized_to is None else live.resized_to

    return size
