"""Count the FLOPs and bytes of every operator of a trace, once per signature.

torch's own registry of FLOP formulas goes first: it also holds what users have registered for operators of
their own. What it does not know, `trainfit.operators` does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from trainfit.capturing.schemas import Operator, describe
from trainfit.operators.families import FUSED_OPTIMIZERS
from trainfit.operators.work import with_work
from trainfit.traces import arguments
from trainfit.traces.trace import Signature, Trace


def counted(trace: Trace) -> Trace:
    """Return the trace with the work of every signature."""
    return replace(trace, signatures=tuple(_counted(signature) for signature in trace.signatures))


def _counted(signature: Signature) -> Signature:
    overload = _find(signature.name)
    if overload is None:
        return with_work(signature, ())
    operator = describe(overload)
    found = with_work(signature, _written(signature, operator), operator.overwrites_first)
    flops = _registered_flops(overload.overloadpacket, signature)
    return found if flops is None else replace(found, flops=flops, work_source="registry")


def _find(name: str) -> Any:
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.rpartition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except AttributeError:
        return None  # not an operator: memory that Python code takes by itself


def _written(signature: Signature, operator: Operator) -> tuple[int, ...]:
    """Return the numbers of the inputs that the operator changes."""
    positional, keyword = arguments.decode(signature.arguments)
    # Fused optimizers may write the gradients too, but do so only to undo a loss scale.
    scaled = keyword.get("grad_scale")
    untouched = 1 if signature.name in FUSED_OPTIMIZERS and not scaled else None
    places = [
        keyword.get(where) if isinstance(where, str) else positional[where]
        for where in operator.mutated
        if isinstance(where, str) or (where < len(positional) and where != untouched)
    ]
    return tuple(_tensor_numbers(places))


def _tensor_numbers(value: Any) -> list[int]:
    if isinstance(value, list):
        return [number for item in value for number in _tensor_numbers(item)]
    return [value["tensor"]] if isinstance(value, dict) and "tensor" in value else []


def _registered_flops(packet: Any, signature: Signature) -> int | None:
    formula = flop_registry.get(packet)
    positional, keyword = arguments.decode(signature.arguments)
    # The registry of torch 2.13 counts the weight gradient of a grouped convolution once per group.
    in_groups = packet is torch.ops.aten.convolution_backward and positional[9] != 1
    if formula is None or in_groups:
        return None
    outputs = [torch.Size(spec.shape) for spec in signature.outputs]
    try:
        flops = formula(
            *(_shapes(value, signature) for value in positional),
            **{name: _shapes(value, signature) for name, value in keyword.items()},
            out_val=outputs[0] if len(outputs) == 1 else tuple(outputs),
        )
    except Exception:
        # A formula that does not expect these arguments, such as grouped heads in attention.
        return None
    return flops if type(flops) is int and flops >= 0 else None


def _shapes(value: Any, signature: Signature) -> Any:
    """Return an argument as the registry wants it: the shape instead of the tensor."""
    if isinstance(value, list):
        return [_shapes(item, signature) for item in value]
    if isinstance(value, dict) and "tensor" in value:
        return torch.Size(signature.inputs[value["tensor"]].shape)
    return value
