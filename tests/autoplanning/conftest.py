"""What all tests of plans that are made where training runs share: one thread, a machine of known speed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from trainfit.costs import this_machine
from trainfit.costs.constants import CALIBRATED
from trainfit.costs.roofline import host_of
from trainfit.devices.device_table import Device


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Models this small lose more to waking threads than they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def _known_speed() -> Iterator[None]:
    """Measuring this machine takes long, and says nothing about plans that are made here."""

    def with_speed(device: Device, **_: Any) -> tuple[Device, float]:
        return replace(device, bandwidth_bytes_per_second=1e10, flops={"fp32": 1e11, "bf16": 1e11}), 0.0

    host = replace(host_of(CALIBRATED), runs_kernels=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(this_machine, "with_speed", with_speed)
        patch.setattr(this_machine, "host", lambda **_: (host, 0.0))
        yield
