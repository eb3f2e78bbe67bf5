"""Collectives that somebody has measured: a device file has them, and no formula is used."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from trainfit.costs.constants import constants_of
from trainfit.costs.measured_exchanges import exchange_name, measured_exchange
from trainfit.costs.roofline import Roofline
from trainfit.devices.device_table import Device, find_device
from trainfit.errors import DeviceError
from trainfit.traces.ranks import Collective
from trainfit.traces.trace import Signature

MEASURED = {"exchange_seconds": {"all_gather 4": 1e-3}, "exchange_bytes_per_second": {"all_gather 4": 2e9}}


def exchanging(kind: str, ranks: int, size: int) -> Signature:
    return Signature("c10d.x", (), (), "", False, False, False, Collective(kind, ranks, "g", size))


def test_a_measured_kind_takes_its_seconds_and_its_bytes() -> None:
    assert exchange_name("all_gather", 4) == "all_gather 4"
    device = replace(find_device("h100"), **MEASURED)
    found = measured_exchange(exchanging("all_gather", 4, 10**7), device)
    assert found is not None
    assert (found.seconds, found.source, found.bound) == (pytest.approx(6e-3), "measured", "network")
    small = measured_exchange(exchanging("all_gather", 4, 0), device)
    assert small is not None and (small.seconds, small.bound) == (pytest.approx(1e-3), "latency")


def test_other_kinds_and_groups_keep_their_formula() -> None:
    device = replace(find_device("h100"), **MEASURED)
    for signature in (
        exchanging("all_gather", 8, 1),
        exchanging("all_reduce", 4, 1),
        exchanging("all_gather", 1, 1),
    ):
        assert measured_exchange(signature, device) is None


def test_processes_on_a_processor_are_priced_so_too() -> None:
    processor = Device("cpu", "cpu", 1 << 30, 1e10, {"fp32": 1e11}, sm_count=2, **MEASURED)  # type: ignore[arg-type]
    model = Roofline(processor, constants_of(processor))
    assert model.price(exchanging("all_gather", 4, 10**7)).seconds == pytest.approx(6e-3)


def test_a_file_has_them_and_nonsense_is_one_clear_error(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"name": "mine", "memory_bytes": "8GiB", **MEASURED}))
    assert find_device(str(file)).exchange_bytes_per_second == {"all_gather 4": 2e9}
    wrong = {"name": "mine", "memory_bytes": "8GiB", "exchange_seconds": {"all_gather 4": -1}}
    file.write_text(json.dumps(wrong))
    with pytest.raises(DeviceError, match=r"exchange_seconds\.all_gather 4"):
        find_device(str(file))
