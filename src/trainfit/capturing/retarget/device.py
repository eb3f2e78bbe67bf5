"""Tensors that claim to be on a GPU, and a `torch.cuda` that answers without one.

A function mode above everything else answers `tensor.device` with `cuda:0` and turns every device argument
into the CPU that the capture runs on. So `device="cuda"`, `.cuda()`, `.to("cuda")` and code that branches
on the device work without a GPU, and take the GPU's branch.

Not modelled: which tensors stay on the host. `.cpu()` returns the tensor itself, and what it holds still
counts as device memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from trainfit.capturing.replacing import replaced

if TYPE_CHECKING:
    from trainfit.capturing.dispatch import CaptureMode

CUDA = torch.device("cuda", 0)
_CPU = torch.device("cpu")
_CAPABILITY = (9, 0)


def _getter(name: str) -> Any:
    return getattr(torch.Tensor, name).__get__


_ANSWERS: dict[Any, Any] = {
    _getter("device"): CUDA,
    _getter("is_cuda"): True,
    _getter("is_cpu"): False,
    torch.Tensor.get_device: 0,
}
_MOVES_TO_GPU = {torch.Tensor.cuda}
_STAYS = {torch.Tensor.pin_memory, torch.Tensor.cpu}
_MOVES = {torch.Tensor.to}


class LooksLikeCuda(TorchFunctionMode):
    """Answers for the device of tensors and redirects device arguments to the CPU."""

    def __init__(self, mode: CaptureMode) -> None:
        """Tell `mode` which constants stay on the host, and ask it about tensors that do."""
        super().__init__()
        self._mode = mode

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Handle one call of torch's Python API."""
        if func in _ANSWERS:
            return self._answer(func, args[0])
        if func in _STAYS or func in _MOVES_TO_GPU:
            return args[0]
        kwargs = kwargs or {}
        if func in _MOVES:
            args = tuple(on_capture_device(value, index_is_device=n == 1) for n, value in enumerate(args))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": on_capture_device(kwargs["device"], index_is_device=True)}
        elif func is torch.tensor and not isinstance(args[0] if args else None, list | tuple):
            # A scalar without a device (an optimizer's step count) stays on the host.
            self._mode.constants_on_host = True
            try:
                return func(*args, **kwargs)
            finally:
                self._mode.constants_on_host = False
        if "map_location" in kwargs:
            kwargs = {**kwargs, "map_location": on_capture_device(kwargs["map_location"])}
        return func(*args, **kwargs)

    def _answer(self, func: Any, tensor: torch.Tensor) -> Any:
        with torch._C.DisableTorchFunction():
            live = None if tensor.is_meta or tensor.is_sparse else self._mode.ledger.find(tensor)
            if tensor.is_meta or (live is not None and live.on_host):
                return func(tensor)
            return _ANSWERS[func]


def on_capture_device(value: Any, *, index_is_device: bool = False) -> Any:
    """Turn any way of naming a GPU into the CPU; leave everything else alone."""
    if isinstance(value, torch.device):
        return _CPU if value.type == "cuda" else value
    if isinstance(value, str) and value.split(":")[0] == "cuda":
        return _CPU
    if index_is_device and type(value) is int:
        return _CPU
    return value


class _Inert:
    """A stream, event or other handle that does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = CUDA

    def __enter__(self) -> _Inert:
        return self

    def __exit__(self, *exception: Any) -> None:
        return None

    def elapsed_time(self, other: Any) -> float:
        return 0.0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: None


def _answers_for_cuda() -> dict[str, Any]:
    properties = SimpleNamespace(
        name="GPU",
        major=_CAPABILITY[0],
        minor=_CAPABILITY[1],
        total_memory=80 << 30,
        multi_processor_count=132,
    )
    constant = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": "GPU",
        "get_device_capability": _CAPABILITY,
        "get_device_properties": properties,
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
        "mem_get_info": (80 << 30, 80 << 30),
        "memory_stats": {},
        "memory_summary": "",
    }
    silent = ["init", "set_device", "synchronize", "empty_cache", "manual_seed", "manual_seed_all"]
    silent += ["reset_peak_memory_stats", "set_rng_state", "set_rng_state_all", "set_stream", "_lazy_init"]
    found: dict[str, Any] = {name: _constantly(value) for name, value in constant.items()}
    found.update({name: _constantly(None) for name in silent})
    found.update(dict.fromkeys(("Stream", "Event", "stream", "device"), _Inert))
    found["current_stream"] = found["default_stream"] = _Inert
    # The state of a GPU's generator is kept on the host: it is no device memory.
    found["get_rng_state"] = _host_state
    found["get_rng_state_all"] = lambda: [_host_state()]
    return found


_ACCELERATOR: dict[str, Any] = {
    "is_available": True,
    "current_accelerator": CUDA,
    "device_count": 1,
    "current_device_index": 0,
    "set_device_index": None,
    "set_device_idx": None,
    "current_stream": _Inert,
    "synchronize": None,
    "empty_cache": None,
    "memory_allocated": 0,
    "max_memory_allocated": 0,
    "memory_reserved": 0,
    "max_memory_reserved": 0,
    "reset_peak_memory_stats": None,
}


def _constantly(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _host_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    with torch._C._DisableTorchDispatch():
        return torch.zeros(16, dtype=torch.uint8)


@contextlib.contextmanager
def looks_like_cuda(mode: CaptureMode) -> Iterator[None]:
    """Let tensors claim to be on a GPU, and `torch.cuda` answer as if there were one."""
    with contextlib.ExitStack() as stack:
        for name, answer in _answers_for_cuda().items():
            if hasattr(torch.cuda, name):
                stack.enter_context(replaced(torch.cuda, name, _constantly(answer)))
        for name, value in _ACCELERATOR.items():
            if hasattr(torch.accelerator, name):
                answer = _Inert if value is _Inert else _constantly(value)
                stack.enter_context(replaced(torch.accelerator, name, _constantly(answer)))
        stack.enter_context(replaced(torch, "Generator", _generator))
        # What it would set is the default that the redirected arguments have anyway.
        stack.enter_context(replaced(torch, "set_default_device", _constantly(_constantly(None))))
        stack.enter_context(LooksLikeCuda(mode))
        yield


def _generator(original: Any) -> Any:
    # Still a class, because type hints and isinstance tests name it.
    class AnyGenerator(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

    class Generator(metaclass=AnyGenerator):
        def __new__(cls, device: Any = "cpu") -> Any:
            return original(on_capture_device(device))

    return Generator
