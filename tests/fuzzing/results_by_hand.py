"""What a step made, as bytes, without the code that is checked: a second way to say what is equal.

NaN is the one thing with many bit patterns: all of them are written as the same bytes.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import Any

import numpy
import torch

from trainfit.capturing.random_stream import seeded

Bytes = dict[str, bytes]


def bytes_of_step(build: Callable[[], Any], steps: int = 1) -> Bytes:
    """Run a step so often from the same seed; return the last one's result, gradients and state."""
    gradients: Bytes = {}
    with seeded():
        step = build()
        named = dict(step.model.named_parameters())
        for name, parameter in named.items():
            if parameter.requires_grad:
                keep = functools.partial(_keep, gradients, f"gradient of {name}")
                parameter.register_post_accumulate_grad_hook(keep)
        for _ in range(steps):
            gradients.clear()
            result = bytes_of(step.run())
    state = {**named, **dict(step.model.named_buffers())}
    found = {f"state of {name}": bytes_of(tensor) for name, tensor in state.items()}
    return {"result": result} | gradients | found


def _keep(gradients: Bytes, name: str, parameter: torch.Tensor) -> None:
    gradients[name] = bytes_of(parameter.grad)


def same_bytes(first: Bytes, second: Bytes) -> bool:
    """Whether two runs made the same."""
    return first == second


def bytes_of(value: Any) -> bytes:
    """Write a value down so that two values have the same bytes if and only if they are the same."""
    if isinstance(value, torch.Tensor):
        return _bytes_of_tensor(value.detach())
    if isinstance(value, float):
        return b"nan" if value != value else b"float" + struct.pack("<d", value)
    if isinstance(value, complex):
        return b"complex" + bytes_of(value.real) + b"," + bytes_of(value.imag)
    if isinstance(value, numpy.ndarray):
        return b"array" + _bytes_of_tensor(torch.from_numpy(value.copy()))
    if isinstance(value, dict):
        entries = sorted((repr(key), bytes_of(held)) for key, held in value.items())
        return b"dict" + b"".join(_framed(key.encode()) + _framed(held) for key, held in entries)
    if isinstance(value, list | tuple):
        return type(value).__name__.encode() + b"".join(_framed(bytes_of(part)) for part in value)
    assert value is None or isinstance(value, bool | int | str | bytes), type(value)
    return f"{type(value).__name__} {value!r}".encode()


def _framed(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def _bytes_of_tensor(tensor: torch.Tensor) -> bytes:
    if tensor.is_sparse:
        tensor = tensor.coalesce()
        return b"sparse" + _framed(bytes_of(tensor.indices())) + _framed(bytes_of(tensor.values()))
    head = f"{tensor.dtype} {list(tensor.shape)} ".encode()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.contiguous().reshape(-1)
    if not flat.numel():
        return head
    data = flat.view(torch.uint8).numpy().tobytes()
    if not flat.is_floating_point():
        return head + data
    size = flat.element_size()
    missing = flat.to(torch.float64).isnan().tolist()
    elements = (data[place : place + size] for place in range(0, len(data), size))
    return head + b"".join((b"n" if nan else b"x" + element) for nan, element in zip(missing, elements))
