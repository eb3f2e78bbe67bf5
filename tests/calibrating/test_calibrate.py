"""`trainfit calibrate`: on a stand-in for a GPU, on this machine's processor for real, and mistakes."""

from __future__ import annotations

import gc
import json
import math
import os
import weakref
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_machine import FakeMachine
from pretend_gpu import SMALL, PretendGpu
from typer.testing import CliRunner, Result

import trainfit
from trainfit.api import gauge_machine
from trainfit.api.gauge_machine import calibrate_machine
from trainfit.basics.doing import heard_by
from trainfit.calibrating import checking, gauging, host_costs, instrument, probing
from trainfit.calibrating.calibration_result import CalibrationResult, with_uncertainty
from trainfit.calibrating.checking import CheckedStep
from trainfit.calibrating.instrument import gpu_instrument
from trainfit.calibrating.probes import ProbeSizes, Wanted, attention, memory, products
from trainfit.cli import commands as cli
from trainfit.costs import this_machine
from trainfit.devices.device_file import device_json, save_device
from trainfit.devices.device_table import Device, find_device
from trainfit.devices.efficiency import Constants
from trainfit.errors import DeviceError, OptionError
from trainfit.timing import host

QUIET = FakeMachine(0.0).meter()
REGIONS = ("region_call", "region_op", "checkpoint_call", "checkpoint_op")
"""What a test of its own measures for real."""
TINY_STEPS = (("gpt2-tiny", {"batch": 1, "seq": 16}), ("vit-tiny", {"batch": 1}))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Measure little: small tensors, few steps, one thread."""
    monkeypatch.setattr(instrument, "GPU_SIZES", SMALL)
    monkeypatch.setattr(instrument, "CPU_SIZES", replace(SMALL, side=512))
    monkeypatch.setattr(gauging, "GPU_STEPS", TINY_STEPS)
    monkeypatch.setattr(gauging, "CPU_STEPS", TINY_STEPS[:1])
    monkeypatch.setattr(host, "_BUDGET_SECONDS", 0.02)
    monkeypatch.setattr(host, "_ISSUED_STEPS", 4)
    monkeypatch.setattr(host_costs, "_LAUNCHES", 5)
    monkeypatch.setattr(host, "MEDIUM", host.TINY)
    monkeypatch.setattr(instrument, "_FAR", 0)
    for module in (host, host_costs):
        monkeypatch.setattr(module, "region_seconds", lambda: dict.fromkeys(REGIONS, 1e-4))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def shared() -> dict[str, Any]:
    """What one run of the stand-in found, for several tests to look at."""
    return {}


def on_stand_in(shared: dict[str, Any]) -> tuple[CalibrationResult, PretendGpu, list[str]]:
    if not shared:
        gpu, stages = PretendGpu(), []
        with heard_by(stages.append, lambda done, total, name: None):
            result = calibrate_machine("cuda", 0.002, cuda=gpu, meter=FakeMachine(0.57).meter())
        shared["found"] = result, gpu, stages
    found: tuple[CalibrationResult, PretendGpu, list[str]] = shared["found"]
    return found


# A GPU, pretended -----------------------------------------------------------------------------------------


def test_a_gpu_becomes_a_device_file_that_estimate_takes(shared: dict[str, Any], tmp_path: Path) -> None:
    result, _, _ = on_stand_in(shared)
    device = result.device
    assert (device.name, device.kind, device.architecture) == ("h100-sxm-80gb (calibrated)", "cuda", "sm_90")
    assert (device.memory_bytes, device.sm_count, device.calibrated) == (16 << 30, 132, True)
    assert device.context_bytes == 400 << 20
    assert device.usable_bytes == (16 << 30) - (400 << 20)
    sheet = find_device("h100")
    assert device.flops["bf16"] == sheet.flops["bf16"] and device.matmul_share is not None
    assert set(device.constants) <= {known.name for known in fields(Constants)}
    assert all(0 < value < math.inf for value in device.constants.values())
    for name in ("stream_share", "forward_op", "view_op", "region_op"):
        assert name in device.constants, name
    assert all(spread >= 0 for spread in device.spreads.values())
    assert {"bf16", "bandwidth", "stream_share", "forward_op"} <= set(device.spreads)
    for words in (
        "trainfit calibrate on 20",
        f"torch {torch.__version__}",
        "driver 570.12.1",
        "no GPU had run",
    ):
        assert words in device.source
    path = tmp_path / "gpu.json"
    save_device(device, path)
    assert find_device(str(path)) == device
    options = trainfit.StepOptions(batch=1, seq=16)
    estimate = trainfit.estimate("gpt2-tiny", device=str(path), options=options)
    assert estimate.time is not None and estimate.time.step_seconds > 0


def test_figures_stand_beside_the_datasheet(shared: dict[str, Any]) -> None:
    result, _, _ = on_stand_in(shared)
    figures = {figure.name: figure for figure in result.figures}
    sheet = find_device("h100")
    assert set(figures) == {
        "fp32 product",
        "tf32 product",
        "bf16 product",
        "fp16 product",
        "memory",
        "CUDA context",
    }
    for rate in ("fp32", "tf32", "bf16", "fp16"):
        figure = figures[f"{rate} product"]
        assert figure.reference == sheet.flops[rate] and figure.unit == "FLOP/s" and figure.value > 0
        assert figure.ratio == figure.value / sheet.flops[rate]
        assert figure.spread is not None and figure.spread >= 0
    assert figures["memory"].reference == sheet.bandwidth_bytes_per_second
    assert figures["CUDA context"].value == 400 << 20
    names = [figure.name for figure in result.constants]
    fixed = {"uncertainty", "host_uncertainty", "memory_share", "host_factor"}
    assert set(names) | fixed == set(result.device.constants)
    assert not set(names) & set(result.undetermined)


def test_real_steps_decide_the_range(shared: dict[str, Any]) -> None:
    result, _, _ = on_stand_in(shared)
    assert [(step.target, step.options) for step in result.steps] == [
        ("gpt2-tiny", "--batch 1 --seq 16"),
        ("vit-tiny", "--batch 1"),
    ]
    worst = max(max(step.ratio, 1 / step.ratio) for step in result.steps) - 1
    assert result.device.constants["uncertainty"] == pytest.approx(max(worst, Constants().uncertainty))


def test_the_gpu_is_kept_busy_waited_for_and_put_back(shared: dict[str, Any]) -> None:
    _, gpu, stages = on_stand_in(shared)
    assert gpu.log[0] == "use 0" and gpu.log[-1] == "use 0"
    first = gpu.log.index("sleep")
    assert gpu.log[first : first + 4] == ["sleep", "record", "record", "wait"]
    assert "let go" in gpu.log and "synchronize" in gpu.log
    for stage in ("measuring memory", "measuring matrix products", "measuring convolutions"):
        assert stage in stages
    assert any(stage.startswith("checking against real steps: gpt2-tiny --batch 1") for stage in stages)


def test_a_busy_machine_is_not_measured_in_silence(shared: dict[str, Any]) -> None:
    result, _, _ = on_stand_in(shared)
    assert result.other_load == pytest.approx(0.57)
    assert any("other work took 57% of this machine's processors" in text for text in result.warnings)
    assert "other work took 57% of the processors" in result.device.source
    assert any("no GPU has run this calibration yet" in text for text in result.warnings)


def test_the_gpu_that_is_named_is_the_current_one_meanwhile() -> None:
    gpu = PretendGpu()
    with gpu_instrument(1, gpu) as found:
        assert gpu.number == 1 and found.device.name == "NVIDIA Q9999" and not found.known
        assert found.device.cache_bytes == 1 << 20
    assert gpu.number == 0


@pytest.mark.parametrize(
    ("name", "architecture", "rates"),
    [
        ("Tesla V100-SXM2-16GB", "sm_70", ("fp32", "fp16")),
        ("NVIDIA A10", "sm_86", ("fp32", "tf32", "bf16", "fp16")),
        ("AMD Instinct MI300X", "sm_94", ("fp32", "bf16", "fp16")),
    ],
)
def test_which_products_a_gpu_has(name: str, architecture: str, rates: tuple[str, ...]) -> None:
    with gpu_instrument(0, PretendGpu((name,))) as found:
        assert found.rates == rates
        assert found.rate_of_steps == rates[-1] if "bf16" not in rates else "bf16"


def test_other_programs_on_the_gpu_are_said() -> None:
    gpu = PretendGpu()
    gpu.used = 9 << 30
    with gpu_instrument(0, gpu) as found:
        context, (warning,) = gauging._context(found)
    assert context is None
    assert "the driver counts 8.51 GiB beyond what torch has reserved: other programs" in warning


# Memory ---------------------------------------------------------------------------------------------------


def test_sizes_fit_into_what_is_free() -> None:
    large = ProbeSizes(side=8192, stream_bytes=1 << 30, images=64, pixels=56, sequences=16, tokens=1024)
    assert instrument._that_fit(large, 80 << 30) == large
    assert instrument._that_fit(large, 40 << 20) == replace(large, stream_bytes=1 << 20)
    assert instrument._that_fit(large, 1) == replace(large, stream_bytes=1 << 16)


def test_halved_sizes_end_before_they_say_nothing() -> None:
    sizes = replace(SMALL, side=512, stream_bytes=4096, images=2, sequences=1)
    halved = sizes.halved()
    assert halved == replace(sizes, side=256, stream_bytes=2048, images=1)
    assert halved.halved() == replace(halved, side=128, stream_bytes=1024)
    assert replace(sizes, side=255).halved() is None


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("can't allocate memory: you tried")]
)
def test_where_memory_runs_out_smaller_tensors_are_used(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a GPU on which nothing with more than 200 rows fits, THEN sides are halved until it does."""
    asked: list[int] = []
    real = probing._filled

    def filled(wanted: Wanted, place: str) -> torch.Tensor:
        asked.append(max(wanted.shape))
        if max(wanted.shape) > 200:
            raise error
        return real(wanted, place)

    monkeypatch.setattr(probing, "_filled", filled)
    with gpu_instrument(0, PretendGpu()) as found:
        found = replace(found, sizes=replace(SMALL, side=512))
        readings = probing.read_group("products", lambda sizes: products(sizes, ("fp32",)), found, 0.0)
        assert readings.sizes.side == 128 and ("fp32_large", "forward") in readings.timings
        assert asked[:3] == [512, 256, 128]
        monkeypatch.setattr(probing, "_filled", lambda *_: (_ for _ in ()).throw(error))
        with pytest.raises(DeviceError, match="has not enough free memory to measure products, even with"):
            probing.read_group("products", lambda sizes: products(sizes, ("fp32",)), found, 0.0)


def test_memory_that_runs_out_in_a_call_is_noticed_too() -> None:
    """GIVEN a probe whose result does not fit, although its inputs do."""
    with gpu_instrument(0, PretendGpu()) as found:
        found = replace(found, sizes=replace(SMALL, side=256))

        def make(sizes: ProbeSizes) -> tuple[Any, ...]:
            def call(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
                if len(a) > 128:
                    raise torch.OutOfMemoryError("CUDA out of memory.")
                return torch.mm(a, b)

            return tuple(replace(probe, call=call) for probe in products(sizes, ("fp32",))[:1])

        assert probing.read_group("products", make, found, 0.0).sizes.side == 128


@pytest.mark.parametrize("largest", [1 << 30, 64])
def test_tensors_are_freed_when_their_group_is_done(largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where memory ran out first, and without Python's collector: the next group needs the memory."""
    made: list[weakref.ref[torch.Tensor]] = []
    real = probing._filled

    def filled(wanted: Wanted, place: str) -> torch.Tensor:
        if len(made) > 4 and wanted.shape[0] > largest:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        tensor = real(wanted, place)
        made.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(probing, "_filled", filled)
    gc.collect()
    gc.disable()
    try:
        with gpu_instrument(0, PretendGpu()) as found:
            try:
                probing.read_group("attention", lambda sizes: attention(sizes, ("fp32",)), found, 0.0)
                probing.read_group("products", lambda sizes: products(sizes, ("fp32",)), found, 0.0)
            except DeviceError:
                assert largest == 64
        assert len(made) > 4 and all(reference() is None for reference in made)
    finally:
        gc.enable()


def test_what_cannot_be_run_is_named_and_the_rest_is_measured() -> None:
    with gpu_instrument(0, PretendGpu()) as found:

        def make(sizes: ProbeSizes) -> tuple[Any, ...]:
            def refuse(*_: Any) -> None:
                raise RuntimeError("no kernel image is available\nfor this device")

            first, *rest = memory(sizes)
            return (replace(first, call=refuse), *rest)

        readings = probing.read_group("memory", make, found, 0.0)
    assert readings.failures == {"copy": "no kernel image is available"}
    assert ("add", "forward") in readings.timings and ("copy", "forward") not in readings.timings


def test_a_step_that_does_not_fit_is_left_out_and_said() -> None:
    gpu = PretendGpu()
    with gpu_instrument(0, gpu) as found:
        gpu.free = 1000
        device = find_device("h100")
        steps, left_out = checking.check_steps(TINY_STEPS[:1], device, found, 0.0)
    assert steps == ()
    assert left_out == (
        "gpt2-tiny --batch 1 --seq 16 was not run to check the figures: it needs more memory than is free.",
    )


def test_a_step_that_does_not_fit_runs_with_half_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a GPU with memory for one sample, THEN of a batch of four one sample is run."""
    needed = {
        batch: trainfit.estimate(
            "vit-tiny", device="h100", options=trainfit.StepOptions(batch=batch), steps=1
        ).peak_bytes
        for batch in (1, 2)
    }
    gpu = PretendGpu()
    gpu.free = (needed[1] + needed[2]) // 2 * 10 // 7
    with gpu_instrument(0, gpu) as found:
        steps, left_out = checking.check_steps((("vit-tiny", {"batch": 4}),), find_device("h100"), found, 0.0)
    assert [step.options for step in steps] == ["--batch 1"] and left_out == ()


def test_what_a_real_step_fails_with_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED\nmore")

    monkeypatch.setattr(checking, "_run", fail)
    with gpu_instrument(0, PretendGpu()) as found:
        steps, (warning,) = checking.check_steps(TINY_STEPS[:1], find_device("h100"), found, 0.0)
    assert steps == () and warning.endswith("check the figures: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED")


def test_steps_in_mixed_precision_use_the_one_that_the_device_has() -> None:
    asked = {"batch": 2, "dtype": checking.MIXED}
    with gpu_instrument(0, PretendGpu()) as found:
        for rates, dtype in (
            (("fp32", "fp16"), "fp16-autocast"),
            (("fp32", "bf16", "fp16"), "bf16-autocast"),
        ):
            precise = checking._in_its_precision(asked, replace(found, rates=rates))
            assert precise == {"batch": 2, "dtype": dtype}
        assert checking._in_its_precision(asked, replace(found, rates=("fp32",))) is None
        assert checking._in_its_precision({"batch": 2}, found) == {"batch": 2}


def test_the_range_is_never_narrower_than_what_is_known_in_general() -> None:
    device, general = find_device("h100"), Constants()

    def uncertainty(*ratios: float) -> float:
        steps = tuple(CheckedStep("x", "", ratio, 1.0, 0.0, 3) for ratio in ratios)
        return with_uncertainty(device, steps).constants["uncertainty"]

    assert uncertainty(1.01, 0.99) == general.uncertainty
    assert uncertainty(1.4, 0.99) == pytest.approx(0.4)
    assert uncertainty(1.4, 0.5) == pytest.approx(1.0)
    assert uncertainty() == general.uncalibrated_uncertainty


# This processor, for real ---------------------------------------------------------------------------------


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


@pytest.fixture
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("in_an_empty_folder")
def test_a_processor_is_calibrated_and_its_file_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("calibrate", "--device", "cpu", "--minutes", "0.002", "-o", "cpu.json", "--json", "out.json")
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    assert "written to cpu.json. Use it as --device cpu.json" in said
    assert "1 real steps were predicted" in said and "gpt2-tiny --batch 1 --seq 16" in said
    written = json.loads(Path("out.json").read_text())
    for key in ("schema", "device", "torch", "seconds", "warnings", "figures", "constants", "steps"):
        assert key in written
    assert written["kind"] == "cpu" and written["file"] == "cpu.json"
    assert {"memory", "matrix products", "host", "real steps", "total"} <= set(written["seconds"])
    for figure in written["figures"] + written["constants"]:
        assert figure["value"] > 0 and figure["unit"] and math.isfinite(figure["value"])
    assert {figure["unit"] for figure in written["figures"]} == {"FLOP/s", "bytes/s"}
    file = json.loads(Path("cpu.json").read_text())
    assert file == written["device_file"]
    assert (file["kind"], file["calibrated"], file["sm_count"]) == ("cpu", True, 1)
    assert file["source"].startswith("measured by trainfit calibrate on 20")

    # On another machine, nothing about that one is asked.
    for name in ("with_speed", "host"):
        monkeypatch.setattr(this_machine, name, lambda *_, **__: pytest.fail("this machine was measured"))
    arguments = ("estimate", "gpt2-tiny", "--batch", "1", "--seq", "16", "--device", "cpu.json")
    result = run(*arguments, "--json", "estimate.json")
    assert result.exit_code == 0, result.output
    slow = {**file, "flops": {name: rate / 1000 for name, rate in file["flops"].items()}}
    Path("slow.json").write_text(json.dumps(slow))
    assert run(*arguments[:-1], "slow.json", "--json", "slower.json").exit_code == 0
    seconds = [
        json.loads(Path(name).read_text())["step_seconds"] for name in ("estimate.json", "slower.json")
    ]
    assert seconds[1] > 2 * seconds[0] > 0


def test_a_file_of_a_processor_without_speed_is_completed_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN files with both, one or none of speed and host, THEN what is there is not measured."""
    measured: list[str] = []
    speed = {"bandwidth_bytes_per_second": 1e10, "flops": {"fp32": 1e11}, "sm_count": 2}
    names = ("forward_op", "backward_op", "optimizer_op", "view_op", "module_call", "tensor")
    some_host = this_machine.Host(True, *[1e-6] * 6)

    def with_speed(device: Device, **_: Any) -> tuple[Device, float]:
        measured.append("speed")
        return replace(device, bandwidth_bytes_per_second=1e9, flops={"fp32": 1e9}, sm_count=1), 0.0

    def host_of_this(**_: Any) -> tuple[Any, float]:
        measured.append("host")
        return some_host, 0.0

    monkeypatch.setattr(this_machine, "with_speed", with_speed)
    monkeypatch.setattr(this_machine, "host", host_of_this)
    options = trainfit.StepOptions(batch=1, seq=16)
    trace = trainfit.capture("gpt2-tiny", options=options)
    base = {"name": "other", "kind": "cpu", "memory_bytes": 1 << 34}
    for entry, expected in (
        (base, ["speed", "host"]),
        (base | speed, ["host"]),
        (base | {"constants": dict.fromkeys(names, 1e-5)}, ["speed"]),
        (base | speed | {"constants": dict.fromkeys(names, 1e-5)}, []),
    ):
        measured.clear()
        path = tmp_path / "cpu.json"
        path.write_text(json.dumps(entry))
        table = trainfit.price(trace, str(path))
        assert measured == expected
        assert table.host.runs_kernels
        assert table.host.forward_op == (1e-5 if "constants" in entry else 1e-6)


# Mistakes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("minutes", [0, -1, 0.0, math.nan, math.inf, 121, True, "3"])
def test_impossible_minutes(minutes: Any) -> None:
    with pytest.raises(OptionError, match="--minutes must be a number above 0 and at most 120, got"):
        trainfit.calibrate("cpu", minutes=minutes)


@pytest.mark.parametrize(
    "name", ["h100", "my-gpu.json", "", "cuda:", "cuda:x", "mps", "gpu", "cuda:99999", 7]
)
def test_only_a_device_of_this_machine_can_be_measured(name: Any) -> None:
    with pytest.raises(DeviceError, match=r"calibrate measures a device of this machine, and .* write cuda"):
        trainfit.calibrate(name)


def test_no_gpu_and_a_gpu_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="no CUDA GPU in this machine"):
        trainfit.calibrate("cuda")
    with pytest.raises(DeviceError, match=r"there is no cuda:2; this machine has 2 GPU\(s\)"):
        calibrate_machine("cuda:2", cuda=PretendGpu())


@pytest.mark.usefixtures("in_an_empty_folder")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "cpu", "--minutes", "0"), "--minutes must be a number above 0"),
        (("--device", "h100"), "calibrate measures a device of this machine"),
        (("--device", "cpu", "-o", "no/such/gpu.json"), "--output no/such/gpu.json: there is no folder"),
        (("--device", "cpu", "-o", "."), "--output needs the name of a file"),
        (("--device", "cpu", "--json", "no/such.json"), "--json no/such.json"),
    ],
)
def test_mistakes_on_the_command_line_are_one_message_before_anything_is_measured(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gauge_machine, "gauge", lambda *_: pytest.fail("something was measured"))
    result = run("calibrate", *arguments)
    assert result.exit_code == 2 and result.stdout == ""
    assert message in " ".join(result.stderr.split())
    assert not list(Path().iterdir())


@pytest.mark.usefixtures("in_an_empty_folder")
def test_a_folder_that_cannot_be_written_to_is_noticed_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gauge_machine, "gauge", lambda *_: pytest.fail("something was measured"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    result = run("calibrate", "--device", "cpu", "-o", "cpu.json")
    assert result.exit_code == 2
    assert "--output cpu.json: '.' cannot be written to." in " ".join(result.stderr.split())


@pytest.mark.usefixtures("in_an_empty_folder")
def test_an_interrupted_calibration_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gauging, "host_constants", interrupted)
    Path("old.json").write_text("precious")
    arguments = (
        "calibrate",
        "--device",
        "cpu",
        "--minutes",
        "0.001",
        "-o",
        "old.json",
        "--json",
        "figures.json",
    )
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (130, "")
    assert [path.name for path in Path().iterdir()] == ["old.json"]
    assert Path("old.json").read_text() == "precious"


def test_only_what_is_not_usual_is_in_a_file() -> None:
    device = Device("mine", "cpu", 1 << 30, flops={"fp32": 1e9}, constants={"tensor": 1e-6})
    assert device_json(device) == {
        "name": "mine",
        "kind": "cpu",
        "memory_bytes": 1 << 30,
        "flops": {"fp32": 1e9},
        "constants": {"tensor": 1e-6},
    }
