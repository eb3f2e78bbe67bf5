"""Whether this machine's processor runs the instructions that it announces, before a kernel ends the process.

Some virtual machines announce AMX and do not run it. There torch's products in bfloat16 end the process with
an illegal instruction, in any program; here they would do so while operators are run alone. Only another
process can find out. It is asked once, where AMX is announced, and the answer is remembered until the machine
is started again.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from trainfit.devices.measured_cache import Figures, MeasuredCache
from trainfit.errors import DeviceError
from trainfit.operators.families import ATTENTION, CONVOLUTIONS, MATRIX_PRODUCTS, RECURRENT
from trainfit.traces.trace import Signature
from trainfit.workspace.conditions import this_processor

REMEDY = ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
"""The environment variable and value with which oneDNN uses everything but AMX."""
_DTYPES = ("bfloat16", "float16")
"""What AMX computes with."""
_SECONDS = 120
_PROBE = """
import resource, torch
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
one = torch.ones(256, 256, dtype=torch.{dtype})
torch.nn.functional.linear(one, one)
torch.nn.functional.conv2d(one.view(1, 16, 64, 64), one.view(64, 16, 8, 8))
"""


def refuse_faulty(signatures: Iterable[Signature]) -> None:
    """Refuse operators that would end this process if they ran on this machine's processor."""
    for dtype in products_by_dtype(signatures):
        if kernels_die(dtype):
            raise DeviceError(_message(dtype))


def products_by_dtype(signatures: Iterable[Signature]) -> set[str]:
    """Return the dtypes in which these operators have products that AMX would compute."""
    products = MATRIX_PRODUCTS | CONVOLUTIONS | ATTENTION | RECURRENT
    return {
        spec.dtype
        for signature in signatures
        if signature.name in products
        for spec in signature.inputs
        if spec.dtype in _DTYPES
    }


@functools.cache
def announces_amx() -> bool:
    """Whether the processor says that it has AMX, which needs the consent of the system."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return "amx_tile" in text


def kernels_die(dtype: str) -> bool:
    """Whether products in this dtype end the process that runs them, on this machine as it is set up now."""
    return announces_amx() and _remembered(dtype, os.environ.get(REMEDY[0]))


@functools.cache
def _remembered(dtype: str, setting: str | None) -> bool:
    """Ask once in this process, and once on this machine; `setting` is part of what is remembered."""
    what = f"processor faults since {_started()}: {dtype}"
    with MeasuredCache(this_processor()) as cache:
        known = cache.figures(what)
        if known is None:
            known = Figures({"dies": float(dies(dtype))})
            cache.store_figures(what, known)
    return known.values.get("dies") == 1.0


def dies(dtype: str, **environment: str) -> bool:
    """Run products in a process of their own, with these environment variables; say if a signal ended it."""
    if not sys.executable:
        return False
    command = [sys.executable, "-P", "-c", _PROBE.format(dtype=dtype)]
    try:
        ran = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return False  # nothing was learned
    return ran.returncode < 0


def _started() -> str:
    """Identify the time since this machine was started."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return "unknown"


def _message(dtype: str) -> str:
    name, value = REMEDY
    helps = not dies(dtype, **{name: value})
    what = (
        f"Set {name}={value} in the environment: with it they run. Or use another dtype."
        if helps
        else "Use another dtype, or another machine."
    )
    return (
        f"torch's matrix products in {dtype} end the process on this machine (illegal instruction), in "
        f"training as well as here: its processor announces AMX and does not run it. {what}"
    )
