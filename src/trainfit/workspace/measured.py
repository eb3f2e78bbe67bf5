"""Measure workspaces on this machine: run each operator once and read the profiler's allocation events."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from trainfit.basics.doing import counted, doing
from trainfit.devices.measured_cache import Machine, MeasuredCache
from trainfit.operators.families import ATTENTION, CONVOLUTIONS, MATRIX_PRODUCTS, RECURRENT
from trainfit.traces.trace import Signature, Trace
from trainfit.workspace.conditions import this_processor
from trainfit.workspace.made_up_arguments import CannotRunAlone, find_operator, make_arguments
from trainfit.workspace.processor_faults import kernels_die, products_by_dtype, refuse_faulty
from trainfit.workspace.profiler import AllocationLog, profile_allocations
from trainfit.workspace.remembered import Measured, ResultLayout, decisive, recall, remember


@dataclass(frozen=True)
class Limits:
    """Up to which size an operator is run, only to look at its memory."""

    nbytes: int
    products: float
    """Multiply-adds of matrix products and attention, whose workspaces are small."""
    convolutions: float
    """Multiply-adds of convolutions and recurrent layers, whose workspaces are large."""


QUICK = Limits(nbytes=64 << 20, products=1e9, convolutions=4e10)
"""A few seconds at most, whatever the model: for estimates."""
THOROUGH = Limits(nbytes=4 << 30, products=1e12, convolutions=1e12)
"""About as long as a real step: for verification, which runs one anyway."""


_OURS = "aten."
"""Only torch's own operators are run: what others do may change from one process to the next."""
_FOR_GOOD = (CannotRunAlone, ValueError, IndexError, TypeError, NotImplementedError)
"""Failures that come again with the same arguments. Other errors may be for want of memory."""

_known: dict[Machine, dict[Signature, Measured | None]] = {}


def measure_operators(signatures: Sequence[Signature], limits: Limits) -> list[Measured | None]:
    """Measure each signature on this machine's CPU; None where it is too large or cannot be run alone.

    What was measured before, by any process and within any limits, is not run again. Refuses operators that
    this processor cannot run, also where nothing has to be measured: the step cannot run either.
    """
    refuse_faulty(signatures)
    machine = this_processor()
    known = _known.setdefault(machine, {})
    operators = [decisive(signature) for signature in signatures]
    unknown = [o for o in dict.fromkeys(operators) if o not in known and o.name.startswith(_OURS)]
    if unknown:
        with MeasuredCache(machine) as cache:
            known |= recall(cache, unknown)
            missing = [o for o in unknown if o not in known and _within(o, limits)]
            if missing:
                measured = _measure(missing)
                remember(cache, measured)
                known |= measured
    return [known.get(operator) for operator in operators]


def _measure(operators: Sequence[Signature]) -> dict[Signature, Measured | None]:
    """Run each operator once; what failed for reasons that may pass is left out."""
    measured: dict[Signature, Measured | None] = {}
    doing(f"measuring the memory of {len(operators)} kernels")
    ran: dict[Signature, tuple[ResultLayout, ...] | Exception] = {}
    with profile_allocations() as log, counted(lambda: len(ran), len(operators), "kernels"):
        for number, operator in enumerate(operators):
            ran[operator] = _run(operator, str(number), log)
    for number, (operator, results) in enumerate(ran.items()):
        if isinstance(results, tuple):
            measured[operator] = Measured(_workspace(log, str(number)), results)
        elif isinstance(results, _FOR_GOOD):
            measured[operator] = None
    return measured


def run_for_workspace(function: Any, positional: Sequence[Any], keyword: dict[str, Any]) -> int | None:
    """Run an operator on given arguments for the bytes that its kernel takes beyond its results.

    None while the step itself is being profiled: there is one profiler only.
    """
    if torch._C._autograd._profiler_enabled():
        return None
    with profile_allocations() as log, torch.no_grad(), log.range("operator"):
        result = function(*positional, **keyword)
    del result
    return _workspace(log, "operator")


def affordable(trace: Trace, limits: Limits) -> bool:
    """Whether the whole step may be run, only to look at its memory: about as long as its operators alone."""
    if any(map(kernels_die, products_by_dtype(trace.signatures))):
        return False
    products = (trace.signatures[op.signature] for op in trace.ops)
    work = sum(_multiply_adds(signature) for signature in products if _is_product(signature))
    return (trace.observed_peak_bytes or 0) <= limits.nbytes and work <= limits.convolutions


def _within(signature: Signature, limits: Limits) -> bool:
    if _is_convolution(signature):
        return _multiply_adds(signature) <= limits.convolutions
    specs = (*signature.inputs, *signature.outputs)
    nbytes = sum(math.prod(spec.shape) * getattr(torch, spec.dtype).itemsize for spec in specs)
    if nbytes > limits.nbytes:
        return False
    return not _is_product(signature) or _multiply_adds(signature) <= limits.products


def _is_convolution(signature: Signature) -> bool:
    """Whether it is a convolution or a recurrent layer, whose workspaces are large."""
    return signature.name in CONVOLUTIONS | RECURRENT


def _is_product(signature: Signature) -> bool:
    return _is_convolution(signature) or signature.name in MATRIX_PRODUCTS | ATTENTION


def _multiply_adds(signature: Signature) -> float:
    """Return the multiply-adds of a product, or a figure of that order for convolutions and attention."""
    sizes = sorted((math.prod(spec.shape) for spec in signature.inputs), reverse=True)[:2]
    outputs = sum(math.prod(spec.shape) for spec in signature.outputs)
    # For a matrix product this is exactly m * n * k.
    return math.sqrt(math.prod(float(size) for size in sizes) * outputs)


def _run(operator: Signature, name: str, log: AllocationLog) -> tuple[ResultLayout, ...] | Exception:
    """Run the operator once, in a range of this name; return how its results lie, or why it failed."""
    try:
        function = find_operator(operator.name)
        positional, keyword = make_arguments(operator)
        # Some kernels keep state for backward only while gradients are recorded (recurrent layers).
        recording = "backward" not in operator.name
        with torch.set_grad_enabled(recording), log.range(name):
            result: Any = function(*positional, **keyword)
    except (CannotRunAlone, RuntimeError, ValueError, IndexError, TypeError) as error:
        # An operator that does not accept made-up inputs is listed by the caller as not measured.
        return error.with_traceback(None)
    inputs = {tensor.untyped_storage()._cdata for tensor in _tensors((positional, keyword))}
    groups: dict[int, int] = {}
    layouts: list[ResultLayout] = []
    for tensor in _tensors(result):
        storage = tensor.untyped_storage()
        if storage._cdata not in inputs:
            group = groups.setdefault(storage._cdata, len(groups))
            layouts.append(
                ResultLayout(
                    tensor.shape, tensor.stride(), int(tensor.storage_offset()), storage.nbytes(), group
                )
            )
    return tuple(layouts)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _workspace(log: AllocationLog, name: str) -> int:
    usage = log.usage(name)
    return max(usage.peak_bytes - usage.end_bytes, 0)
