"""A trace with the workspaces of a GPU's kernels, and what a reader of its figures has to know about them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainfit.basics.units import format_bytes
from trainfit.devices.device_table import ANY_GPU, Device
from trainfit.operators.names import is_operator
from trainfit.traces.assumptions import Assumption
from trainfit.traces.simulate import simulate
from trainfit.traces.trace import Signature, Trace
from trainfit.workspace.formulas import gpu_workspace, has_formula
from trainfit.workspace.kernel_workspace import KernelWorkspace

_KNOWN_NAMESPACES = ("aten.", "prims.", "c10d.", "_c10d_functional.", "_dtensor.")
"""Whose kernels are torch's own."""


def with_gpu_workspaces(trace: Trace, device: Device = ANY_GPU) -> Trace:
    """Return the trace with the workspaces of a GPU's kernels, from formulas, in place of those it had."""
    on_device = {op.signature for op in trace.ops if op.reads or op.writes or op.creates}
    found = [
        _workspace(signature, trace, device) if number in on_device else KernelWorkspace(0, 0)
        for number, signature in enumerate(trace.signatures)
    ]
    pairs = tuple(zip(trace.signatures, found))
    signatures = tuple(_filled(signature, one) for signature, one in pairs)
    others = tuple(one for one in trace.assumptions if one.kind != "workspace")
    likely = replace(trace, signatures=signatures, assumptions=others)
    return replace(likely, assumptions=others + tuple(_said(likely, tuple(found))))


def _workspace(signature: Signature, trace: Trace, device: Device) -> KernelWorkspace | None:
    if signature.view or not is_operator(signature.name):
        return KernelWorkspace(signature.workspace_bytes, signature.workspace_bytes)
    if signature.collective is None and not signature.name.startswith(_KNOWN_NAMESPACES):
        return None
    return gpu_workspace(signature, device, "convolution" in trace.tf32)


def _filled(signature: Signature, found: KernelWorkspace | None) -> Signature:
    if signature.view or not is_operator(signature.name):
        return signature
    if found is None:
        return replace(signature, workspace_bytes=0, workspace_source="unknown")
    source = "formula" if has_formula(signature) else "none"
    return replace(signature, workspace_bytes=found.likely_bytes, workspace_source=source)


def _said(trace: Trace, found: tuple[KernelWorkspace | None, ...]) -> Iterator[Assumption]:
    """Yield what is assumed: which kernels run, and which workspaces are not known."""
    largest = {n: one.most_bytes for n, one in enumerate(found) if one and one.most_bytes > one.likely_bytes}
    if largest:
        signatures = [
            replace(signature, workspace_bytes=largest.get(number, signature.workspace_bytes))
            for number, signature in enumerate(trace.signatures)
        ]
        most = simulate(replace(trace, signatures=tuple(signatures))).peak_bytes
        extra = most - simulate(trace).peak_bytes
        calls = sum(op.signature in largest for op in trace.ops)
        if extra:
            yield Assumption(
                "workspace",
                f"cuDNN chooses the kernels of {calls} convolutions when they run; with the largest "
                "workspaces that it may choose where there is memory, the peak would be "
                f"{format_bytes(extra)} higher",
            )
    names = sorted({trace.signatures[number].name for number, one in enumerate(found) if one is None})
    if names:
        text = f"what kernels allocate inside themselves is not known and counts as 0 for: {', '.join(names)}"
        yield Assumption("workspace", text)
