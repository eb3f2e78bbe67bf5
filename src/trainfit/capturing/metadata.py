"""What an operator's outputs look like: dtype, shape, strides and storage size, without running it.

torch's own fake tensors answer that, once per distinct call: the answers are remembered by operator and
input metadata, because models repeat their layers. Operators whose fake kernel is missing or wrong get one
of ours in `own_kernels.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException
from torch.utils._pytree import tree_map

from trainfit.capturing.exchanges import described_group, handle_key
from trainfit.capturing.own_gpu import own_device
from trainfit.capturing.own_kernels import OWN_KERNELS
from trainfit.capturing.replacing import while_set
from trainfit.capturing.schemas import Operator, describe
from trainfit.capturing.values import user_line
from trainfit.errors import CaptureError
from trainfit.workspace.remembered import ResultLayout

_LARGEST_REAL_BYTES = 1 << 28
_BY_MAKER = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)
_LOGGER = logging.getLogger("torch._subclasses.fake_tensor")


@dataclass(frozen=True, slots=True)
class NewTensor:
    """An output that needs a new storage; outputs with the same `group` share one."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    storage_bytes: int
    group: int


@dataclass(frozen=True, slots=True)
class InputAlias:
    """An output that lies over the storage of the input tensor number `tensor`."""

    tensor: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


Output = NewTensor | InputAlias | None | int | float | bool
Key = tuple[Hashable, ...]


@dataclass(eq=False, slots=True)
class Call:
    """One distinct operator call: what it is, and what it returns."""

    operator: Operator
    key: Key
    outputs: tuple[Output | list[Output], ...]
    single: bool
    workspace_bytes: int | None = None
    """The kernel's workspace, where it depends on values and was measured with the real ones."""
    unlike_cpu: bool = False
    """Whether the CPU's kernel refuses the call, or returns something else than the device's."""
    over_link: bool = False
    """Whether it copies between the host and the device."""


def call_key(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Key, list[torch.Tensor]]:
    """Return what identifies this call's metadata, and the tensors among its arguments in order."""
    tensors: list[torch.Tensor] = []
    parts: list[Hashable] = [_part(value, tensors) for value in args]
    parts.extend([(name, _part(value, tensors)) for name, value in kwargs.items()])
    # A factory function may take its dtype from the default.
    return (func if tensors else (func, torch.get_default_dtype()), *parts), tensors


def _part(value: Any, tensors: list[torch.Tensor]) -> Hashable:
    kind = type(value)
    if kind is torch.Tensor or kind is nn.Parameter or isinstance(value, torch.Tensor):
        tensors.append(value)
        layout = value.layout
        return (value.dtype, value.shape, value.stride() if layout is torch.strided else layout)
    if kind is list or kind is tuple:
        return tuple([_part(item, tensors) for item in value])
    if kind is int or value is None or kind is torch.dtype:
        return cast(Hashable, value)
    if kind is float or kind is bool:
        return (kind, value)
    if kind is torch.ScriptObject:
        return handle_key(value)
    if isinstance(value, torch.distributed.ProcessGroup):
        return described_group(value)
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return (kind, value)


def _says_no_fake_kernel(error: Exception) -> bool:
    if isinstance(error, UnsupportedOperatorException | NotImplementedError):
        return True
    # Some methods of tensors, which fake kernels use, ask for the device even of a fake one; torch built for
    # the CPU alone then has no answer.
    messages = ("no fake impl registered", "not linked with support for cuda devices")
    return isinstance(error, RuntimeError) and any(message in str(error) for message in messages)


class _FakeMode(FakeTensorMode):
    """torch's fake tensors, which need no GPU to be on one, although `torch.cuda` says that there is one."""

    avoid_device_init = True


class MetadataOracle:
    """Answers "what would this call return?" from the cache, from our own kernels, or from fake tensors."""

    def __init__(self, device: str = "cpu") -> None:
        """Start with nothing remembered; the answers are those of the kernels of `device`."""
        self._device = device
        self.architecture_mattered = False
        """Whether the GPU's architecture decided which kernels some of the calls are of."""
        self._calls: dict[Key, Call] = {}
        # What has no fake kernel is run on zeros, which only the CPU can do here.
        self._modes = {
            kind: _FakeMode(static_shapes=True, allow_fallback_kernels=kind == "cpu")
            for kind in ("cpu", device)
        }

    def look_up(self, key: Key) -> Call | None:
        """Return the remembered call, if it was asked before."""
        return self._calls.get(key)

    def ask(
        self,
        func: OpOverload,
        key: Key,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        kernel: Callable[..., Any] | None = None,
    ) -> Call:
        """Find out what the call returns, and remember it. Raises what the real call would raise."""
        operator = describe(func)
        if operator.mutated and not operator.returned:
            # An optimizer's in-place operator over a list of tensors: it returns nothing.
            return self.without_results(operator, key)
        # Where there is no fake kernel for a GPU, the CPU's has to tell.
        for device in dict.fromkeys((self._device, "cpu")):
            fakes: list[torch.Tensor] = []
            # Without torch's log of a traceback for a user's shape error; the user gets their own.
            mode = self._modes[device]
            # torch remembers answers for all modes; other makers of GPUs lay out convolutions differently.
            remembers = mode.cache_enabled and func not in _BY_MAKER
            with mode, while_set(mode, "cache_enabled", remembers), while_set(_LOGGER, "disabled", True):
                fake_args = [_fake(value, device, fakes) for value in args]
                fake_kwargs = {name: _fake(value, device, fakes) for name, value in kwargs.items()}
                try:
                    result = (kernel or OWN_KERNELS.get(func, func))(*fake_args, **fake_kwargs)
                except Exception as error:
                    if not _says_no_fake_kernel(error):
                        raise
                else:
                    return self.remember(describe_call(func, key, fakes, result))
        return self.remember(self._ask_real_kernel(func, key, args, kwargs))

    def _ask_real_kernel(
        self, func: OpOverload, key: Key, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Call:
        """Run an operator that has no fake kernel (a user's own) once, on zeros of the same shapes."""
        made: list[torch.Tensor] = []

        def zeros(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if value.numel() * value.element_size() > _LARGEST_REAL_BYTES:
                raise CaptureError(f"{func} has no fake kernel, and is too large here to be run on zeros.")
            made.append(torch.zeros_like(value))
            return made[-1]

        try:
            real_args, real_kwargs = tree_map(zeros, (list(args), kwargs))
            result = func(*real_args, **real_kwargs)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise CaptureError(
                f"{func} has no fake kernel, and cannot be run on zeros to see what it returns ({error}); "
                "register one with torch.library.register_fake."
            ) from error
        return describe_call(func, key, made, result)

    def correct(self, call: Call, real: Sequence[ResultLayout]) -> bool:
        """Take over strides and storages of the real kernel's results; return whether anything was different.

        Strides may differ from the fake kernel's, and a small result may lie over a large storage (a loss
        that is reduced into the memory of its terms).
        """
        expected = list(_new_tensors(call.outputs))
        if len(expected) != len(real) or all(map(_lies_like, expected, real)):
            return False
        layouts = iter(real)
        call.outputs = tuple(_relaid(output, layouts) for output in call.outputs)
        return True

    def without_results(self, operator: Operator, key: Key, workspace_bytes: int | None = None) -> Call:
        """Return the call of what makes no tensors by itself, or whose results are made elsewhere."""
        return self.look_up(key) or self.remember(Call(operator, key, (), True, workspace_bytes))

    def remember(self, call: Call) -> Call:
        """Keep a call for the next time, and return it."""
        self._calls[call.key] = call
        return call


def _fake(value: Any, device: str, fakes: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        place = own_device() if device == "cuda" else device
        fakes.append(torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=place))
        return fakes[-1]
    if isinstance(value, list | tuple):
        return type(value)(_fake(item, device, fakes) for item in value)
    return value


def describe_call(func: OpOverload, key: Key, inputs: Sequence[torch.Tensor], result: Any) -> Call:
    """Describe a call by what it returned, for inputs and results that are fake or real."""
    storages = {tensor.untyped_storage()._cdata: number for number, tensor in enumerate(inputs)}
    groups: dict[int, int] = {}
    single = not isinstance(result, tuple)
    outputs = tuple(_output(value, storages, groups) for value in ((result,) if single else result))
    return Call(describe(func), key, outputs, single)


def _output(value: Any, storages: dict[int, int], groups: dict[int, int]) -> Any:
    # Not a closure in `describe_call`: a function that refers to itself is a reference cycle, and would
    # keep tensors alive.
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            raise CaptureError(
                f"{user_line()} makes a nested tensor of the strided layout (attention over a jagged one "
                "does so on a CPU); capture cannot follow it. Capture for a GPU, or use padded tensors."
            )
        storage = value.untyped_storage()
        layout = (value.dtype, value.shape, value.stride(), int(value.storage_offset()))
        if storage._cdata in storages:
            return InputAlias(storages[storage._cdata], *layout)
        group = groups.setdefault(storage._cdata, len(groups))
        return NewTensor(*layout, storage.nbytes(), group)
    if isinstance(value, list | tuple):
        return [_output(item, storages, groups) for item in value]
    return value


def differs(outputs: Any, result: Any) -> bool:
    """Whether a kernel returned other tensors than were described, or none at all.

    They differ in dtype or shape; numbers with a fraction also in how they lie in memory, which a program
    decides nothing by, but which later operators pay for.
    """
    if isinstance(outputs, NewTensor | InputAlias):
        if result is None or (outputs.dtype, outputs.size) != (result.dtype, result.shape):
            return True
        return outputs.dtype.is_floating_point and _steps(outputs.stride, outputs.size) != _steps(
            result.stride(), result.shape
        )
    if isinstance(outputs, list | tuple):
        return any(map(differs, outputs, result))
    return False


def _steps(stride: Sequence[int], size: torch.Size) -> list[int]:
    """Return the strides that matter: those of dimensions with more than one element."""
    return [step for step, length in zip(stride, size) if length > 1]


def _new_tensors(outputs: Sequence[Any]) -> Iterator[NewTensor]:
    for output in outputs:
        if isinstance(output, NewTensor):
            yield output
        elif isinstance(output, list):
            yield from _new_tensors(output)


def _lies_like(output: NewTensor, real: ResultLayout) -> bool:
    same_place = (output.size, output.stride, output.offset) == (real.size, real.stride, real.offset)
    return same_place and output.storage_bytes == real.storage_bytes


def _relaid(output: Any, layouts: Iterator[ResultLayout]) -> Any:
    if isinstance(output, NewTensor):
        real = next(layouts)
        size = torch.Size(real.size)
        return NewTensor(output.dtype, size, real.stride, real.offset, real.storage_bytes, real.group)
    if isinstance(output, list):
        return [_relaid(item, layouts) for item in output]
    return output
