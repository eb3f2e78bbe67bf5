"""Seconds of collectives that somebody has measured: what a device file says about them, instead of formulas.

For each kind and number of ranks a device may have the seconds of an exchange of nothing, and how many bytes
a second it carries beyond that (`Device.exchange_seconds`, `exchange_bytes_per_second`, by names such as
`all_gather 4`). This is the only way in which exchanges between processes on a processor are known, where
every copy is made by the same cores that compute.
"""

from __future__ import annotations

from trainfit.costs.collective_costs import COMMUNICATION
from trainfit.costs.table import OpCost
from trainfit.devices.device_table import Device
from trainfit.traces.trace import Signature


def exchange_name(kind: str, ranks: int) -> str:
    """Return by which name a device has the figures of a kind of collective among so many ranks."""
    return f"{kind} {ranks}"


def measured_exchange(signature: Signature, device: Device) -> OpCost | None:
    """Return what a collective costs by what was measured; None if nobody has measured its kind."""
    collective = signature.collective
    if collective is None or collective.group_size <= 1:
        return None
    name = exchange_name(collective.kind, collective.group_size)
    seconds, rate = device.exchange_seconds.get(name), device.exchange_bytes_per_second.get(name)
    if seconds is None or rate is None:
        return None
    moving = collective.bytes / rate
    bound = "latency" if seconds > moving else "network"
    return OpCost(seconds + moving, "measured", bound, kernels=1, kind=COMMUNICATION)
