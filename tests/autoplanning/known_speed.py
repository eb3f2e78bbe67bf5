"""A machine of known speed, for tests and for the processes that they start."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from trainfit.costs import this_machine
from trainfit.costs.constants import CALIBRATED
from trainfit.costs.roofline import host_of
from trainfit.devices.device_table import Device


@contextlib.contextmanager
def known_speed() -> Iterator[None]:
    """Measuring this machine takes long, and says nothing about plans that are made here."""

    def with_speed(device: Device, **_: Any) -> tuple[Device, float]:
        return replace(device, bandwidth_bytes_per_second=1e10, flops={"fp32": 1e11, "bf16": 1e11}), 0.0

    host = replace(host_of(CALIBRATED), runs_kernels=True)
    with (
        patch.object(this_machine, "with_speed", with_speed),
        patch.object(this_machine, "host", lambda **_: (host, 0.0)),
    ):
        yield
