"""A processor that announces instructions and does not run them ends no capture, but is named."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import trainfit
from trainfit.costs import this_machine
from trainfit.devices.device_table import this_cpu
from trainfit.errors import DeviceError
from trainfit.workspace import processor_faults


class Machine:
    """A processor that announces AMX; `broken` are the dtypes whose products end the process."""

    def __init__(self) -> None:
        self.broken = {"bfloat16"}
        self.remedy_helps = True
        self.asked: list[tuple[str, dict[str, str]]] = []

    def dies(self, dtype: str, **environment: str) -> bool:
        self.asked.append((dtype, environment))
        return dtype in self.broken and not (environment and self.remedy_helps)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Machine]:
    machine = Machine()
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path))
    monkeypatch.setattr(processor_faults, "announces_amx", lambda: True)
    monkeypatch.setattr(processor_faults, "dies", machine.dies)
    processor_faults._remembered.cache_clear()
    yield machine
    processor_faults._remembered.cache_clear()


def build(dtype: torch.dtype = torch.bfloat16) -> trainfit.Step:
    model = torch.nn.Linear(8, 8, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters())
    return trainfit.Step.of(
        model, torch.randn(4, 8, dtype=dtype), loss=lambda out: out.sum(), optimizer=optimizer
    )


def test_a_step_that_would_end_the_process_is_refused_with_what_helps(machine: Machine) -> None:
    with pytest.raises(DeviceError, match="in bfloat16 end the process") as caught:
        trainfit.capture(build, device="cpu")
    assert "Set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16" in str(caught.value)


def test_what_does_not_help_is_not_said(machine: Machine) -> None:
    machine.remedy_helps = False
    with pytest.raises(DeviceError, match=r"does not run it\. Use another dtype, or another"):
        trainfit.capture(build, device="cpu")


def test_other_dtypes_and_other_devices_are_captured(machine: Machine) -> None:
    assert trainfit.capture(lambda: build(torch.float32), device="cpu").ops
    assert not machine.asked
    assert trainfit.capture(build, device="h100").ops
    assert trainfit.capture(lambda: build(torch.float16), device="cpu").ops
    assert machine.asked == [("float16", {})]


def test_measuring_from_a_file_is_refused_too(machine: Machine) -> None:
    machine.broken = set()
    trace = trainfit.capture(build, device="cpu")
    machine.broken = {"bfloat16"}
    processor_faults._remembered.cache_clear()
    (Path(processor_faults.MeasuredCache(processor_faults.this_processor()).path)).unlink()
    with pytest.raises(DeviceError, match="in bfloat16 end the process"):
        trainfit.price(trace, device="cpu", costs="measured")


def test_the_speed_of_such_products_is_not_measured(machine: Machine) -> None:
    device, _ = this_machine.with_speed(this_cpu())
    assert device.flops is not None
    assert "fp32" in device.flops and "bf16" not in device.flops


def test_it_is_asked_once_while_the_machine_runs(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        assert processor_faults.kernels_die("bfloat16")
        processor_faults._remembered.cache_clear()  # as another process would begin
    assert len(machine.asked) == 1
    monkeypatch.setattr(processor_faults, "_started", lambda: "after a new start")
    assert processor_faults.kernels_die("bfloat16")
    assert len(machine.asked) == 2


def test_processors_without_amx_are_not_asked(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor_faults, "announces_amx", lambda: False)
    assert not processor_faults.kernels_die("bfloat16")
    assert not machine.asked


@pytest.mark.parametrize(
    ("probe", "died"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", True),
        ("raise SystemExit(1)", False),
        ("import os; assert os.environ['A_SETTING'] == '1'; os.abort()", True),
    ],
)
def test_only_a_signal_is_a_fault(probe: str, died: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor_faults, "_PROBE", probe)
    assert processor_faults.dies("bfloat16", A_SETTING="1") is died


def test_the_probe_runs_where_the_tests_run() -> None:
    """The tests themselves need a processor that runs; see `conftest.py`."""
    assert not processor_faults.dies("bfloat16")
    ran = processor_faults.subprocess.run(
        [sys.executable, "-P", "-c", processor_faults._PROBE.format(dtype="float32")], check=False
    )
    assert ran.returncode == 0
