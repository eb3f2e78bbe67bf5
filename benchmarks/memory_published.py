"""Predicted memory against published memory of GPUs that are not here: allocated, reserved, and what fits.

    python benchmarks/memory_published.py [PART OF AN ID ...] [--cache DIR] [--csv FILE]

Rows: `benchmarks/published/memory.json`. Allocated is what the step asks for, in whole blocks, with kernels'
workspaces and what libraries keep. Reserved is what torch's caching allocator makes of it, simulated.
Brackets are batches of image models that ran on an RTX 3090 and the next larger ones, which did not. Needs
the `benchmarks` extra. Exit code 1 if a bound is missed: allocated within 1 % (or within half of the last
digit that was published), reserved within 3 % in the median, every bracket right.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import trainfit
from published.models import build_row
from published.operations import build_operation
from published.segmentation import build_segmentation
from published.sequence_classification import build_fine_tuning
from result_files import arguments, write_rows
from trainfit.allocator.device_memory import DeviceMemory, StepMemory
from trainfit.devices.device_table import CONTEXT_BYTES, Device, find_device
from trainfit.devices.library_handles import library_workspaces
from trainfit.traces.simulate import simulate
from trainfit.traces.trace import Trace
from trainfit.traces.trace_store import load_trace, save_trace

DATA = Path(__file__).parent / "published" / "memory.json"
ALLOCATED_BOUND, RESERVED_BOUND = 0.01, 0.03
GIB, MIB = 2**30, 2**20


@dataclass(frozen=True)
class Result:
    """One row, or one end of a bracket: published and predicted bytes."""

    id: str
    kind: str
    device: str
    published_bytes: int
    allocated_bytes: int
    library_bytes: int
    workspace_bytes: int
    """Of the kernel that runs at the peak."""
    reserved_bytes: int
    smallest_bytes: int
    published_digit_bytes: int

    @property
    def predicted_bytes(self) -> int:
        """What the published figure is compared with."""
        return self.allocated_bytes if self.kind == "allocated" else self.reserved_bytes

    @property
    def error(self) -> float:
        """Relative, with its sign."""
        return self.predicted_bytes / self.published_bytes - 1

    @property
    def within(self) -> bool:
        """Whether the prediction is as good as the published figure allows to say."""
        distance = abs(self.predicted_bytes - self.published_bytes)
        return distance <= max(ALLOCATED_BOUND * self.published_bytes, self.published_digit_bytes // 2)


def steps_of(row: dict[str, Any]) -> Callable[[], trainfit.Step]:
    """Return the function that builds the step of a row."""
    if "operation" in row:
        return build_operation(row["operation"], row["config"])
    if row["id"].startswith("mmseg"):
        return build_segmentation(row["config"])
    if row["model"].startswith("bert-large"):
        return build_fine_tuning(row["config"])
    return build_row(row)


def trace_of(name: str, build: Callable[[], trainfit.Step], device: str, cache: Path | None) -> Trace:
    """Capture a step, or read what was captured before."""
    file = cache / f"{name}.json" if cache else None
    if file is not None and file.exists():
        return load_trace(file)
    trace = trainfit.capture(build, device=device)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_trace(trace, file)
    return trace


def memory_of(trace: Trace, device: Device, torch_version: str) -> DeviceMemory:
    """Return what a step takes of a device under the torch version of the published run."""
    return StepMemory(simulate(replace(trace, torch=torch_version)), device).figures


def predict(row: dict[str, Any], trace: Trace) -> Result:
    """Compare one row."""
    device = find_device(row["device"])
    timeline = simulate(trace)
    kept = sum(one.bytes for one in library_workspaces(trace, device, row["torch"]))
    before = int(row.get("before_mib", 0) * MIB)
    exact = "published_mib" in row
    published = round(row["published_mib"] * MIB if exact else row["published_gib"] * GIB)
    digits = len(str(row["published_mib" if exact else "published_gib"]).partition(".")[2])
    simulated = memory_of(trace, device, row["torch"]) if row["kind"] != "allocated" else None
    return Result(
        id=row["id"],
        kind="allocated" if row["kind"] == "allocated" else "reserved",
        device=device.name,
        published_bytes=published,
        allocated_bytes=timeline.peak_bytes + kept + before,
        library_bytes=kept,
        workspace_bytes=int(timeline.workspace_bytes[timeline.peak_op]),
        reserved_bytes=simulated.reserved_peak_bytes if simulated else 0,
        smallest_bytes=simulated.smallest_memory_bytes if simulated else 0,
        published_digit_bytes=0 if exact else int(GIB / 10**digits),
    )


def bracket(row: dict[str, Any], batch: int, cache: Path | None) -> Result:
    """Predict one end of a bracket: the batch that ran, or the next one, which did not."""
    device = find_device(row["device"])
    name = f"timm_{row['model']}_{row['layout']}_bs{batch}"
    config = {"precision": "fp16 AMP", "batch_per_gpu": batch, "img": row["img"]}
    config["layout"] = row["layout"].upper()
    build = build_row({"model": f"timm {row['model']}", "config": config})
    trace = trace_of(name, build, row["device"], cache)
    simulated = memory_of(trace, device, row["torch"])
    kept = sum(one.bytes for one in simulated.libraries)
    timeline = simulate(trace)
    return Result(
        id=f"{name} {'ran' if batch == row['batch'] else 'ran out of memory'}",
        kind="bracket",
        device=device.name,
        published_bytes=device.memory_bytes - CONTEXT_BYTES,
        allocated_bytes=timeline.peak_bytes + kept,
        library_bytes=kept,
        workspace_bytes=int(timeline.workspace_bytes[timeline.peak_op]),
        reserved_bytes=simulated.reserved_peak_bytes,
        smallest_bytes=simulated.smallest_memory_bytes,
        published_digit_bytes=0,
    )


def is_right(result: Result) -> bool:
    """Whether a bracket's step is said to fit exactly if it ran."""
    return (result.smallest_bytes <= result.published_bytes) == result.id.endswith(" ran")


def as_line(result: Result) -> str:
    """One row, for people."""
    if result.kind == "bracket":
        return (
            f"{'right' if is_right(result) else 'WRONG'}  {result.id:62} allocated "
            f"{result.allocated_bytes / GIB:7.3f} GiB  reserved {result.reserved_bytes / GIB:7.3f}  smallest "
            f"{result.smallest_bytes / GIB:7.3f} of {result.published_bytes / GIB:7.3f}"
        )
    return (
        f"{result.kind:9} {result.id:52} {result.device:15} published "
        f"{result.published_bytes / MIB:10.3f} MiB  predicted {result.predicted_bytes / MIB:10.3f}  "
        f"{result.error:+8.3%}  libraries {result.library_bytes / MIB:6.3f}  workspace "
        f"{result.workspace_bytes / MIB:7.3f}"
    )


def summary(results: list[Result]) -> Iterator[tuple[str, bool]]:
    """Yield each bound in words, and whether it holds."""
    allocated = [one for one in results if one.kind == "allocated"]
    if allocated:
        errors = [abs(one.error) for one in allocated]
        good = sum(one.within for one in allocated)
        text = f"allocated: {len(allocated)} rows, median error {statistics.median(errors):.3%}, worst "
        yield text + f"{max(errors):.3%}; {good} within 1 % or the last digit", good == len(allocated)
    held = [abs(one.error) for one in results if one.kind == "reserved"]
    if held:
        middle = statistics.median(held)
        text = f"reserved: {len(held)} rows, median error {middle:.2%}, worst {max(held):.2%}"
        yield text, middle <= RESERVED_BOUND
    ends = [one for one in results if one.kind == "bracket"]
    if ends:
        right = sum(map(is_right, ends))
        yield f"brackets: {right} of {len(ends)} ends right", right == len(ends)


def main() -> int:
    """Run the benchmark; 1 if a bound is missed."""
    parser = arguments(__doc__)
    parser.add_argument("parts", nargs="*", help="only rows whose id has one of these in it")
    parser.add_argument("--cache", type=Path, help="keep captured steps in this folder")
    options = parser.parse_args()
    data = json.loads(DATA.read_text(encoding="utf-8"))
    results: list[Result] = []

    def wanted(name: str) -> bool:
        return not options.parts or any(part in name for part in options.parts)

    for row in data["rows"]:
        if wanted(row["id"]):
            trace = trace_of(row["id"], steps_of(row), row["device"], options.cache)
            results.append(predict(row, trace))
            print(as_line(results[-1]), flush=True)
    for row in data["brackets"]:
        if wanted(f"timm_{row['model']}"):
            for batch in (row["batch"], row["failed"]):
                results.append(bracket(row, batch, options.cache))
                print(as_line(results[-1]), flush=True)
    bounds = list(summary(results))
    for text, holds in bounds:
        print(f"{'holds ' if holds else 'MISSED'} {text}")
    write_rows("memory_published", results, options.csv, everything=not options.parts)
    return 0 if all(holds for _, holds in bounds) else 1


if __name__ == "__main__":
    sys.exit(main())
