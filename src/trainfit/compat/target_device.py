"""Which device a tool of `compat` works for: the one that is named, or the one that tensors are on."""

from __future__ import annotations

import torch

from trainfit.devices.device_table import Device, find_device


def named_device(device: str | Device | None) -> Device | None:
    """Return the device that was named; None if none was."""
    return find_device(device) if isinstance(device, str) else device


def present_device(device: str | Device | None) -> Device:
    """Return the device that was named, else the GPU of this machine, else its processor."""
    return named_device(device) or find_device("cuda" if torch.cuda.is_available() else "cpu")
