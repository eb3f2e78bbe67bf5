"""What a copy between the host's memory and a GPU's takes: it goes over the link between them (PCIe)."""

from __future__ import annotations

from trainfit.costs.table import OpCost
from trainfit.devices.device_table import Device
from trainfit.traces.trace import Signature

LINK_KIND = "copies over the link to the host"
"""As results name them among the kinds of operators."""
_SLOWEST = 16e9
"""Third generation of PCIe, 16 lanes: of a device whose link nobody has said."""
_SHARE = 0.8
"""What pinned memory gets of the link's rate, which counts the headers of packets, too. Assumed: no copy of
a GPU was measured for it."""
_SECONDS = 10e-6
"""From one copy to the next, however small."""


def link_seconds(device: Device, copied_bytes: int) -> float:
    """Return how long a copy of so many bytes takes, in one direction, while nothing else uses the link."""
    rate = device.pcie_bytes_per_second or _SLOWEST
    return _SECONDS + copied_bytes / (rate * _SHARE)


def link_cost(signature: Signature, device: Device) -> OpCost:
    """Return what a copy between host and device costs."""
    # A copy reads what it writes: only one of both passes the link.
    seconds = link_seconds(device, signature.moved_bytes // 2)
    return OpCost(seconds, "formula", "link", kernels=1, kind=LINK_KIND)
