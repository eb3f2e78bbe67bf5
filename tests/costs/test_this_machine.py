"""What is measured about the machine itself: sane, and only once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from trainfit.costs import this_machine
from trainfit.costs.table import Host
from trainfit.devices import this_cpu
from trainfit.timing import host, rates, regions


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_speed_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "_SIZE", 128)
    monkeypatch.setattr(rates, "_COPIED_BYTES", 1 << 20)
    path = tmp_path / "costs.sqlite"
    device = this_machine.with_speed(this_cpu(), cache_path=path)
    assert device.flops["fp32"] > 1e6 and device.flops["bf16"] > 1e6
    assert device.bandwidth_bytes_per_second is not None and device.bandwidth_bytes_per_second > 1e6
    assert device.memory_bytes == this_cpu().memory_bytes
    monkeypatch.setattr(rates, "product_rate", lambda dtype: 1.0)
    assert this_machine.with_speed(this_cpu(), cache_path=path) == device
    again = this_machine.with_speed(this_cpu(), cache_path=path, refresh=True)
    assert again.flops == {"fp32": 1.0, "bf16": 1.0}


def test_host_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_BUDGET_SECONDS", 0.05)
    for module in (host, regions):
        monkeypatch.setattr(module, "MEDIUM", host.TINY)
    for name in ("_TINY_ROUNDS", "_MEDIUM_ROUNDS"):
        monkeypatch.setattr(regions, name, 3)
    path = tmp_path / "costs.sqlite"
    found = this_machine.host(cache_path=path)
    assert found.runs_kernels
    assert 0 < found.view_op < 1e-2 and 0 < found.module_call < 1e-2
    for seconds in (found.forward_op, found.backward_op, found.optimizer_op, found.tensor, found.reload):
        assert abs(seconds) < 1e-2
    assert 0 < found.region_call < 1e-1 and 0 < found.region_op < 1e-2
    assert 0 <= found.checkpoint_call < 1e-1 and 0 <= found.checkpoint_op < 1e-2
    monkeypatch.setattr(host, "host_seconds", lambda: pytest.fail("measured again"))
    assert this_machine.host(cache_path=path) == found
    names = ("forward_op", "backward_op", "optimizer_op", "view_op", "module_call", "tensor", "reload")
    names += ("region_call", "region_op", "checkpoint_call", "checkpoint_op")
    seconds = dict.fromkeys(names, 1e-6)
    monkeypatch.setattr(host, "host_seconds", lambda: {**seconds, "cache_bytes": 1024})
    assert this_machine.host(cache_path=path, refresh=True) == Host(True, **seconds, cache_bytes=1024)


def test_the_machine_says_what_it_is() -> None:
    machine = this_machine.machine_of(this_cpu())
    assert "cores" in machine.device and machine.threads > 0
    assert "torch" in machine.text
