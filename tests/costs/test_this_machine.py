"""What is measured about the machine itself: sane, and only once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fake_machine import FakeMachine

from trainfit.costs import this_machine
from trainfit.costs.table import Host
from trainfit.devices.device_table import this_cpu
from trainfit.timing import executor_seconds, host, rates

QUIET = FakeMachine(0.0).meter()


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
    device, _ = this_machine.with_speed(this_cpu(), cache_path=path, meter=QUIET)
    assert device.flops["fp32"] > 1e6 and device.flops["bf16"] > 1e6
    assert device.bandwidth_bytes_per_second is not None and device.bandwidth_bytes_per_second > 1e6
    assert device.memory_bytes == this_cpu().memory_bytes
    monkeypatch.setattr(rates, "product_rate", lambda dtype: 1.0)
    assert this_machine.with_speed(this_cpu(), cache_path=path, meter=QUIET) == (device, 0.0)
    again, _ = this_machine.with_speed(this_cpu(), cache_path=path, refresh=True)
    assert again.flops == {"fp32": 1.0, "bf16": 1.0}


def test_host_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_BUDGET_SECONDS", 0.05)
    for module in (host, executor_seconds):
        monkeypatch.setattr(module, "MEDIUM", host.TINY)
    for name in ("_TINY_ROUNDS", "_MEDIUM_ROUNDS"):
        monkeypatch.setattr(executor_seconds, name, 3)
    path = tmp_path / "costs.sqlite"
    found, _ = this_machine.host(cache_path=path, meter=QUIET)
    assert found.runs_kernels
    assert 0 < found.view_op < 1e-2 and 0 < found.module_call < 1e-2
    for seconds in (found.forward_op, found.backward_op, found.optimizer_op, found.tensor, found.reload):
        assert abs(seconds) < 1e-2
    assert 0 < found.region_call < 1e-1 and 0 < found.region_op < 1e-2
    assert 0 <= found.checkpoint_call < 1e-1 and 0 <= found.checkpoint_op < 1e-2
    monkeypatch.setattr(host, "host_seconds", lambda: pytest.fail("measured again"))
    assert this_machine.host(cache_path=path, meter=QUIET) == (found, 0.0)
    names = ("forward_op", "backward_op", "optimizer_op", "view_op", "module_call", "tensor", "reload")
    names += ("region_call", "region_op", "checkpoint_call", "checkpoint_op")
    seconds = dict.fromkeys(names, 1e-6)
    monkeypatch.setattr(host, "host_seconds", lambda: {**seconds, "cache_bytes": 1024})
    expected = Host(True, **seconds, cache_bytes=1024)
    assert this_machine.host(cache_path=path, refresh=True)[0] == expected


def test_speed_that_a_busy_machine_had_is_measured_again_when_it_is_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, machine = tmp_path / "costs.sqlite", FakeMachine(0.57)

    def with_speed(rate: float) -> tuple[float, float | None]:
        """Return the rate that is used, if measuring now gave this one; and the load it was taken under."""
        monkeypatch.setattr(this_machine, "_measure_rates", lambda: {"fp32": rate, "bandwidth": 1.0})
        device, load = this_machine.with_speed(this_cpu(), cache_path=path, meter=machine.meter())
        return device.flops["fp32"], load

    assert with_speed(1.0) == (1.0, pytest.approx(0.57))
    assert with_speed(2.0) == (1.0, pytest.approx(0.57))  # still busy: what there is has to do
    machine.share = 0.02
    assert with_speed(3.0) == (3.0, pytest.approx(0.02))
    assert with_speed(4.0) == (3.0, pytest.approx(0.02))
    machine.share = 0.9
    assert with_speed(5.0) == (3.0, pytest.approx(0.02))


def test_a_new_measurement_under_more_load_does_not_replace_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, machine = tmp_path / "costs.sqlite", FakeMachine(0.2)

    def measure(rate: float, share: float) -> dict[str, float]:
        machine.share = share
        return {"fp32": rate, "bandwidth": 1.0}

    monkeypatch.setattr(this_machine, "_measure_rates", lambda: measure(1.0, 0.2))
    this_machine.with_speed(this_cpu(), cache_path=path, meter=machine.meter())
    machine.share = 0.0
    monkeypatch.setattr(this_machine, "_measure_rates", lambda: measure(2.0, 0.8))
    device, load = this_machine.with_speed(this_cpu(), cache_path=path, meter=machine.meter())
    assert device.flops == {"fp32": 1.0} and load == pytest.approx(0.2)


def test_the_machine_says_what_it_is() -> None:
    machine = this_machine.machine_of(this_cpu())
    assert "cores" in machine.device and machine.threads > 0
    assert "torch" in machine.text
