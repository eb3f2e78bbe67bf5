"""Workspaces: bytes that a kernel allocates and frees inside itself, where no dispatcher can see them.

They are a property of (operator signature, device). `formulas.py` has those that are known; `measured.py`
runs an operator for real on this machine and reads the profiler.
"""

from __future__ import annotations

from dataclasses import replace

from trainfit.trace import Trace
from trainfit.workspace.measured import measure_workspaces


def with_measured_workspaces(trace: Trace) -> Trace:
    """Return the trace with every signature's workspace as this machine's CPU kernels have it."""
    measured = measure_workspaces(trace.signatures)
    signatures = tuple(
        replace(signature, workspace_bytes=nbytes or 0, workspace_source="unknown" if nbytes is None else "measured")
        for signature, nbytes in zip(trace.signatures, measured)
    )
    return replace(trace, signatures=signatures)
