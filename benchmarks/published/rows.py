"""The published rows, each captured once; equal steps (rows that differ only in the data loader) share it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trainfit
from trainfit.devices.device_table import Device, find_device
from trainfit.errors import TrainfitError
from trainfit.traces.trace import Trace
from trainfit.traces.trace_store import load_trace, save_trace

from .models import CannotExpress, build_row

DATA = Path(__file__).with_name("step_times.json")
_NAMES = {"a100_40gb": "a100-sxm-40gb", "a100_80gb": "a100-sxm-80gb", "h100_80gb": "h100-sxm-80gb"}


@dataclass(frozen=True)
class Row:
    """One published step time and the step that it was measured on."""

    id: str
    family: str
    """Rows of one family are the same model on the same machine: splits never divide a family."""
    step: str
    """Rows with the same step differ in nothing that trainfit sees."""
    device: Device
    data: dict[str, Any]
    measured_seconds: float


def load_rows() -> list[Row]:
    """Read every row."""
    found: list[Row] = []
    for data in json.loads(DATA.read_text(encoding="utf-8"))["rows"]:
        config = {
            name: value
            for name, value in data["config"].items()
            if name not in ("dataloader_cpus", "framework", "mfu")
        }
        gpu = config["gpu"]
        step = json.dumps([data["model"], data.get("arch"), config], sort_keys=True)
        found.append(
            Row(
                id=data["id"],
                family=f"{data['model'].split(' (')[0]} on {gpu}",
                step=hashlib.sha256(step.encode()).hexdigest()[:16],
                device=find_device(_NAMES.get(gpu, gpu)),
                data=data,
                measured_seconds=data["step_time_ms"] / 1e3,
            )
        )
    return found


def captured(
    rows: list[Row], cache: Path | None, progress: Callable[[str], None] = lambda text: None
) -> Iterator[tuple[Row, Trace | str]]:
    """Yield each row with its trace, or with the reason why it cannot be expressed."""
    known: dict[str, Trace | str] = {}
    for number, row in enumerate(rows):
        if row.step not in known:
            progress(f"{number + 1}/{len(rows)} {row.id}")
            known[row.step] = _capture(row, cache)
        yield row, known[row.step]


def _capture(row: Row, cache: Path | None) -> Trace | str:
    file = cache / f"{row.step}.json" if cache else None
    if file is not None and file.exists():
        return load_trace(file)
    try:
        trace = trainfit.capture(build_row(row.data), device=row.device, steps=1)
    except (CannotExpress, TrainfitError) as error:
        return str(error)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_trace(trace, file)
    return trace
