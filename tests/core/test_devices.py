"""Devices by the names that people and drivers use, this machine, and files of the user's own."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from trainfit.devices import CONTEXT_BYTES, Device, find_device, known_devices
from trainfit.errors import DeviceError

GIB = 2**30


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
    assert len(set(names)) == len(names) >= 25
    for device in known_devices():
        assert device.kind == "cuda"
        assert 10 * GIB < device.memory_bytes < 300 * GIB
        assert device.bandwidth_bytes_per_second is not None
        assert 3e11 <= device.bandwidth_bytes_per_second <= 8e12
        assert 8e12 <= device.flops["fp32"] < device.flops["fp16"] <= 2.5e15
        assert device.source and device.architecture and device.sm_count


def test_a_gpu_keeps_part_of_its_memory_for_the_cuda_context() -> None:
    device = find_device("h100")
    assert device.usable_bytes == device.memory_bytes - CONTEXT_BYTES
    assert 0.3 * GIB < CONTEXT_BYTES < 0.6 * GIB
    assert Device("small", "cuda", 1000).usable_bytes == 0


def test_a_gpu_keeps_a_margin_and_a_cpu_none() -> None:
    """15 % of 1,000,000 usable bytes are 150,000: beyond them it fits, within them nobody knows."""
    device = Device("made up", "cuda", CONTEXT_BYTES + 1_000_000)
    assert (device.margin_bytes, device.default_budget_bytes) == (150_000, 850_000)
    peaks = (850_000, 850_001, 1_000_000, 1_000_001)
    expected = ["fits", "too close to call", "too close to call", "does not fit"]
    assert [device.verdict(peak) for peak in peaks] == expected
    cpu = Device("cpu", "cpu", 1_000_000)
    assert (cpu.margin_bytes, cpu.default_budget_bytes) == (0, 1_000_000)
    assert [cpu.verdict(peak) for peak in (1_000_000, 1_000_001)] == ["fits", "does not fit"]


def test_cpu_is_this_machine() -> None:
    device = find_device("CPU")
    assert (device.name, device.kind) == ("cpu", "cpu")
    assert device.usable_bytes == device.memory_bytes > GIB // 4
    assert device.sm_count and device.sm_count >= 1


@pytest.mark.parametrize("name", ["a100", "v100", "rtx"])
def test_an_ambiguous_name_lists_the_candidates(name: str) -> None:
    with pytest.raises(DeviceError) as caught:
        find_device(name)
    message = str(caught.value)
    candidates = [device.name for device in known_devices() if device.name.startswith(name)]
    assert len(candidates) > 1
    assert f"{name!r} could be any of {', '.join(candidates)}; name one of them." == message


def test_an_unknown_name_lists_what_is_close() -> None:
    with pytest.raises(DeviceError, match=r"there is no device 'l40'\. Did you mean l40s or"):
        find_device("l40")


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
        ("{", "is not JSON"),
        ("", "is not JSON"),
        ("9" * 5000, "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ([], "a device is a JSON object, got list"),
        ({}, "the field 'name' is missing"),
        ({"name": "mine"}, "the field 'memory_bytes' is missing"),
        ({**GOOD, "memory": 1}, "no field 'memory'. Did you mean 'memory_bytes'?"),
        ({**GOOD, "colour": 1}, "no field 'colour'. The fields are name, kind, memory_bytes"),
        ({**GOOD, "name": " "}, "'name' must be a text"),
        ({**GOOD, "name": 7}, "'name' must be a text, got 7"),
        ({**GOOD, "kind": "tpu"}, "'kind' must be one of cuda, cpu, got 'tpu'"),
        ({**GOOD, "memory_bytes": -1}, "'memory_bytes' must be a whole number above zero, got -1"),
        ({**GOOD, "memory_bytes": 1.5}, "'memory_bytes' must be a whole number above zero, got 1.5"),
        ({**GOOD, "memory_bytes": True}, "'memory_bytes' must be a whole number above zero"),
        ({**GOOD, "memory_bytes": 10**30}, "'memory_bytes' must be a whole number above zero"),
        ({**GOOD, "memory_bytes": "lots"}, "'memory_bytes': 'lots' is not a size"),
        ({**GOOD, "bandwidth_bytes_per_second": 0}, "must be a number above zero, got 0"),
        ('{"name": "m", "memory_bytes": 1, "bandwidth_bytes_per_second": NaN}', "above zero, got nan"),
        ({**GOOD, "bandwidth_bytes_per_second": 10**400}, "must be a number above zero"),
        ({**GOOD, "flops": 3}, "'flops' must be an object of dtype: FLOP/s"),
        ({**GOOD, "flops": {"bf61": 1e12}}, "'bf61' is no dtype; they are fp64, fp32"),
        ({**GOOD, "flops": {"bf16": "fast"}}, "'flops': 'bf16' must be a number above zero, got 'fast'"),
        ({**GOOD, "sm_count": 0}, "'sm_count' must be a whole number above zero"),
        ({**GOOD, "aliases": "x"}, "'aliases' must be a list of texts"),
    ],
)
def test_a_wrong_file_is_one_clear_error(tmp_path: Path, content: Any, fragment: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(DeviceError) as caught:
        find_device(path)
    assert path in str(caught.value)
    assert fragment in str(caught.value)


def test_a_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="cannot be read: No such file"):
        find_device(str(tmp_path / "none.json"))
    with pytest.raises(DeviceError, match="cannot be read: Is a directory"):
        find_device(f"{tmp_path}/")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DeviceError, match="cannot be read: it is not text"):
        find_device(str(tmp_path / "binary.json"))
