"""What the nodes of an FX graph cost: seconds by the roofline, and the bytes that kernels need inside.

A node becomes a `Signature`, as an op of a captured step has one, and is priced like it. Sizes that are
symbols count with the values that the graph was traced with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes

from trainfit.capturing.schemas import describe
from trainfit.costs.constants import constants_of
from trainfit.costs.roofline import Roofline
from trainfit.costs.this_machine import with_speed
from trainfit.devices.device_table import Device
from trainfit.operators.families import ATTENTION, CONVOLUTIONS, MATRIX_PRODUCTS, RECURRENT
from trainfit.operators.work import with_work
from trainfit.traces import arguments
from trainfit.traces.trace import Signature, TensorSpec
from trainfit.workspace.measured import QUICK, measure_operators

_MEASURED = ATTENTION | CONVOLUTIONS | MATRIX_PRODUCTS | RECURRENT
"""Whose kernels compiled code calls, and which may need memory inside."""


def hint(size: Any) -> int:
    """Return a size as a number; of a symbol the value it was traced with."""
    if isinstance(size, int):
        return size
    found = getattr(size.node, "hint", None)
    return 0 if found is None else int(found)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a node's `meta["val"]`."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)


class NodeCosts:
    """Prices nodes for one device; what was priced once is remembered."""

    def __init__(self, device: Device) -> None:
        """Take the device's speed; this machine's own processor is measured if that never was done."""
        self.device = device
        if device.kind == "cpu" and not (
            device.bandwidth_bytes_per_second and device.flops and device.sm_count
        ):
            with _disable_current_modes():
                device, _ = with_speed(device)
        self._roofline = Roofline(device, constants_of(device))
        self._seconds: dict[Signature, float] = {}

    def seconds(self, signature: Signature | None) -> float:
        """Return what one call takes; nothing for what is no operator of torch's."""
        if signature is None:
            return 0.0
        if signature not in self._seconds:
            self._seconds[signature] = self._roofline.price(signature).seconds
        return self._seconds[signature]

    def workspaces(self, nodes: Iterable[Node], *, fuses: bool) -> dict[Node, int]:
        """Return the bytes that kernels allocate inside, where they were measured on this processor.

        A compiler that fuses calls few of torch's kernels.
        """
        if self.device.kind != "cpu":
            return {}
        called = [node for node in nodes if not fuses or _name(node) in _MEASURED]
        return self.workspaces_of({node: signature_of_node(node) for node in called}, fuses=fuses)

    def workspaces_of(self, calls: Mapping[Node, Signature | None], *, fuses: bool) -> dict[Node, int]:
        """Return the same of nodes whose calls are known as data."""
        if self.device.kind != "cpu":
            return {}
        known = [
            (node, signature)
            for node, signature in calls.items()
            if signature and not signature.view and (not fuses or _name(node) in _MEASURED)
        ]
        with _disable_current_modes(), torch._C._DisableTorchDispatch():
            measured = measure_operators([signature for _, signature in known], QUICK)
        return {
            node: result.workspace_bytes
            for (node, _), result in zip(known, measured)
            if result is not None and result.workspace_bytes
        }


def _name(node: Node) -> str:
    return str(node.target) if isinstance(node.target, torch._ops.OpOverload) else ""


def signature_of_node(node: Node) -> Signature | None:
    """Write the call of a node as plain data; None if it calls no operator."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    operator = describe(node.target)
    inputs: list[TensorSpec] = []
    positional = [_argument(value, inputs) for value in node.args]
    keyword = {name: _argument(value, inputs) for name, value in node.kwargs.items()}
    signature = Signature(
        name=operator.name,
        inputs=tuple(inputs),
        outputs=tuple(_spec(tensor) for tensor in tensors_in(node.meta.get("val"))),
        arguments=arguments.encode(positional, keyword),
        view=operator.is_view,
        in_place=bool(operator.mutated),
        random=operator.random,
    )
    return with_work(signature, ())


def _spec(tensor: torch.Tensor) -> TensorSpec:
    strided = tensor.layout == torch.strided
    stride = tuple(hint(size) for size in tensor.stride()) if strided else ()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(dtype, tuple(hint(size) for size in tensor.shape), stride)


def _argument(value: Any, inputs: list[TensorSpec]) -> Any:
    if isinstance(value, Node):
        known = value.meta.get("val")
        if isinstance(known, torch.Tensor):
            inputs.append(_spec(known))
            return {"tensor": len(inputs) - 1}
        if isinstance(known, torch.SymInt):
            return hint(known)
        return {"other": type(known).__name__}
    if isinstance(value, tuple | list):
        return [_argument(item, inputs) for item in value]
    for kind in ("dtype", "layout", "memory_format", "device"):
        if isinstance(value, getattr(torch, kind)):
            return {kind: str(value).removeprefix("torch.")}
    if isinstance(value, torch.SymInt):
        return hint(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float | complex):
        return arguments.encode_number(value)
    return {"other": repr(value)}
