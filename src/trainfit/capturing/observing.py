"""Observe operators that run anyway: the second way to a trace, beside a capture.

Code runs as it would, on real or on fake tensors, for as many steps as it likes; the recorder, the ledger and
the module table of a capture follow it. What is observed is what happens: nothing is warmed up, and the trace
is of everything since the observation began. Only where fake tensors are to count as being on a GPU, its
choice of kernels (attention, dropout) is taken.

Of tensors that were made before, only those that are named count, and those of modules that are called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainfit.capturing.assemble import trace_of
from trainfit.capturing.boundaries import followed
from trainfit.capturing.categories import known_categories
from trainfit.capturing.interrupts import interrupts_held
from trainfit.capturing.ledger import OUTSIDE, Hold, Ledger, LiveStorage
from trainfit.capturing.metadata import Call, Key, call_key, describe_call
from trainfit.capturing.modules import ModuleTable
from trainfit.capturing.observed_calls import Instant, ObservedCall, ObservingRecorder
from trainfit.capturing.plain_tensors import is_plain, strided_parts, tensors_in
from trainfit.capturing.replacing import replaced
from trainfit.capturing.retarget.gpu import Gpu
from trainfit.capturing.retarget.kernels import gpu_kernels
from trainfit.capturing.schemas import describe
from trainfit.devices.device_table import Device
from trainfit.operators.memory_use import INVISIBLE_NAMESPACES
from trainfit.traces.memory_model import memory_model
from trainfit.traces.trace import Trace

active_fake_mode: Any = torch._guards.active_fake_mode
_ENTER_FROM_PYTHON = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift.default)
"""What `torch.tensor(...)` calls."""


class _Saved:
    """A tensor that autograd keeps for backward, and the ledger's note of it."""

    __slots__ = ("_hold", "_ledger", "_live", "tensor", "version")

    def __init__(self, ledger: Ledger, live: LiveStorage, tensor: torch.Tensor) -> None:
        self.tensor, self.version = tensor, tensor._version
        self._ledger, self._live, self._hold = ledger, live, ledger.save(live)

    def __del__(self) -> None:
        hold: Hold | None = getattr(self, "_hold", None)
        if hold is not None:
            self._ledger.release_saved(self._live, hold)


class Observation(TorchDispatchMode):
    """Follows what runs while it is entered; `trace()` is what was seen so far."""

    def __init__(self, device: Device | None = None, *, refuses_writes: bool = True) -> None:
        """Prepare; `device` is what everything counts as being on, else each tensor's own.

        With `refuses_writes` backward raises, as it does without an observation, where it needs a tensor that
        was written to after autograd had saved it.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._everything_on = device
        self._refuses_writes = refuses_writes
        self.device = device.kind if device is not None else "cpu"
        self.ledger = Ledger(memory_model(self.device))
        self.recorder = ObservingRecorder(self.ledger)
        self.modules = ModuleTable()
        self.recorder.module_index = self.modules.index
        self.calls = self.recorder.observed
        """One for each call of the trace."""
        self._device_of: dict[int, torch.device] = {}
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._labels: dict[int, str] = {}
        self._known_calls: dict[Key, Call] = {}
        self._entered = contextlib.ExitStack()
        self._depth = 0
        self._fake_mode: Any = None
        self._roots: set[int] = set()

    # What counts ----------------------------------------------------------------------------------------

    def include(self, *things: nn.Module | torch.optim.Optimizer | torch.Tensor) -> None:
        """Count what was made before the observation: tensors, modules, the state of optimizers."""
        for thing in things:
            if isinstance(thing, nn.Module):
                self._include_module(thing)
            elif isinstance(thing, torch.optim.Optimizer):
                self._optimizers[id(thing)] = thing
                self._include_tensors(tree_leaves(list(thing.state.values())))
            else:
                self._include_tensors([thing])
        self._label()

    def _include_module(self, module: nn.Module) -> None:
        self.modules.index(module)
        self._include_tensors([*module.parameters(), *module.buffers()])
        self._include_tensors([p.grad for p in module.parameters() if p.grad is not None])
        self.recorder.parameter_module = self.modules.owners()

    def _include_tensors(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            for part in _parts(tensor):
                live = self.ledger.find(part)
                if live is None:
                    self._enter(part, OUTSIDE)
                elif live.producer == OUTSIDE and not live.nbytes:
                    # An operator has read it before it was known to count.
                    self.ledger.resize(live, part.untyped_storage().nbytes())

    def _enter(self, tensor: torch.Tensor, producer: str, nbytes: int | None = None) -> LiveStorage:
        size = tensor.untyped_storage().nbytes() if nbytes is None else nbytes
        live = self.ledger.observe(tensor, producer, size)
        self._device_of[id(live)] = self._place_of(tensor)
        if producer == OUTSIDE and not self.recorder.rows:
            live.start = live.program[0].start = -1
        return live

    def _place_of(self, tensor: torch.Tensor) -> torch.device:
        if self._everything_on is not None:
            return place_named(self.device)
        # A fake tensor's device is asked of the modes around it, which takes a while.
        return tensor.fake_device if type(tensor) is FakeTensor else tensor.device

    def _live(self, tensor: torch.Tensor) -> LiveStorage:
        """Return the entry of a tensor; what was made before and is not included counts nothing."""
        return self.ledger.find(tensor) or self._enter(tensor, OUTSIDE, 0)

    # Operators ------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and note what it did."""
        if not all(kind is FakeTensor or is_plain(kind) for kind in types):
            return NotImplemented  # other kinds of tensors unwrap themselves first
        result = func(*args, **(kwargs or {}))
        # Distributed tensors ask fake ones about shapes meanwhile: that is not the program's own work.
        if isinstance(func, OpOverload) and active_fake_mode() is self._fake_mode:
            self._note(func, args, kwargs or {}, result)
        return result

    def _note(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if func.namespace in INVISIBLE_NAMESPACES or describe(func).invisible:
            return
        operator = describe(func)
        with self.ledger.lock:
            key, tensors = call_key(func, args, kwargs)
            if func in _ENTER_FROM_PYTHON:
                tensors = []  # what comes in was made just now, from a number or a list
            reads = [self._live(part) for tensor in tensors for part in _parts(tensor)]
            writes = [self._live(part) for one in operator.written(args, kwargs) for part in _parts(one)]
            results = [result] if isinstance(result, torch.Tensor) else _tensors(result)
            made = [part for one in results for part in _parts(one)]
            creates = [self._enter(part, operator.name) for part in made if self.ledger.find(part) is None]
            call = self._call(func, key, tensors, result, results)
            self.recorder.record(call, reads, writes, creates)

    def _call(
        self,
        func: OpOverload,
        key: Key,
        tensors: list[torch.Tensor],
        result: Any,
        results: list[torch.Tensor],
    ) -> Call:
        plain = all(one.layout is torch.strided and not one.is_nested for one in (*tensors, *results))
        # What it returns may depend on values: then it is another call.
        key = (*key, tuple(one.shape for one in results))
        if key not in self._known_calls:
            known = key[:-1]
            self._known_calls[key] = (
                describe_call(func, known, tensors, result)
                if plain and not describe(func).is_view
                else Call(describe(func), known, (), True)
            )
        return self._known_calls[key]

    # Modules, backward, optimizers ----------------------------------------------------------------------

    def _module_call(self, original: Any) -> Any:
        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._is_new_root(module):
                self._include_module(module)
                self._label()
            has_tensors = any(True for _ in tensors_in((args, kwargs)))
            call = ObservedCall(self.now(), self.storages_of((args, kwargs)), has_tensors)
            self.calls.append(call)
            try:
                result = original(module, *args, **kwargs)
                call.returned = self.storages_of(result)
                return result
            finally:
                call.left = self.now()

        return __call__

    def _is_new_root(self, module: nn.Module) -> bool:
        if id(module) in self._roots:
            return False
        self._roots.update(id(inner) for inner in module.modules())
        return True

    def storages_of(self, value: Any) -> tuple[LiveStorage, ...]:
        """Return the entries of all tensors in a value, each once."""
        found = [self.ledger.find(part) for tensor in tensors_in(value) for part in _parts(tensor)]
        return tuple({id(live): live for live in found if live is not None}.values())

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers[id(optimizer)] = optimizer
        self._label()

    def _label(self) -> None:
        """Remember what is known now: a gradient may be gone when the trace is made."""
        self._labels |= known_categories(self, self._optimizers.values())

    def _pack(self, tensor: torch.Tensor) -> _Saved | torch.Tensor:
        parts = list(_parts(tensor))
        if len(parts) != 1 or parts[0] is not tensor or tensor.is_inference():
            return tensor
        return _Saved(self.ledger, self._live(tensor), tensor)

    def _unpack(self, packed: _Saved | torch.Tensor) -> torch.Tensor:
        if not isinstance(packed, _Saved):
            return packed
        if self._refuses_writes and packed.tensor._version != packed.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: a tensor of shape {list(packed.tensor.shape)} that backward needs."
            )
        return packed.tensor

    def _without_hooks(self, original: Any) -> Any:
        # torch.func transforms refuse to run while hooks for saved tensors are there.
        @contextlib.contextmanager
        def disable(error_message: str) -> Iterator[None]:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            try:
                with original(error_message):
                    yield
            finally:
                torch._C._autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)

        return disable

    def _resize(self, original: Any) -> Any:
        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            live = self.ledger.find_storage(storage)
            if live is not None and live.nbytes != size:
                self.ledger.resize(live, int(size))
            return result

        return resize_

    # Entering and leaving -------------------------------------------------------------------------------

    def __enter__(self) -> Observation:
        """Begin to observe, or go on."""
        if self._depth == 0:
            self._fake_mode = active_fake_mode()
            with interrupts_held(), contextlib.ExitStack() as stack:
                stack.enter_context(self._kernels())
                stack.enter_context(replaced(nn.Module, "__call__", self._module_call))
                stack.enter_context(followed(self.recorder, self._stepped))
                stack.enter_context(replaced(torch.UntypedStorage, "resize_", self._resize))
                graph = torch.autograd.graph
                stack.enter_context(replaced(graph, "disable_saved_tensors_hooks", self._without_hooks))
                stack.enter_context(graph.saved_tensors_hooks(self._pack, self._unpack))
                self._entered = stack.pop_all()
        self._depth += 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def _kernels(self) -> contextlib.AbstractContextManager[None]:
        """Let fake tensors that count as being on a GPU take the kernels that it would choose."""
        device = self._everything_on
        if device is None or device.kind == "cpu" or self._fake_mode is None:
            return contextlib.nullcontext()
        return gpu_kernels(Gpu(device, self.ledger))

    def __exit__(self, *error: Any) -> None:
        """Stop observing; what autograd holds is still followed."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._depth -= 1
        if self._depth == 0:
            self._label()
            with interrupts_held():
                self._entered.close()

    # What was seen --------------------------------------------------------------------------------------

    def now(self) -> Instant:
        """Return the present moment."""
        return self.recorder.now()

    def devices(self) -> list[torch.device]:
        """Return the devices that anything was on, in the order in which they were seen."""
        counted = (live for live in self.ledger.created if live.initial_bytes or live.resizes)
        return list(dict.fromkeys(self._device_of[id(live)] for live in counted))

    def trace(self, device: torch.device | None = None) -> Trace:
        """Return everything so far as a trace; of storages, only those of one device have bytes."""
        with self.ledger.lock:
            self._label()
            found = trace_of(self, self._labels, "observed")
        places = self.devices()
        place = device or (places[0] if places else place_named(self.device))
        kind = "cpu" if place.type == "cpu" else "cuda"
        elsewhere = [self._device_of[id(live)] != place for live in self.ledger.created]
        root = next((call.module for call in found.calls if call.parent < 0), -1)
        found = replace(found, device=kind, model=root)
        if not any(elsewhere) and kind == self.device:
            return found
        storages = [
            replace(storage, bytes=0, resizes=()) if away else storage
            for storage, away in zip(found.storages, elsewhere)
        ]
        return replace(found, storages=tuple(storages), observed_peak_bytes=None)


def place_named(kind: str) -> torch.device:
    """Return the device that a kind of device is, where nothing says which."""
    return torch.device("cuda", 0) if kind == "cuda" else torch.device(kind)


def _tensors(result: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]


def _parts(value: Any) -> Iterable[torch.Tensor]:
    if type(value) is FakeTensor and value.layout is torch.strided:
        return (value,)
    return strided_parts(value) if isinstance(value, torch.Tensor) else ()
