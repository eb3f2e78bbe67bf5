"""Workspaces: bytes that a kernel allocates and frees inside itself, where no dispatcher can see them.

They are a property of (operator signature, device).

- `profiler`: what a run allocates and frees on the CPU, as torch's profiler sees it
- `kernel_workspace`: what is likely, and the most that it may be
- `convolution_workspaces`: of convolutions on a GPU
- `attention_workspaces`: of fused attention on a GPU
- `sorting_workspaces`: of sorting, and of gradients that sort, on a GPU
- `reduction_workspaces`: of reductions and norms on a GPU
- `formulas`: which operator has which of these
- `gpu_workspaces`: a trace with all of them, and what is said about it
- `made_up_arguments`: arguments with which an operator can be run alone
- `measured`: runs operators on this machine's CPU and reads the profiler
- `remembered`: what was measured, written down for the next process
- `conditions`: what a measurement holds for
- `processor_faults`: kernels that would end this process

What libraries keep from call to call is no workspace of a kernel: `devices/library_handles.py`.
"""

from __future__ import annotations

from dataclasses import replace

from trainfit.operators.names import is_operator
from trainfit.traces.assumptions import Assumption
from trainfit.traces.trace import Signature, Trace
from trainfit.workspace.measured import Limits, measure_operators


def with_measured_workspaces(trace: Trace, limits: Limits) -> Trace:
    """Return the trace with every signature's workspace as this machine's CPU kernels have it."""
    signatures: list[Signature] = []
    left_out: set[str] = set()
    for signature, measured in zip(trace.signatures, measure_operators(trace.signatures, limits)):
        if signature.workspace_source == "measured":
            pass  # with the step's own values, where made-up ones would take another path
        elif measured is not None:
            workspace = measured.workspace_bytes
            signature = replace(signature, workspace_bytes=workspace, workspace_source="measured")
        # What is no operator has no kernel; that of a collective is its backend's, outside of the allocator.
        elif not signature.view and is_operator(signature.name) and signature.collective is None:
            left_out.add(signature.name)
            signature = replace(signature, workspace_source="unknown")
        signatures.append(signature)
    assumptions = trace.assumptions
    if left_out:
        text = (
            "workspaces inside kernels were not measured and count as 0 for operators that are too large or "
            f"cannot be run alone: {', '.join(sorted(left_out))}"
        )
        assumptions += (Assumption("workspace", text),)
    return replace(trace, signatures=tuple(signatures), assumptions=assumptions)
