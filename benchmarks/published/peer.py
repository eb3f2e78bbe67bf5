"""The same traces priced by the roofline of torch's own `RuntimeEstimator`, with the same datasheet figures.

`RuntimeEstimator` asks the driver for the speed of the GPU and works on tensors of that GPU, so it cannot run
here as it is. What it computes per operator is in two functions of torch (`get_compute_time`,
`get_transfer_time`); they are called here on every operator of the trace, with tensors of the recorded
metadata, and told what the device table says. Where they would raise (a fused attention whose results have
two dtypes is one case), they get the dtype of the first result.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch.utils import _runtime_estimation as roofline

from trainfit.traces import arguments
from trainfit.traces.trace import Signature, TensorSpec, Trace

from .rows import Row


def peer_seconds(row: Row, trace: Trace) -> float:
    """Return the sum that torch's roofline makes of the step of a row."""
    device = row.device
    assert device.bandwidth_bytes_per_second is not None
    gigabytes = device.bandwidth_bytes_per_second / 1e9

    def teraflops(dtype: torch.dtype) -> float:
        name = str(dtype).removeprefix("torch.")
        return device.flops[device.rate_of(name, trace.tf32)] / 1e12

    with (
        mock.patch.object(roofline, "get_device_tflops", teraflops),
        mock.patch.object(roofline, "get_gpu_dram_gbps", lambda: gigabytes),
    ):
        seconds = [_operator_seconds(signature) for signature in trace.signatures]
    step = sum(seconds[op.signature] for op in trace.ops)
    grad_accum: int = row.data["config"].get("grad_accum", 1)
    return step * grad_accum


def _operator_seconds(signature: Signature) -> float:
    namespace, _, rest = signature.name.partition(".")
    packet = getattr(getattr(torch.ops, namespace), rest.rpartition(".")[0], None)
    if packet is None or packet in roofline._IGNORE_OPS:
        return 0.0
    inputs = [_meta(spec) for spec in signature.inputs]
    outputs = [_meta(spec) for spec in signature.outputs]
    positional, keyword = arguments.decode(signature.arguments)
    floats = [tensor.dtype for tensor in outputs if tensor.dtype in roofline._FLOAT_TYPES]
    compute = 0.0
    if floats:
        compute = roofline.get_compute_time(
            packet,
            [_filled(value, inputs) for value in positional],
            {name: _filled(value, inputs) for name, value in keyword.items()},
            _results(signature, positional, outputs),
            {floats[0]},
        )
    nanoseconds: float = max(compute, roofline.get_transfer_time(inputs, outputs))
    return nanoseconds / 1e9


def _results(signature: Signature, positional: list[Any], outputs: list[torch.Tensor]) -> Any:
    """Return the results as the operator does: a convolution's backward leaves out what was not asked for."""
    if signature.name == "aten.convolution_backward.default":
        given = iter(outputs)
        return tuple(next(given) if asked else None for asked in positional[10])
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _meta(spec: TensorSpec) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype)
    if len(spec.stride) != len(spec.shape):
        return torch.empty(spec.shape, dtype=dtype, device="meta")
    return torch.empty_strided(spec.shape, spec.stride, dtype=dtype, device="meta")


def _filled(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a recorded argument with the tensors that it refers to."""
    if isinstance(value, list):
        return [_filled(item, tensors) for item in value]
    if isinstance(value, dict) and "tensor" in value:
        return tensors[value["tensor"]]
    return value
