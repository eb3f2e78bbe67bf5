"""Take tensors and NumPy arrays apart that are more than one block of numbers."""

from __future__ import annotations

import sys
from typing import Any

import numpy
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from trainfit.comparing.kinds import Kind, Parts, Unknown, attributes_of, type_name

_PADDED = "gG"
"""NumPy's long doubles: some of their bits mean nothing."""
_OWN_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    numpy.ma.MaskedArray: (
        *("_fill_value", "_hardmask", "_sharedmask", "_isfield", "_baseclass", "_basedict", "_mask"),
    ),
    numpy.matrix: ("_getitem",),
    numpy.memmap: ("_mmap", "filename", "offset", "mode"),
}
"""Where NumPy's own classes keep what their values say as well, or where those came from."""


def tensor_parts(tensor: torch.Tensor) -> tuple[Any, Parts]:
    """Return the elements of a tensor, or what it is if they are not in one block; and what else it has."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    detached = tensor.detach()
    inner = _inner(detached)
    if inner is not None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        layout = str(tensor.layout).removeprefix("torch.")
        nested = "nested " if tensor.is_nested else ""
        shape = "ragged" if tensor.is_nested else str(list(tensor.shape))
        own = "" if plain else f"{type_name(tensor)}: "
        return Kind(f"{own}{nested}{layout} {dtype} of shape {shape}"), [*inner, *_carried(tensor, inner)]
    values = detached.as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    if not plain:
        return Kind(type_name(tensor)), [(" as Tensor", values), *_carried(tensor, [])]
    if values.is_meta:
        return Unknown(f"a tensor without memory, {tensor.dtype} {list(tensor.shape)}"), _carried(tensor, [])
    return values, _carried(tensor, [])


def _carried(tensor: torch.Tensor, inner: Parts) -> Parts:
    """Return what a tensor has besides its elements: attributes, and the gradient if nobody else has it."""
    if is_traceable_wrapper_subclass(tensor) and type(tensor).__module__.startswith("torch."):
        # Its attributes are its parts, and bookkeeping such as symbols that are others for each tensor.
        return []
    found = attributes_of(tensor, {name.removeprefix(".") for name, _ in inner})
    # Those of parameters are compared as gradients.
    if not isinstance(tensor, torch.nn.Parameter) and (tensor.is_leaf or tensor.retains_grad):
        found += [] if tensor.grad is None else [(".grad", tensor.grad)]
    return found


def _inner(tensor: torch.Tensor) -> Parts | None:
    """Return what a tensor is made of whose elements do not lie in one block; None if they do."""
    if _is_distributed(tensor):
        # The part that this process has, and how the whole is divided, in words.
        whole: Any = tensor
        described = [(".placements", str(whole.placements)), (".device_mesh", str(whole.device_mesh))]
        return [(".local", whole.to_local()), *described]
    if is_traceable_wrapper_subclass(tensor):
        names, context = tensor.__tensor_flatten__()
        return [*((f".{name}", getattr(tensor, name)) for name in names), (".context", context)]
    if tensor.is_nested:
        return [(f"[{number}]", part) for number, part in enumerate(tensor.unbind())]
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return [(".indices", tensor.indices()), (".values", tensor.values())]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        compressed = [(".pointers", tensor.crow_indices()), (".indices", tensor.col_indices())]
        return [*compressed, (".values", tensor.values())]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        compressed = [(".pointers", tensor.ccol_indices()), (".indices", tensor.row_indices())]
        return [*compressed, (".values", tensor.values())]
    if tensor.layout is not torch.strided:
        return [(".dense", tensor.to_dense())]
    return _quantised(tensor) if tensor.is_quantized else None


def _is_distributed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is divided among processes; without loading what nobody has used."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def _quantised(tensor: torch.Tensor) -> Parts:
    # The same numbers may be written with another scale.
    found: Parts = [(".dequantized", tensor.dequantize()), (".qscheme", str(tensor.qscheme()))]
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return [*found, (".scale", tensor.q_scale()), (".zero_point", tensor.q_zero_point())]
    return [
        *found,
        (".scales", tensor.q_per_channel_scales()),
        (".zero_points", tensor.q_per_channel_zero_points()),
        (".axis", tensor.q_per_channel_axis()),
    ]


def array_parts(array: Any) -> tuple[Any, Parts]:
    """Return a NumPy array or number, or what it is and its fields, objects or mask if it has such."""
    own = [name for kind, names in _OWN_ATTRIBUTES.items() if isinstance(array, kind) for name in names]
    attributes = attributes_of(array, own)
    if isinstance(array, numpy.ma.MaskedArray):
        inner = [(".data", array.data), (".mask", numpy.ma.getmaskarray(array))]
        return Kind(type_name(array)), [*inner, (".fill_value", array.fill_value), *attributes]
    is_number = isinstance(array, numpy.generic)
    if not is_number and type(array) is not numpy.ndarray:
        return Kind(type_name(array)), [(" as array", numpy.asarray(array)), *attributes]
    what = type_name(array) if is_number else "array"
    inner = [(f"[{name!r}]", array[name]) for name in array.dtype.names or ()]
    if array.dtype.hasobject and not inner:
        inner = [(f".flat[{number}]", part) for number, part in enumerate(array.flat)]
    if array.dtype.hasobject or inner:
        return Kind(f"{what} of {array.dtype} and shape {list(array.shape)}"), inner + attributes
    if array.dtype.char in _PADDED:
        return Unknown(f"{what} of {array.dtype}"), attributes
    return array, attributes
