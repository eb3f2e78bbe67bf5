"""Price a trace on a device: by roofline, or by running its operators on this machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

from trainfit.basics.doing import doing, measuring
from trainfit.costs.collective_costs import Links
from trainfit.costs.constants import constants_of
from trainfit.costs.roofline import Roofline, host_of, roofline_costs
from trainfit.costs.table import CostTable, Host
from trainfit.costs.this_machine import refuse_absent
from trainfit.devices.device_table import Device
from trainfit.errors import OptionError
from trainfit.timing.load import LoadMeter, busiest, busy_warning
from trainfit.traces.trace import Trace

CostSource = Literal["roofline", "measured"]


def check_source(costs: str, device: Device) -> None:
    """Refuse costs that a device cannot have, before a step is captured for it."""
    if costs not in get_args(CostSource):
        raise OptionError(f"--costs must be one of {', '.join(get_args(CostSource))}, got {costs!r}.")
    if costs == "measured":
        refuse_absent(device)


_HOST = {"forward_op", "backward_op", "optimizer_op", "view_op", "module_call", "tensor"}
"""What a device file has to have for its host to be known."""


def price_trace(
    trace: Trace,
    device: Device,
    *,
    costs: CostSource = "roofline",
    refresh: bool = False,
) -> CostTable:
    """Return the cost of every signature of the trace, which was captured for this kind of device."""
    check_source(costs, device)
    host, meter = host_of(constants_of(device), runs_kernels=device.kind == "cpu"), LoadMeter()
    warnings: tuple[str, ...] = ()
    if device.kind == "cpu":
        device, host, warnings = _processor(trace, device, host, refresh, meter)
    if costs == "roofline":
        return replace(roofline_costs(trace, device), host=host, warnings=warnings)
    from trainfit.costs.measured_costs import measured_costs  # needs torch

    doing("measuring the step's operators")
    constants = constants_of(device)
    links = Links.of(device, trace.cluster, constants)
    fallback = Roofline(device, constants, trace.tf32, links, trace.cluster).price
    table = measured_costs(
        trace, device, host=host, fallback=fallback, refresh=refresh, progress=measuring(), meter=meter
    )
    return replace(table, warnings=warnings + table.warnings)


def _processor(
    trace: Trace, device: Device, host: Host, refresh: bool, meter: LoadMeter
) -> tuple[Device, Host, tuple[str, ...]]:
    """Complete what is known of a processor: what its file does not say is measured on this machine's."""
    from trainfit.costs import this_machine  # needs torch

    speed_load = host_load = None
    if not (device.bandwidth_bytes_per_second and device.flops and device.sm_count):
        device, speed_load = this_machine.with_speed(device, refresh=refresh, meter=meter)
    if _HOST - device.constants.keys():
        distributed = any(op.wrapped or op.converted or op.exchange for op in trace.ops)
        host, host_load = this_machine.host(distributed=distributed, refresh=refresh, meter=meter)
    warnings = busy_warning(
        busiest((speed_load, host_load)),
        "its own speed was measured",
        "predicted times are doubtful. It is measured again when it is quiet, or by --refresh.",
    )
    return device, host, warnings
