"""Tensors that claim to be on a GPU, beside the `torch.cuda` of `gpu.py`, which answers without one.

A function mode above everything else answers `tensor.device` with `cuda:0` and turns every device argument
into the CPU that the capture runs on. So `device="cuda"`, `.cuda()`, `.to("cuda")` and code that branches
on the device work without a GPU, and take the GPU's branch. torch suspends a function mode while it handles
a call; user code that is called back from there (in backward, by hooks of saved tensors) gets it back.

What is made without a device is on the host, as in a real run, and so is what is made with `device="cpu"`,
moved by `.cpu()` or computed from such tensors alone: it does not count. A step that never names a GPU is
meant to run on one as a whole: then (`host_by_default` is off) everything but scalars counts as on the GPU.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from trainfit.capturing.own_gpu import number_of_gpu, own_device, own_number, refuse_second_gpu
from trainfit.capturing.plain_tensors import strided_parts
from trainfit.capturing.replacing import replaced
from trainfit.capturing.retarget.gpu import Gpu, answers_of_accelerator, answers_of_cuda
from trainfit.capturing.retarget.storages import made_on
from trainfit.capturing.retarget.streams import Streams, record_stream_for
from trainfit.capturing.values import user_line
from trainfit.capturing.waiting import note_synchronisation
from trainfit.errors import CaptureError

if TYPE_CHECKING:
    from trainfit.capturing.dispatch import CaptureMode

_CPU = torch.device("cpu")


def _getter(name: str) -> Any:
    return getattr(torch.Tensor, name).__get__


_ANSWERS: dict[Any, Any] = {
    _getter("device"): own_device,
    _getter("is_cuda"): lambda: True,
    _getter("is_cpu"): lambda: False,
    torch.Tensor.get_device: own_number,
}
_MOVES = {torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu}


class LooksLikeCuda(TorchFunctionMode):
    """Answers for the device of tensors and redirects device arguments to the CPU."""

    def __init__(self, mode: CaptureMode, gpu: Gpu) -> None:
        """Tell `mode` which constants stay on the host, and ask it about tensors that do."""
        super().__init__()
        self._mode = mode
        self._gpu = gpu

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Handle one call of torch's Python API."""
        if func in _ANSWERS:
            return self._answer(func, args[0])
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator) and "flex_attention" in func.name():
            raise CaptureError(
                f"{user_line()} calls flex_attention, whose kernel torch.compile makes for the GPU; capture "
                "cannot follow it. For an estimate, call scaled_dot_product_attention in its place."
            )
        if func in _MOVES:
            return self._move(func, args, kwargs)
        if func is torch.as_tensor and "device" in kwargs and isinstance(args[0], torch.Tensor):
            return self._move(torch.Tensor.to, args, kwargs)
        if func is torch.Tensor.pin_memory:
            return args[0]
        to_host = None
        if isinstance(func, OpOverload) and _names_host(kwargs.get("device")):
            # A tensor inside of one that holds others, for which C++ names the device of the capture.
            return func(*args, **kwargs)
        if kwargs.get("device") is not None:
            to_host = self._destination([kwargs["device"]])
            kwargs = {**kwargs, "device": on_capture_device(kwargs["device"])}
        elif func in _constructors():
            to_host = self._by_default(func, args, kwargs)
        elif func is torch.Tensor.new_tensor:
            to_host = self._on_host(args[0])
        if kwargs.get("pin_memory"):
            # Pinned memory is on the host; without a GPU there is none.
            to_host, kwargs = True, {**kwargs, "pin_memory": False}
        return func(*args, **kwargs) if to_host is None else self._call(func, args, kwargs, to_host)

    def heard_in(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` with this mode active in it, also where torch has suspended the mode."""

        def call(*args: Any, **kwargs: Any) -> Any:
            stack = torch.overrides._get_current_function_mode_stack()
            heard = any(isinstance(mode, LooksLikeCuda) for mode in stack)
            with contextlib.nullcontext() if heard else self:
                return function(*args, **kwargs)

        return call

    def _by_default(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool | None:
        """Whether a function that makes a tensor, and is given no device, makes it on the host."""
        default = torch.get_default_device()
        if default.type == "cuda":
            return self._destination([default])
        if any(isinstance(given, torch.Tensor) for given in _each(args)):
            return None  # where that tensor is
        if self._mode.ledger.host_by_default:
            return True
        # A scalar stays on the host. Modules that take a device, even None, make their tensors for the GPU.
        is_scalar = func is torch.tensor and "device" not in kwargs and not isinstance(args[0], list | tuple)
        return True if is_scalar else None

    def _destination(self, places: Iterable[Any]) -> bool | None:
        """Whether the values name the host (or a tensor there), or a GPU; None if they name no device."""
        for place in places:
            if isinstance(place, torch.Tensor):
                return self._on_host(place)
            if _names_gpu(place):
                self._gpu.named = True
                return False
            if _names_host(place):
                return True
        return None

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], on_host: bool) -> Any:
        """Call a function that makes tensors on the host or on the GPU."""
        with made_on(self._mode, on_host=on_host):
            return func(*args, **kwargs)

    def _move(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Move a tensor: copy it, unless it is there already."""
        tensor, *places = args
        if func is torch.Tensor.to:
            to_host = self._destination([*places, kwargs.get("device"), kwargs.get("other")])
        else:
            to_host = func is torch.Tensor.cpu
            self._gpu.named = self._gpu.named or not to_host
            for place in (*places, *kwargs.values()):
                refuse_second_gpu(place)
        if to_host is None:
            return func(*args, **kwargs)
        moved = tensor
        if func is torch.Tensor.to:
            places = [on_capture_device(place) for place in places]
            if "device" in kwargs:
                kwargs = {**kwargs, "device": on_capture_device(kwargs["device"])}
            moved = self._call(func, (tensor, *places), kwargs, to_host)
        if moved is tensor and self._on_host(tensor) != to_host:
            moved = self._call(torch.ops.aten._to_copy.default, (tensor,), {}, to_host)
        if moved is not tensor and self._on_host(tensor) != to_host:
            if not _non_blocking(places, kwargs):
                self._mode.recorder.host_waits()
            if moved.grad_fn is not None:
                moved.grad_fn.register_hook(lambda inputs, outputs: self._moved_back(inputs, not to_host))
        return moved

    def _moved_back(self, gradients: tuple[Any, ...], on_host: bool) -> tuple[Any, ...]:
        """Move gradients to where a tensor came from: autograd sees one device only, and moves nothing."""
        copy = torch.ops.aten._to_copy.default
        with torch.no_grad(), torch._C.DisableTorchFunction():
            return tuple(g if g is None else self._call(copy, (g,), {}, on_host) for g in gradients)

    def _on_host(self, tensor: torch.Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            part = next(strided_parts(tensor), tensor)  # of what holds others: where they are
            has_memory = torch._C._has_storage(part) and not part.is_meta
            live = self._mode.ledger.find(part) if has_memory else None
            return live is not None and live.on_host

    def _answer(self, func: Any, tensor: torch.Tensor) -> Any:
        on_host = self._on_host(tensor)
        with torch._C.DisableTorchFunction():
            return func(tensor) if on_host or tensor.is_meta else _ANSWERS[func]()


@functools.cache
def _constructors() -> frozenset[Any]:
    """Return the functions that make a tensor where the default device says, if they are given none."""
    return frozenset(_device_constructors()) | {torch.normal, torch.from_file}


def _each(values: Iterable[Any]) -> Iterator[Any]:
    """Yield values, and those in lists of them."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value


def _non_blocking(places: Iterable[Any], kwargs: dict[str, Any]) -> bool:
    """Whether `to` or `cuda` was told not to wait: the first bool among the positional arguments."""
    return bool(kwargs.get("non_blocking") or next((p for p in places if isinstance(p, bool)), False))


def _names_gpu(place: Any) -> bool:
    """Whether a value names the GPU: `"cuda"`, `"cuda:0"`, a device, or a number where one is expected."""
    refuse_second_gpu(place)
    return number_of_gpu(place) is not None


def _names_host(place: Any) -> bool:
    return (isinstance(place, torch.device) and place.type == "cpu") or place == "cpu"


def on_capture_device(place: Any) -> Any:
    """Turn any way of naming a GPU into the CPU; leave everything else alone."""
    return _CPU if _names_gpu(place) else place


def _constantly(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


@contextlib.contextmanager
def looks_like_cuda(mode: CaptureMode, gpu: Gpu) -> Iterator[None]:
    """Let tensors claim to be on a GPU, and `torch.cuda` answer as if there were one."""
    with contextlib.ExitStack() as stack:
        streams = mode.streams = Streams(mode.recorder)
        answers = {
            torch.cuda: answers_of_cuda(gpu, streams),
            torch.accelerator: answers_of_accelerator(gpu, streams),
        }
        for module, found in answers.items():
            found["synchronize"] = lambda *args, **kwargs: note_synchronisation(mode)
            for name, answer in found.items():
                if hasattr(module, name):
                    stack.enter_context(replaced(module, name, _constantly(answer)))
        stack.enter_context(replaced(torch, "Generator", _generator))
        stack.enter_context(replaced(torch._C._nn, "_parse_to", _parse_to))
        stack.enter_context(replaced(torch.Tensor, "_make_wrapper_subclass", _wrapping))
        stack.enter_context(replaced(torch.Tensor, "record_stream", _constantly(record_stream_for(streams))))
        _patch_default_device(stack)
        for name in ("mark", "range_push", "range_pop", "range_start", "range_end"):
            stack.enter_context(replaced(torch.cuda.nvtx, name, _constantly(_constantly(None))))
        # Asked before weights are put into one buffer, which does not change their total size.
        stack.enter_context(replaced(torch.backends.cudnn, "is_acceptable", _constantly(_constantly(False))))
        looks = LooksLikeCuda(mode, gpu)
        for owner in (torch.autograd, torch.autograd.graph):
            stack.enter_context(replaced(owner, "_engine_run_backward", looks.heard_in))
        if mode.of_cluster:
            from trainfit.capturing.distributed.ring_attention import padded_rows_refused
            from trainfit.capturing.retarget.distributed_tensors import heard_in_distributed_tensors

            stack.enter_context(heard_in_distributed_tensors(looks.heard_in))
            stack.enter_context(padded_rows_refused(gpu))
        hooks = torch.autograd.graph.saved_tensors_hooks
        stack.enter_context(replaced(hooks, "__init__", lambda original: _hooks_init(looks, original)))
        stack.enter_context(replaced(torch._C, "_group_tensors_by_device_and_dtype", _groups))
        stack.enter_context(looks)
        yield


def _parse_to(original: Any) -> Any:
    # What `module.to` was given: its answer is for `tensor.to`, and must name the GPU. Here, too, a number is
    # that of a GPU, for which torch itself would look, and a tensor is where it claims to be.
    def by_name(place: Any) -> Any:
        return own_device() if type(place) is int and _names_gpu(place) else place

    def parse_to(*args: Any, **kwargs: Any) -> Any:
        if "tensor" in kwargs:
            args = (kwargs.pop("tensor"), *args)
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        if "device" in kwargs:
            kwargs["device"] = by_name(kwargs["device"])
        with torch._C.DisableTorchFunction():
            return original(*map(by_name, args[:1]), *args[1:], **kwargs)

    return parse_to


def _wrapping(original: Any) -> Any:
    # A tensor that holds others (jagged, quantised) names their device, and autograd's engine believes it.
    def make_wrapper_subclass(*args: Any, **kwargs: Any) -> Any:
        places = (on_capture_device(one) if isinstance(one, torch.device) else one for one in args)
        if "device" in kwargs:
            kwargs["device"] = on_capture_device(kwargs["device"])
        return original(*places, **kwargs)

    return make_wrapper_subclass


def _groups(original: Any) -> Any:
    # Optimizers and the clipping of gradients ask for lists of tensors by device, and C++ answers.
    def by_device_and_dtype(lists: Any, *with_indices: Any) -> dict[Any, Any]:
        groups = original(lists, *with_indices)
        return {(found[0][0][0].device, dtype): found for (_, dtype), found in groups.items()}

    return by_device_and_dtype


def _hooks_init(looks: LooksLikeCuda, original: Any) -> Any:
    def __init__(self: Any, pack_hook: Any, unpack_hook: Any) -> None:
        original(self, looks.heard_in(pack_hook), looks.heard_in(unpack_hook))

    return __init__


def _patch_default_device(stack: contextlib.ExitStack) -> None:
    """Remember what `set_default_device` is given, and no more: redirected arguments go to the CPU anyway."""
    chosen: list[Any] = []

    def choose(device: Any) -> None:
        refuse_second_gpu(device)
        chosen.append(device)

    def answering(original: Any) -> Any:
        return lambda: torch.device(chosen[-1]) if chosen and chosen[-1] else original()

    stack.enter_context(replaced(torch, "set_default_device", _constantly(choose)))
    stack.enter_context(replaced(torch, "get_default_device", answering))


def _generator(original: Any) -> Any:
    # Still a class, because type hints and isinstance tests name it.
    class AnyGenerator(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

    class Generator(metaclass=AnyGenerator):
        def __new__(cls, device: Any = "cpu") -> Any:
            return original(on_capture_device(device))

    return Generator
