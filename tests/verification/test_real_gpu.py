"""What is computed from a GPU's statistics and events, with a stand-in for the GPU: there is none here."""

from __future__ import annotations

import io
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from trainfit import Step
from trainfit.devices import hardware
from trainfit.devices.device_table import present_gpu
from trainfit.devices.hardware import Cuda, GpuProperties, free_bytes, host_bytes
from trainfit.errors import DeviceError
from trainfit.timing.bench import caches_of
from trainfit.timing.clocks import timed_on
from trainfit.timing.rounds import Rounds
from trainfit.verifying import measuring
from trainfit.verifying.measuring import measure_step

RECORD_MS = 0.25


class FakeEvent:
    """A mark in the queue of a `FakeGpu`."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.reached_ms = -1.0

    def record(self) -> None:
        self.gpu.log.append("record")
        self.gpu.launch(RECORD_MS)
        self.reached_ms = self.gpu.queue_ms

    def synchronize(self) -> None:
        self.gpu.log.append("wait")
        self.gpu.waited_ms = self.reached_ms

    def elapsed_time(self, end_event: FakeEvent) -> float:
        assert self.gpu.waited_ms >= end_event.reached_ms, "the GPU has not reached the event yet"
        return end_event.reached_ms - self.reached_ms


class FakeGpu(Cuda):
    """A GPU with an allocator and a queue; what is asked of it is noted in `log`."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.allocated = self.peak = 0
        self.host_ms = self.queue_ms = self.waited_ms = 0.0

    def allocate(self, nbytes: int) -> None:
        self.allocated += nbytes
        self.peak = max(self.peak, self.allocated)

    def launch(self, milliseconds: float) -> None:
        self.queue_ms += milliseconds

    def count(self) -> int:
        return 2

    def properties(self, number: int = 0) -> GpuProperties:
        return GpuProperties(
            ("NVIDIA H100 80GB HBM3", "NVIDIA Q9999")[number], 79 << 30, 50 << 20, 99, "sm_91"
        )

    def free_bytes(self) -> int:
        return 12345

    def allocated_bytes(self) -> int:
        return self.allocated

    def peak_bytes(self) -> int:
        return self.peak

    def restart_peak(self) -> None:
        self.log.append("restart peak")
        self.peak = self.allocated

    def synchronize(self) -> None:
        self.log.append("synchronize")
        self.host_ms = max(self.host_ms, self.queue_ms)

    def event(self) -> FakeEvent:
        return FakeEvent(self)

    def sleep(self, cycles: int) -> None:
        self.log.append("sleep")
        self.launch(100.0)


# The real step --------------------------------------------------------------------------------------------


def fake_step(gpu: FakeGpu, seconds: Iterator[float]) -> Step:
    """Build a model of 1000 bytes, whose runs need 500 more and return 40; the first adds 200 of state."""
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gpu.allocate(1000)
    runs = 0

    def run() -> Any:
        nonlocal runs
        gpu.log.append("run")
        gpu.host_ms += 1.0  # the host has only launched everything by then
        gpu.queue_ms = max(gpu.queue_ms, gpu.host_ms)
        gpu.launch(1e3 * next(seconds))
        if not runs:
            gpu.allocate(9000)
            gpu.allocate(200 - 9000)
        runs += 1
        gpu.allocate(500)
        gpu.allocate(-500)
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    return Step(model, optimizer, run)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """A GPU on which something else has 100 bytes already; the clock on the wall is its host's."""
    found = FakeGpu()
    found.allocate(100)
    found.queue_ms = 7.0  # something is still running
    clock = SimpleNamespace(perf_counter=lambda: found.host_ms / 1e3)
    monkeypatch.setattr(measuring, "time", clock)
    return found


def test_memory_is_counted_from_what_was_there_before_the_step_was_built(gpu: FakeGpu) -> None:
    found = measure_step(lambda: fake_step(gpu, iter([0.01] * 9)), "cuda", timed=0, cuda=gpu)
    assert found.persistent_bytes == 1000 + 200
    assert found.peak_bytes == 1000 + 200 + 500  # not the 9000 of the run that warmed it up


def test_the_peak_begins_when_the_gpu_is_done_with_the_warm_up(gpu: FakeGpu) -> None:
    measure_step(lambda: fake_step(gpu, iter([0.01] * 9)), "cuda", timed=1, cuda=gpu)
    assert gpu.log == [
        *("run", "synchronize", "restart peak"),
        *("synchronize", "run", "synchronize"),
        *("synchronize", "run", "synchronize"),
    ]


def test_a_run_has_ended_when_the_gpu_is_done(gpu: FakeGpu) -> None:
    seconds = [9.0, 5.0, 0.030, 0.010, 0.020]
    found = measure_step(lambda: fake_step(gpu, iter(seconds)), "cuda", timed=3, cuda=gpu)
    assert found.seconds == pytest.approx(0.020 + 0.001)  # the median, with the time to launch
    without = measure_step(lambda: fake_step(gpu, iter(seconds)), "cuda", timed=0, cuda=gpu)
    assert without.seconds == pytest.approx(5.0 + 0.001)


# Single operators -----------------------------------------------------------------------------------------


def test_a_call_is_timed_between_two_events_that_the_gpu_reaches_without_waiting() -> None:
    gpu = FakeGpu()

    def function(x: int, *, y: int) -> int:
        gpu.log.append("call")
        gpu.launch(3.0)
        return x + y

    seconds, result = timed_on("cuda", gpu)(function, [1], {"y": 2})
    assert result == 3
    assert seconds == pytest.approx((3.0 + RECORD_MS) / 1e3)  # without the sleep
    assert gpu.log == ["sleep", "record", "call", "record", "wait"]


class FakeCaller:
    """An operator whose calls take the given milliseconds, one after the other."""

    warm_code = records = False

    def __init__(self, gpu: FakeGpu, times: Sequence[float]) -> None:
        self.gpu, self.times = gpu, iter(times)

    def prepare(self) -> tuple[list[Any], dict[str, Any]]:
        return [], {}

    def function(self) -> None:
        self.gpu.launch(next(self.times))

    def finish(self, result: Any) -> None:
        pass


def test_an_operators_time_is_the_median_without_the_call_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainfit.timing.rounds._page_faults", lambda: 0)
    gpu = FakeGpu()
    times = [3.0, 1.0, 2.0, 9.0, 1.5]
    rounds = Rounds([FakeCaller(gpu, times)], [], "cpu", timed_on("cuda", gpu))  # type: ignore[list-item]
    for _ in times:
        rounds.run_round()
    (timing,) = rounds.timings()
    assert timing is not None
    assert timing.seconds == pytest.approx(statistics.median(times) / 1e3)
    assert timing.spread == pytest.approx((3.0 - 1.5) / 2 / (2.0 + RECORD_MS))


# What it is -----------------------------------------------------------------------------------------------


def test_a_gpu_of_this_machine_is_described_by_its_driver() -> None:
    known, unknown = present_gpu(0, FakeGpu()), present_gpu(1, FakeGpu())
    assert (known.name, known.memory_bytes, known.sm_count) == ("h100-sxm-80gb", 79 << 30, 99)
    assert known.architecture == "sm_90"
    assert (unknown.name, unknown.architecture, unknown.source) == ("NVIDIA Q9999", "sm_91", "this machine")
    assert not unknown.has_speed
    with pytest.raises(DeviceError, match=r"there is no cuda:2; this machine has 2 GPU\(s\)"):
        present_gpu(2, FakeGpu())


def test_what_is_far_on_a_gpu_is_what_its_shared_cache_does_not_hold() -> None:
    assert (caches_of("cuda", FakeGpu()).own_bytes, caches_of("cuda", FakeGpu()).last_bytes) == (0, 50 << 20)


def test_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert free_bytes("cuda", FakeGpu()) == 12345
    assert 0 < free_bytes("cpu") <= host_bytes() * 64
    for text, expected in (("MemTotal: 9 kB\nMemAvailable:   7 kB\n", 7 * 1024), ("", host_bytes())):
        monkeypatch.setattr(hardware, "open", lambda *a, text=text, **k: io.StringIO(text), raising=False)
        assert free_bytes("cpu") == expected


def test_torch_is_asked_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answering(name: str, answer: Any) -> None:
        monkeypatch.setattr(torch.cuda, name, lambda *a, **k: asked.append(name) or answer)

    answering("is_available", True)
    answering("device_count", 3)
    answering("mem_get_info", (5, 9))
    answering("memory_allocated", 7)
    answering("max_memory_allocated", 8)
    answering("reset_peak_memory_stats", None)
    answering("synchronize", None)
    answering("is_initialized", False)
    cuda = Cuda()
    assert (cuda.count(), cuda.free_bytes(), cuda.allocated_bytes(), cuda.peak_bytes()) == (3, 5, 7, 8)
    cuda.restart_peak()
    assert asked[-1] == "reset_peak_memory_stats"
    cuda.synchronize()
    assert "synchronize" not in asked  # it was never used: asking would start it
    answering("is_initialized", True)
    cuda.synchronize()
    assert asked[-1] == "synchronize"
    answering("current_device", 1)
    answering("memory_reserved", 3)
    assert (cuda.current(), cuda.used_bytes(), cuda.reserved_bytes(), cuda.place()) == (1, 4, 3, "cuda")
    answering("set_device", None)
    answering("empty_cache", None)
    cuda.use(2)
    cuda.let_go()
    assert asked[-2:] == ["set_device", "empty_cache"]
    answering("is_available", False)
    assert cuda.count() == 0


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"
            "GCC version: gcc version 12.2.0\n",
            "535.104.05",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n", "570.86.15"),
        ("something else\n", ""),
        (None, ""),
    ],
)
def test_the_drivers_version(
    text: str | None, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "version"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(hardware, "_DRIVER", file)
    assert Cuda().driver() == version
