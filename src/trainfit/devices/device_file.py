"""Write a device as the file that `--device` takes."""

from __future__ import annotations

import json
import os
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from trainfit.basics.sealed_files import write_whole
from trainfit.devices.device_table import Device


def device_json(device: Device) -> dict[str, Any]:
    """Return the fields of a device that are not what they are anyway."""
    found: dict[str, Any] = {}
    for field in fields(device):
        value = getattr(device, field.name)
        usual = field.default_factory() if field.default_factory is not MISSING else field.default
        if value != usual:
            found[field.name] = list(value) if isinstance(value, tuple) else value
    return found


def save_device(device: Device, path: str | os.PathLike[str]) -> None:
    """Write a device, whole or not at all; `find_device` and `--device` read it."""
    text = json.dumps(device_json(device), indent=2, allow_nan=False) + "\n"
    write_whole(Path(path), text.encode())
