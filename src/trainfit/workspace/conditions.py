"""What a measurement on this machine's processor holds for: everything that decides which kernels run."""

from __future__ import annotations

import os

import torch

from trainfit.devices.measured_cache import Machine, key_of, processor_name

_LIBRARIES = ("ATEN_", "DNNL_", "MKL_", "MKLDNN_", "ONEDNN_")
"""Environment variables that begin like this choose instruction sets and kernels."""


def this_processor() -> Machine:
    """Return the processor with torch's version, threads and switches as they are now."""
    return Machine(processor_name(), torch.__version__, torch.get_num_threads(), key_of(*_switches()))


def _switches() -> tuple[object, ...]:
    onednn = torch.backends.mkldnn
    return (
        torch.backends.cpu.get_cpu_capability(),
        onednn.enabled,
        onednn.deterministic,
        # Not `torch.get_float32_matmul_precision`, which fails where these were set one by one.
        onednn.matmul.fp32_precision,  # type: ignore[attr-defined]
        onednn.conv.fp32_precision,  # type: ignore[attr-defined]
        onednn.rnn.fp32_precision,  # type: ignore[attr-defined]
        torch._C._get_nnpack_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        str(torch.get_default_dtype()),
        torch.is_autocast_enabled("cpu"),
        str(torch.get_autocast_dtype("cpu")),
        sorted((name, value) for name, value in os.environ.items() if name.startswith(_LIBRARIES)),
    )
