"""Devices by the names that people and drivers use, this machine, and files of the user's own."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from trainfit.devices.architectures import threads_per_multiprocessor
from trainfit.devices.device_table import CONTEXT_BYTES, Device, find_device, known_devices
from trainfit.errors import DeviceError

GIB = 2**30
ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("h100", "h100-sxm-80gb"),
        ("H100", "h100-sxm-80gb"),
        ("h100-sxm-80gb", "h100-sxm-80gb"),
        ("H100 SXM", "h100-sxm-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie-80gb"),
        ("NVIDIA H100 NVL", "h100-nvl-94gb"),
        ("NVIDIA H200", "h200-sxm-141gb"),
        ("NVIDIA B200", "b200-sxm-180gb"),
        ("NVIDIA GB200", "gb200-189gb"),
        ("a100-40gb", "a100-sxm-40gb"),
        ("A100_80GB", "a100-sxm-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("Tesla V100-SXM2-16GB", "v100-sxm-16gb"),
        ("Tesla T4", "t4"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("rtx4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "rtx-4070-ti-super"),
        ("NVIDIA RTX A6000", "rtx-a6000"),
        ("AMD Instinct MI300X", "mi300x-192gb"),
        ("AMD Instinct MI325X OAM", "mi325x-256gb"),
        ("AMD Instinct MI355X", "mi355x-288gb"),
        ("AMD Instinct MI300A", "mi300a-128gb"),
        ("mi250x", "mi250x-64gb"),
        ("mi250", "mi250-64gb"),
        ("NVIDIA GeForce RTX 3060", "rtx-3060-12gb"),
        ("NVIDIA GeForce RTX 3080", "rtx-3080-10gb"),
        ("3080", "rtx-3080-10gb"),
        ("3080 ti", "rtx-3080-ti-12gb"),
        ("RTX3080Ti", "rtx-3080-ti-12gb"),
        ("3090", "rtx-3090"),
        ("rtx 3090 ti", "rtx-3090-ti-24gb"),
        ("4070 Ti", "rtx-4070-ti-12gb"),
        ("4070 Ti Super", "rtx-4070-ti-super"),
        ("rtx-4080", "rtx-4080-16gb"),
        ("NVIDIA GeForce RTX 4080 SUPER", "rtx-4080-super-16gb"),
        ("5080", "rtx-5080-16gb"),
        ("NVIDIA GeForce RTX 2080 Ti", "rtx-2080-ti-11gb"),
        ("NVIDIA TITAN RTX", "titan-rtx-24gb"),
        ("Quadro RTX 8000", "quadro-rtx-8000-48gb"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada-48gb"),
        ("6000 Ada", "rtx-6000-ada-48gb"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000-96gb"),
        ("pro 6000", "rtx-pro-6000-96gb"),
        ("a6000", "rtx-a6000"),
        ("NVIDIA RTX A5000", "rtx-a5000-24gb"),
        ("NVIDIA L40", "l40"),
        ("NVIDIA A30", "a30"),
        ("NVIDIA H20", "h20-96gb"),
        ("NVIDIA H800", "h800-sxm-80gb"),
        ("NVIDIA A800-SXM4-80GB", "a800-sxm-80gb"),
        ("NVIDIA GH200 480GB", "gh200-96gb"),
        ("NVIDIA B300 SXM6 AC", "b300-sxm-288gb"),
    ],
)
def test_names_are_found_the_way_they_are_written(written: str, name: str) -> None:
    assert find_device(written).name == name


def test_every_device_is_found_by_its_own_name_and_aliases() -> None:
    for device in known_devices():
        for name in (device.name, device.name.upper(), *device.aliases):
            assert find_device(name) == device


def test_the_table_is_plausible() -> None:
    names = [device.name for device in known_devices()]
    assert len(set(names)) == len(names) >= 50
    for device in known_devices():
        assert device.kind == "cuda"
        assert 7 * GIB < device.memory_bytes < 300 * GIB
        assert device.bandwidth_bytes_per_second is not None
        assert 3e11 <= device.bandwidth_bytes_per_second <= 8e12
        assert 8e12 <= device.flops["fp32"] < device.flops["fp16"] <= 2.6e15
        assert device.sm_count and re.fullmatch(r"sm_\d{2,3}|gfx\w{3}", device.architecture)
        assert "datasheet" in device.source and "memory" in device.source
        # torch's switch for TF32 makes nothing faster on AMD's chips.
        assert "tf32" not in device.flops or device.architecture.startswith("sm_")
        # Tensor cores have bfloat16 and TF32 since compute capability 8.0.
        if device.architecture.startswith("sm_"):
            modern = int(device.architecture.removeprefix("sm_")) >= 80
            assert ("bf16" in device.flops) == ("tf32" in device.flops) == modern


def test_a_share_of_the_peak_is_measured_or_fitted_and_never_taken_from_another_kind_of_card() -> None:
    for device in known_devices():
        words = ("fastest matrix product measured", "share of the peak fitted on published step times")
        assert (device.matmul_share is not None) == any(word in device.source for word in words)
    assert find_device("rtx-4090").matmul_share is None


def test_calibrated_are_the_devices_whose_step_times_were_fitted_on() -> None:
    published = json.loads((ROOT / "benchmarks" / "published" / "step_times.json").read_text())["rows"]
    gpus = {"L40S": "l40s", "RTX3090": "rtx-3090", "a100_40gb": "a100-sxm-40gb"}
    gpus |= {"H100-SXM5-80GB": "h100-sxm-80gb", "H200-SXM-141GB": "h200-sxm-141gb", "MI325X": "mi325x-256gb"}
    fitted = {gpus[row["config"]["gpu"]] for row in published}
    # And those of clusters; their other GPUs are among the ones above, or have too few rows.
    fitted.add("h100-hbm2e-96gb")
    assert {device.name for device in known_devices() if device.calibrated} == fitted


@pytest.mark.parametrize("name", ["mps", "MPS", "mps:0"])
def test_apples_gpus_are_refused_in_one_line(name: str) -> None:
    with pytest.raises(
        DeviceError, match=r"Apple's GPUs \(mps\) cannot be predicted: .* --device cpu"
    ) as caught:
        find_device(name)
    assert "\n" not in str(caught.value)


def test_a_gpu_keeps_part_of_its_memory_for_the_cuda_context() -> None:
    device = find_device("h100")
    assert device.usable_bytes == device.memory_bytes - CONTEXT_BYTES
    assert 0.3 * GIB < CONTEXT_BYTES < 0.6 * GIB
    assert Device("small", "cuda", 1000).usable_bytes == 0
    assert Device("measured", "cuda", 10 * GIB, context_bytes=GIB).usable_bytes == 9 * GIB


def test_a_gpu_keeps_a_margin_and_a_cpu_none() -> None:
    """4 % of 1,000,000 usable bytes are 40,000: beyond them it fits, within them nobody knows."""
    device = Device("made up", "cuda", CONTEXT_BYTES + 1_000_000)
    assert (device.margin_bytes, device.default_budget_bytes) == (40_000, 960_000)
    peaks = (960_000, 960_001, 1_000_000, 1_000_001)
    expected = ["fits", "too close to call", "too close to call", "does not fit"]
    assert [device.verdict(peak) for peak in peaks] == expected
    cpu = Device("cpu", "cpu", 1_000_000)
    assert (cpu.margin_bytes, cpu.default_budget_bytes) == (0, 1_000_000)
    assert [cpu.verdict(peak) for peak in (1_000_000, 1_000_001)] == ["fits", "does not fit"]


@pytest.mark.parametrize(
    ("architecture", "threads"),
    [
        *[("sm_70", 2048), ("sm_75", 1024), ("sm_80", 2048), ("sm_86", 1536), ("sm_89", 1536)],
        *[("sm_90", 2048), ("sm_100", 2048), ("sm_120", 1536), ("gfx942", 2048), ("", 2048)],
    ],
)
def test_a_multiprocessor_holds_so_many_threads(architecture: str, threads: int) -> None:
    assert threads_per_multiprocessor(architecture) == threads


def test_cpu_is_this_machine() -> None:
    device = find_device("CPU")
    assert (device.name, device.kind) == ("cpu", "cpu")
    assert device.usable_bytes == device.memory_bytes > GIB // 4
    assert device.sm_count and device.sm_count >= 1


@pytest.mark.parametrize("name", ["a100", "v100", "rtx", "rtx 6000"])
def test_an_ambiguous_name_lists_the_candidates(name: str) -> None:
    with pytest.raises(DeviceError) as caught:
        find_device(name)
    message = str(caught.value)
    candidates = [
        device.name
        for device in known_devices()
        if all(word in device.name.split("-") for word in name.split())
    ]
    assert len(candidates) > 1
    assert f"{name!r} could be any of {', '.join(candidates)}; name one of them." == message


def test_an_unknown_name_lists_what_is_close() -> None:
    with pytest.raises(DeviceError, match=r"there is no device 'l40x'\. Did you mean l40s? or l40s?"):
        find_device("l40x")


@pytest.mark.parametrize("name", ["", "--", "quantum", "nvidia"])
def test_a_name_unlike_any_lists_all(name: str) -> None:
    with pytest.raises(DeviceError) as caught:
        find_device(name)
    assert f"there is no device {name!r}." in str(caught.value)
    assert all(device.name in str(caught.value) for device in known_devices())


def test_cuda_without_a_gpu_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match=r"no CUDA GPU in this machine; name one, e\.g\. --device h100"):
        find_device("cuda")


@dataclasses.dataclass
class FakeProperties:
    """What torch reports about a GPU."""

    name: str
    total_memory: int = 79 * GIB
    multi_processor_count: int = 99
    L2_cache_size: int = 50 << 20
    major: int = 9
    minor: int = 0


@pytest.mark.parametrize(
    ("reported", "name", "bandwidth"),
    [("NVIDIA H100 80GB HBM3", "h100-sxm-80gb", 3.35e12), ("NVIDIA Q9999", "NVIDIA Q9999", None)],
)
def test_cuda_is_the_present_gpu(
    monkeypatch: pytest.MonkeyPatch, reported: str, name: str, bandwidth: float | None
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: FakeProperties(reported))
    device = find_device("cuda")
    assert (device.name, device.memory_bytes, device.sm_count) == (name, 79 * GIB, 99)
    assert device.bandwidth_bytes_per_second == bandwidth
    assert device.architecture == "sm_90"
    assert device.source.startswith("this machine")
    with pytest.raises(DeviceError, match="there is no cuda:3; this machine has 1 GPU"):
        find_device("cuda:3")


def write(folder: Path, content: Any) -> str:
    file = folder / "device.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(file)


def test_a_file_of_the_users_own(tmp_path: Path) -> None:
    entry = {
        "name": "half an H100",
        "memory_bytes": "40GiB",
        "bandwidth_bytes_per_second": 1.5e12,
        "flops": {"bf16": 4e14},
        "nvlink_bytes_per_second": None,
    }
    path = write(tmp_path, entry)
    device = find_device(path)
    assert device == Device(
        name="half an H100",
        kind="cuda",
        memory_bytes=40 * GIB,
        bandwidth_bytes_per_second=1.5e12,
        flops={"bf16": 4e14},
        source=path,
    )
    assert hash(device) == hash(find_device(path))


def test_an_entry_of_the_table_is_a_valid_file(tmp_path: Path) -> None:
    for device in known_devices():
        assert find_device(write(tmp_path, dataclasses.asdict(device))) == device


GOOD = {"name": "mine", "memory_bytes": GIB}


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        ("{", "not JSON"),
        ("", "not JSON"),
        ("9" * 5000, "not JSON"),
        ("[" * 100_000, "not JSON"),
        ([], "expected an object, found a list"),
        ({}, "the field 'name' is missing"),
        ({"name": "mine"}, "the field 'memory_bytes' is missing"),
        ({**GOOD, "memory": 1}, "there is no field memory (did you mean 'memory_bytes'?)"),
        ({**GOOD, "colour": 1}, "there is no field colour (they are name, kind, memory_bytes"),
        ({**GOOD, "name": " "}, "name: expected text, found ' '"),
        ({**GOOD, "name": 7}, "name: expected text, found 7"),
        ({**GOOD, "kind": "tpu"}, "kind: expected one of cuda, cpu, found 'tpu'"),
        ({**GOOD, "memory_bytes": -1}, "memory_bytes: expected a number above zero, found -1"),
        (
            {**GOOD, "memory_bytes": 1.5},
            "memory_bytes: expected a whole number, found 1.5",
        ),
        ({**GOOD, "memory_bytes": True}, "memory_bytes: expected a whole number, found"),
        ({**GOOD, "memory_bytes": 10**30}, "memory_bytes: expected at most 62 bits, found 1000"),
        ({**GOOD, "memory_bytes": "lots"}, "memory_bytes: 'lots' is not a size"),
        (
            {**GOOD, "bandwidth_bytes_per_second": 0},
            "per_second: expected a number above zero, found 0",
        ),
        ('{"name": "m", "memory_bytes": 1, "bandwidth_bytes_per_second": NaN}', "is truncated or not JSON"),
        (
            {**GOOD, "bandwidth_bytes_per_second": 10**400},
            "per_second: expected a finite number, found 1000",
        ),
        ({**GOOD, "flops": 3}, "flops: expected an object, found 3"),
        (
            {**GOOD, "flops": {"bf61": 1e12}},
            "flops: expected one of fp64, fp32, tf32, bf16, fp16",
        ),
        ({**GOOD, "flops": {"bf16": "fast"}}, "flops.bf16: expected a finite number, found 'fast'"),
        ({**GOOD, "context_bytes": 0}, "context_bytes: expected a number above zero, found 0"),
        ({**GOOD, "spreads": {"bf16": -0.1}}, "spreads.bf16: expected a number from zero, found -0.1"),
        ({**GOOD, "spreads": [1]}, "spreads: expected an object, found a list"),
        ({**GOOD, "sm_count": 0}, "sm_count: expected a number above zero, found 0"),
        ({**GOOD, "aliases": "x"}, "aliases: expected a list, found 'x'"),
        (
            {**GOOD, "constants": {"stream_sahre": 0.9}},
            "constants: there is no constant 'stream_sahre' (did you mean 'stream_share'?)",
        ),
        (
            {**GOOD, "constants": {"xyz": 0.9}},
            "constants: there is no constant 'xyz' (there are best_share, in",
        ),
        (
            {**GOOD, "constants": {"tile_fill": 0}},
            "constants.tile_fill: expected a number above zero, found 0",
        ),
        (
            {**GOOD, "constants": {"tile_fill": "a"}},
            "constants.tile_fill: expected a finite number, found 'a'",
        ),
        ({**GOOD, "constants": [1]}, "constants: expected an object, found a list"),
        # What is shown of a value is no longer than a line.
        ({**GOOD, "flops": "x" * 5000}, "flops: expected an object, found 'xxx"),
        ({**GOOD, "memory_bytes": "x" * 5000}, "is not a size"),
    ],
)
def test_a_wrong_file_is_one_clear_error(tmp_path: Path, content: Any, fragment: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(DeviceError) as caught:
        find_device(path)
    assert path in str(caught.value)
    assert fragment in str(caught.value)
    assert len(str(caught.value)) < len(path) + 1000


def test_a_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="cannot be read: No such file"):
        find_device(str(tmp_path / "none.json"))
    with pytest.raises(DeviceError, match="cannot be read: Is a directory"):
        find_device(f"{tmp_path}/")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DeviceError, match="cannot be read: it is not text"):
        find_device(str(tmp_path / "binary.json"))
