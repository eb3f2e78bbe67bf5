"""This machine: what its processor can do, and what its Python takes around the operators of a step.

Both are measured once and kept in the cache of costs.
"""

from __future__ import annotations

import os
import platform
from dataclasses import fields, replace
from pathlib import Path

from trainfit.costs.cache import CostCache, Machine
from trainfit.costs.table import Host
from trainfit.devices import Device, this_cpu
from trainfit.errors import DeviceError


def refuse_absent(device: Device) -> None:
    """Refuse to measure for a device that is not in this machine."""
    if not device.source.startswith("this machine"):
        raise DeviceError(
            f"costs can only be measured on a device of this machine, and {device.name} is not one; "
            "write --device cpu or --device cuda, or price by --costs roofline."
        )


def machine_of(device: Device) -> Machine:
    """Return what a measurement on this device holds for."""
    import torch

    if device.kind == "cuda":
        return Machine(torch.cuda.get_device_name(0), torch.__version__, 0)
    return Machine(_processor(), torch.__version__, torch.get_num_threads())


def with_speed(device: Device, *, refresh: bool = False, cache_path: Path | None = None) -> Device:
    """Complete the description of this machine's processor by its FLOP/s and its bandwidth."""
    with CostCache(machine_of(device), cache_path) as cache:
        rates = None if refresh else cache.figures("rates")
        if rates is None:
            rates = _measure_rates()
            cache.store_figures("rates", rates)
    flops = {name: rate for name, rate in rates.items() if name != "bandwidth"}
    return replace(device, bandwidth_bytes_per_second=rates["bandwidth"], flops=flops)


def _measure_rates() -> dict[str, float]:
    import torch

    from trainfit.timing.locality import this_machines_caches
    from trainfit.timing.rates import copy_rate, product_rate

    return {
        "fp32": product_rate(torch.float32),
        "bf16": product_rate(torch.bfloat16),
        "bandwidth": copy_rate(this_machines_caches().last_bytes),
    }


def host(*, refresh: bool = False, cache_path: Path | None = None) -> Host:
    """Return what this machine takes around the operators of a step that runs on its processor."""
    names = {field.name for field in fields(Host)} - {"runs_kernels", "launch"}
    with CostCache(machine_of(this_cpu()), cache_path) as cache:
        figures = None if refresh else cache.figures("host")
        # What an earlier version of this program remembered may lack some of them.
        if figures is None or not names <= set(figures):
            from trainfit.timing.host import host_seconds

            figures = host_seconds()
            cache.store_figures("host", figures)
    seconds = {name: figure for name, figure in figures.items() if name != "cache_bytes"}
    return Host(runs_kernels=True, cache_bytes=int(figures["cache_bytes"]), **seconds)


def _processor() -> str:
    """Return what the processor calls itself, with its architecture and the number of its cores."""
    name = ""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return f"{name or platform.processor() or 'cpu'} ({platform.machine()}, {os.cpu_count()} cores)"
