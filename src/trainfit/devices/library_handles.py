"""Memory that libraries of matrix products keep on a GPU from their first use on: cuBLAS and its like.

torch gives each handle of cuBLAS a workspace from its own caching allocator, one per handle and stream, and
never frees it. Every thread has a handle: the thread of the program, and the one on which autograd runs
backward. So a step with products in forward and in backward keeps two. They are no part of a trace: what a
trace asks for is the same on every GPU, the size of these is not.

Sizes and rules are those of torch's `aten/src/ATen/cuda/CublasHandlePool.cpp`. Convolutions, recurrent layers
and fused attention have libraries of their own, which ask for memory call by call.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainfit.devices.architectures import capability_of, is_amd
from trainfit.devices.device_table import Device
from trainfit.operators.names import OperatorSet, aten_name
from trainfit.traces.trace import COMPUTE, Op, Signature, Trace

Version = tuple[int, int]

_MIB = 2**20
USUAL_BYTES = 2 * 4096 * 1024 + 8 * 16 * 1024
"""What NVIDIA's documentation of `CUBLAS_WORKSPACE_CONFIG` calls `:4096:2:16:8`: 8.125 MiB."""
LARGE_BYTES = 32 * _MIB
"""What NVIDIA recommends for Hopper and Blackwell."""
_LT_BYTES = _MIB
_HIPBLAS_LARGE_BYTES, _HIPBLAS_BYTES, _HIPBLASLT_BYTES = 128 * _MIB, 32 * _MIB, 76 * _MIB

_ALLOCATED_BY_TORCH: Version = (2, 0)
"""Before, cuBLAS allocated for itself, where torch's statistics do not see it."""
_LARGE_ON_BLACKWELL: Version = (2, 12)
_SHARED_WITH_LT: Version = (2, 11)
"""Before, cuBLASLt had a workspace of its own beside that of cuBLAS."""

_PRODUCTS = OperatorSet.of(
    "mm addmm addmm_ _addmm_activation bmm baddbmm baddbmm_ addbmm addbmm_ mv addmv addmv_ dot vdot _int_mm "
    "_scaled_mm _scaled_mm_v2"
)
"""What calls the libraries; grouped products and `addr` are kernels of torch's own."""
_ALWAYS_LT = OperatorSet.of("_addmm_activation _int_mm _scaled_mm _scaled_mm_v2")
_VECTORS = OperatorSet.of("mv addmv addmv_ dot vdot")
_PREFER_HIPBLASLT = ("gfx90a", "gfx942", "gfx950", "gfx1200", "gfx1201")


@dataclass(frozen=True, slots=True)
class LibraryWorkspace:
    """Memory that a library gets from torch's allocator at its first use and keeps."""

    name: str
    """Such as `cuBLAS, backward`: the library, and whose handle it is."""
    bytes: int
    first_op: int
    """The op of the first step that needs it; it is allocated after the op's results."""


def library_workspaces(
    trace: Trace, device: Device, torch_version: str | None = None, workspace_config: str = ""
) -> tuple[LibraryWorkspace, ...]:
    """Return what libraries of matrix products keep on a GPU, in the order in which the step needs it.

    `torch_version` is that of the real run if it is not the one that captured the step. `workspace_config` is
    the value of `CUBLAS_WORKSPACE_CONFIG` there, which users set for deterministic results.
    """
    version = version_of(torch_version or trace.torch)
    if device.kind != "cuda" or version < _ALLOCATED_BY_TORCH:
        return ()
    sizes = _library_bytes(device.architecture, version, workspace_config)
    used = [_libraries(signature, device.architecture, version) for signature in trace.signatures]
    found: dict[tuple[str, str, str], LibraryWorkspace] = {}
    for number, op in enumerate(trace.ops):
        for library in used[op.signature]:
            thread = _thread(op)
            if (op.reads or op.writes) and (library, thread, op.queue) not in found:  # not on the host
                where = thread if op.queue == COMPUTE else f"{thread}, {op.queue}"
                workspace = LibraryWorkspace(f"{library}, {where}", sizes[library], number)
                found[library, thread, op.queue] = workspace
    return tuple(found.values())


def version_of(text: str) -> Version:
    """Return (2, 13) for `2.13.0+cpu`; what is not a version counts as the newest."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (99, 0)


def configured_bytes(config: str) -> int | None:
    """Return the bytes that `CUBLAS_WORKSPACE_CONFIG` asks for, such as `:4096:8`; None if it names none."""
    pairs = re.findall(r":(\d+):(\d+)", config)
    return sum(int(kibibytes) * 1024 * int(count) for kibibytes, count in pairs) if pairs else None


def _library_bytes(architecture: str, version: Version, config: str) -> dict[str, int]:
    """Return the size of each library's workspace."""
    asked = configured_bytes(config)
    if is_amd(architecture):
        usual = _HIPBLAS_LARGE_BYTES if architecture.startswith(("gfx94", "gfx95")) else _HIPBLAS_BYTES
        return {"hipBLAS": usual if asked is None else asked, "hipBLASLt": _HIPBLASLT_BYTES}
    major, _ = capability_of(architecture) or (0, 0)
    large = major == 9 or (major in (10, 12) and version >= _LARGE_ON_BLACKWELL)
    usual = LARGE_BYTES if large else USUAL_BYTES
    return {"cuBLAS": usual if asked is None else asked, "cuBLASLt": _LT_BYTES}


def _libraries(signature: Signature, architecture: str, version: Version) -> tuple[str, ...]:
    """Return whose workspaces a call needs, in the order in which it asks for them."""
    if signature.name not in _PRODUCTS or not all(all(spec.shape) for spec in signature.inputs):
        return ()  # a product without elements ends before it asks for a handle
    if is_amd(architecture):
        # hipBLASLt has no products in float64, and none with a vector.
        lacking = signature.name in _VECTORS or signature.inputs[-1].dtype == "float64"
        preferred = architecture in _PREFER_HIPBLASLT and not lacking
        return ("hipBLASLt",) if preferred else ("hipBLAS",)
    if version < _SHARED_WITH_LT and _goes_through_lt(signature):
        return ("cuBLAS", "cuBLASLt")
    return ("cuBLAS",)


def _goes_through_lt(signature: Signature) -> bool:
    """Whether torch calls cuBLASLt: to add a bias in the same kernel, and for products of few bits."""
    if signature.name in _ALWAYS_LT or len(signature.inputs) < 3:
        return signature.name in _ALWAYS_LT
    bias, _, right = signature.inputs[:3]
    return aten_name(signature.name) == "addmm" and bias.shape == right.shape[1:] != (1,)


def _thread(op: Op) -> str:
    """Return the thread that calls the kernel: what is computed again in backward is called there, too."""
    return "backward" if op.phase == "backward" else "forward"
