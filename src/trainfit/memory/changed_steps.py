"""The step with half of its batch, or in 16 bits, derived from its trace instead of captured.

Half a batch halves what is made of the batch: everything that forward and backward make but gradients of
parameters, and what is added to them or becomes them. Workspaces of kernels are halved too, and do not quite
follow: that is where the figure is some percent off. Ops, their order and lifetimes stay.

In 16 bits every float32 value takes half, and casts to 16 bits are not needed. What the model itself casts to
float32 is not in a trace in which everything is float32, and kernels may be others: so this is a rough
figure, and mostly too low. Where the step can be captured in 16 bits, that says what is left.
"""

from __future__ import annotations

import math
from dataclasses import replace

from trainfit.traces.trace import Signature, TensorSpec, Trace

_OF_PARAMETERS = ("parameter", "buffer", "gradient", "optimizer_state", "communication")
_CASTS = ("aten._to_copy.default",)
_ADDS_OR_COPIES = (
    *_CASTS,
    *("aten.add.Tensor", "aten.add_.Tensor", "aten.copy_.default", "aten.clone.default"),
)
_SIXTEEN = "bfloat16"
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def storages_of_batch(trace: Trace) -> frozenset[int]:
    """Return the storages whose bytes are as many as there are samples."""
    on_their_way = _to_be_gradients(trace)
    return frozenset(
        number
        for number, storage in enumerate(trace.storages)
        if storage.category not in _OF_PARAMETERS
        and number not in on_their_way
        and not (storage.producer >= 0 and trace.ops[storage.producer].phase == "optimizer")
    )


def _to_be_gradients(trace: Trace) -> set[int]:
    """Return what is added to a gradient, or copied to be one: it has the size of a parameter."""
    return {
        storage
        for number, op in enumerate(trace.ops)
        if trace.op_name(number) in _ADDS_OR_COPIES
        and any(trace.storages[made].category == "gradient" for made in (*op.creates, *op.writes))
        for storage in op.reads
    }


def with_half_batch(trace: Trace) -> Trace:
    """Return the trace with half of the batch; of an odd one, the smaller half."""
    batch = trace.settings.batch or 2
    of_batch = storages_of_batch(trace)
    storages = tuple(
        replace(one, bytes=one.bytes * (batch // 2) // batch) if number in of_batch else one
        for number, one in enumerate(trace.storages)
    )
    of_optimizer = {op.signature for op in trace.ops if op.phase == "optimizer"}
    signatures = tuple(
        one
        if number in of_optimizer
        else replace(one, workspace_bytes=one.workspace_bytes * (batch // 2) // batch)
        for number, one in enumerate(trace.signatures)
    )
    return replace(trace, storages=storages, signatures=signatures, observed_peak_bytes=None)


def in_sixteen_bits(trace: Trace) -> Trace:
    """Return the trace with 16 bits for each 32 of floating point, and without casts to 16 bits."""
    storages = list(trace.storages)
    for number, storage in enumerate(trace.storages):
        name, dtype = _made_by(trace, number)
        if dtype == "float32":
            storages[number] = replace(storage, bytes=storage.bytes // 2)
        elif dtype in _BYTES and name in _CASTS:
            storages[number] = replace(storage, bytes=0)
    signatures = tuple(map(_in_sixteen_bits, trace.signatures))
    return replace(trace, storages=tuple(storages), signatures=signatures, observed_peak_bytes=None)


def _made_by(trace: Trace, number: int) -> tuple[str, str]:
    """Return the operator that made a storage, and the dtype of what is in it."""
    storage = trace.storages[number]
    if storage.producer < 0:
        return "", "float32"
    signature = trace.signatures[trace.ops[storage.producer].signature]
    for spec in signature.outputs:
        if _bytes(spec) == storage.bytes:
            return signature.name, spec.dtype
    # What is padded or laid out with gaps has another size than its values.
    return signature.name, signature.outputs[0].dtype if signature.outputs else "float32"


def _bytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * _BYTES.get(spec.dtype, 0)


def _in_sixteen_bits(signature: Signature) -> Signature:
    specs = (*signature.inputs, *signature.outputs)
    before = sum(map(_bytes, specs))
    halved = before - sum(_bytes(spec) // 2 for spec in specs if spec.dtype == "float32")
    return replace(
        signature,
        inputs=tuple(map(_narrow, signature.inputs)),
        outputs=tuple(map(_narrow, signature.outputs)),
        moved_bytes=round(signature.moved_bytes * halved / before) if before else signature.moved_bytes,
        workspace_bytes=signature.workspace_bytes // 2,
    )


def _narrow(spec: TensorSpec) -> TensorSpec:
    return replace(spec, dtype=_SIXTEEN) if spec.dtype == "float32" else spec
