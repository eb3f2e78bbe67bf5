"""Devices as a person reads them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainfit.basics.units import format_bytes
from trainfit.devices.device_table import Device
from trainfit.report.amounts import Amount
from trainfit.report.tables import NumberTable, safe, stacked


def devices_view(devices: Sequence[Device], amount: Amount = "usual") -> RenderableType:
    """Lay out the device table: a line for each, only their names, or everything."""
    if amount == "verdict":
        return Group(*(Text(device.name) for device in devices))
    if amount == "all":
        return stacked(*([device_view(device)] for device in devices))
    table = NumberTable("device", "memory", "usable", "GB/s", "fp32", "bf16", "architecture")
    for device in devices:
        table.add_row(
            device.name,
            format_bytes(device.memory_bytes),
            format_bytes(device.usable_bytes),
            _rate(device.bandwidth_bytes_per_second, 1e9),
            _rate(device.flops.get("fp32"), 1e12),
            _rate(device.flops.get("bf16"), 1e12),
            device.architecture,
        )
    note = "usable: without the CUDA context. GB/s: memory bandwidth. fp32, bf16: dense peak TFLOP/s."
    return stacked([table], footer=note)


def device_view(device: Device, amount: Amount = "usual") -> RenderableType:
    """Lay out everything known about one device, or its name as `--device` knows it."""
    if amount == "verdict":
        return safe(device.name)
    rows = {
        "memory": format_bytes(device.memory_bytes),
        "usable for tensors": format_bytes(device.usable_bytes),
        "CUDA context": format_bytes(device.context_bytes) if device.context_bytes else "-",
        "margin": format_bytes(device.margin_bytes),
        "bandwidth": _rate(device.bandwidth_bytes_per_second, 1e9, "GB/s"),
        **{f"{dtype} dense": _rate(rate, 1e12, "TFLOP/s") for dtype, rate in device.flops.items()},
        "fastest matrix product": f"{device.matmul_share:.0%} of the peak" if device.matmul_share else "-",
        "step times": _calibration(device),
        "L2 cache": format_bytes(device.cache_bytes) if device.cache_bytes else "-",
        "multiprocessors" if device.kind == "cuda" else "cores": str(device.sm_count or "unknown"),
        "architecture": device.architecture or "unknown",
        "link to its neighbours": _rate(device.nvlink_bytes_per_second, 1e9, "GB/s one way"),
        "GPUs that it connects": str(device.nvlink_gpus) if device.nvlink_gpus else "-",
        "network, for each GPU": _rate(device.network_bytes_per_second, 1e9, "GB/s one way"),
        "link to the host": _rate(device.pcie_bytes_per_second, 1e9, "GB/s one way"),
        "source": device.source,
    }
    table = Table.grid(padding=(0, 3))
    for label, value in rows.items():
        table.add_row(Text(label, "dim"), safe(value))
    return Group(safe(device.name, "bold"), table)


def _calibration(device: Device) -> str:
    if device.calibrated and device.constants:
        return f"calibrated by {len(device.constants)} constants of its own"
    return "calibrated on published ones" if device.calibrated else "not calibrated"


def _rate(value: float | None, factor: float, unit: str = "") -> str:
    return "-" if value is None else f"{value / factor:,.6g} {unit}".rstrip()
