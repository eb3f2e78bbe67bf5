"""Which constants of the roofline hold for a device: the general ones, its architecture's, its own."""

from __future__ import annotations

from dataclasses import replace

from trainfit.devices.device_table import Device
from trainfit.devices.efficiency import Constants

CALIBRATED = Constants()
"""Where nothing else is known."""


def constants_of(device: Device) -> Constants:
    """Return the general constants with those that the device has of its own."""
    return replace(CALIBRATED, **device.constants)
