"""Snapshots for PyTorch's memory_viz: its own tools read them, and their figures are trainfit's."""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.cuda import _memory_viz

import trainfit
from trainfit.costs.estimates import Estimate
from trainfit.errors import FileFormatError, OptionError
from trainfit.exports.memory_snapshot import memory_snapshot, write_snapshot
from trainfit.exports.shown_step import shown_step
from trainfit.planning.plan_results import PlanResult
from trainfit.traces.trace import CATEGORIES

RESULTS = ("on_cpu", "on_gpu", "expandable", "sharded", "planned")
VIEWER_READS = {  # of protocol 4, as the page's own reader does
    *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET"),
    *("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "APPEND", "APPENDS", "SETITEM", "SETITEMS"),
    *("SHORT_BINUNICODE", "BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("NEWTRUE", "NEWFALSE", "NONE", "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE"),
}


class PlainUnpickler(pickle.Unpickler):
    """Reads builtin containers and values, and nothing that has a name."""

    def find_class(self, module: str, name: str) -> Any:
        raise AssertionError(f"the snapshot names {module}.{name}")


def plain(data: bytes) -> Any:
    return PlainUnpickler(io.BytesIO(data)).load()


@pytest.fixture(params=RESULTS)
def result(request: pytest.FixtureRequest) -> Estimate | PlanResult:
    found: Estimate | PlanResult = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def written(result: Estimate | PlanResult, tmp_path: Path) -> dict[str, Any]:
    write_snapshot(result, tmp_path / "s.pickle")
    found: dict[str, Any] = plain((tmp_path / "s.pickle").read_bytes())
    return found


def test_the_peak_is_that_of_the_timeline(result: Estimate | PlanResult, written: dict[str, Any]) -> None:
    """A second formulation: changes in order as a column, its running sum, and that by category."""
    occupied = result.trace.memory.occupied
    rows: list[tuple[int, int]] = []
    category_at: dict[int, str] = {}
    names = [*CATEGORIES, "library"]
    mark = None
    for entry in written["device_traces"][0]:
        if entry["action"] == "alloc":
            category_at[entry["addr"]] = entry["category"]
            rows.append((names.index(entry["category"]), occupied(entry["size"])))
        elif entry["action"] == "free_completed":
            rows.append((names.index(category_at.pop(entry["addr"])), -occupied(entry["size"])))
        elif entry["action"] == "snapshot":
            mark = len(rows)
    changes = np.zeros((len(names), len(rows)), dtype=np.int64)
    for at, (row, size) in enumerate(rows):
        changes[row, at] = size
    live = changes.cumsum(axis=1)
    own = live[:-1].sum(axis=0)
    assert own.max() == result.timeline.peak_bytes
    assert mark is not None and own[mark - 1] == result.timeline.peak_bytes
    at_peak = dict(zip(CATEGORIES, live[:-1, mark - 1].tolist()))
    assert at_peak == result.timeline.peak_by_category
    if isinstance(result, Estimate):
        assert live[-1, -1] == sum(one.bytes for one in result.memory.libraries)


def test_nothing_overlaps_and_everything_is_in_a_segment(written: dict[str, Any]) -> None:
    segments: dict[int, int] = {}
    alive: dict[int, int] = {}
    for entry in written["device_traces"][0]:
        begin, end = entry["addr"], entry["addr"] + entry["size"]
        if entry["action"] in ("segment_alloc", "segment_map"):
            assert all(end <= at or at + size <= begin for at, size in segments.items())
            segments[begin] = entry["size"]
        elif entry["action"] == "alloc":
            assert all(end <= at or at + size <= begin for at, size in alive.items())
            # Mapped memory grows piece by piece: take pieces that touch for one.
            assert any(at <= begin and end <= at + size for at, size in joined(segments).items())
            alive[begin] = entry["size"]
        elif entry["action"] == "free_requested":
            assert alive[begin] == entry["size"]
        elif entry["action"] == "free_completed":
            assert alive.pop(begin) == entry["size"]
    blocks = {
        block["address"]: block["requested_size"]
        for segment in written["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
    assert blocks == alive
    assert sum(segments.values()) == sum(segment["total_size"] for segment in written["segments"])


def joined(pieces: dict[int, int]) -> dict[int, int]:
    found: dict[int, int] = {}
    last = -1
    for at in sorted(pieces):
        if last >= 0 and last + found[last] == at:
            found[last] += pieces[at]
        else:
            last = at
            found[last] = pieces[at]
    return found


def test_reserved_bytes_are_those_of_the_estimate(on_gpu: Estimate, expandable: Estimate) -> None:
    for estimate in (on_gpu, expandable):
        found = memory_snapshot(shown_step(estimate))
        reserved = sum(segment["total_size"] for segment in found["segments"])
        assert reserved == estimate.memory.reserved_peak_bytes
        assert found["allocator_settings"]["expandable_segments"] is (estimate is expandable)
        # What torch calls allocated is in whole blocks, as they were cut: the most of it in the step.
        assert most_allocated(found) == estimate.memory.allocated_peak_bytes


def most_allocated(found: dict[str, Any]) -> int:
    """Return the most bytes of blocks, with a remainder that is too small to be cut off counted in."""
    segments = found["segments"]
    small = {segment["address"]: segment["segment_type"] == "small" for segment in segments}
    size_at: dict[int, int] = {}
    live = most = 0
    starts = sorted(small)
    ends = {segment["address"]: segment["address"] + segment["total_size"] for segment in segments}
    expandable = segments[0]["is_expandable"]
    for entry in found["device_traces"][0]:
        address = entry["addr"]
        if entry["action"] == "alloc":
            size = -(-entry["size"] // 512) * 512
            segment = max(start for start in starts if start <= address)
            following = min((at for at in size_at if at > address), default=ends[segment])
            gap = min(following, ends[segment]) - address - size
            if not small[segment] and not expandable and gap <= 1 << 20:
                size += gap
            size_at[address] = size
            live += size
            most = max(most, live)
        elif entry["action"] == "free_completed":
            live -= size_at.pop(address)
    return most


def test_torch_makes_its_pages_and_texts_of_it(
    result: Estimate | PlanResult, written: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for page in (_memory_viz.trace_plot(written), _memory_viz.segment_plot(written)):
        assert "add_local_files" in page and "snapshot.pickle" in page
    total = sum(segment["total_size"] for segment in written["segments"])
    assert f"segments: {len(written['segments'])}" in _memory_viz.segsum(written)
    assert f"total_reserved: {_memory_viz.Bytes(total)}" in _memory_viz.segsum(written)
    text = _memory_viz.trace(written)
    allocations = sum(entry["action"] == "alloc" for entry in written["device_traces"][0])
    assert len(re.findall(r"^\w+ = \w+\[\d+:", text, re.MULTILINE)) == allocations
    lines = _memory_viz.memory(written, format_flamegraph=lambda lines: lines).splitlines()
    assert sum(int(line.rpartition(" ")[2]) for line in lines) == total
    model = result.trace.modules[0].name
    assert any(f"step:0:before the step;{model}:0:{model};" in line for line in lines)
    after = _memory_viz.compare(written["segments"], [], format_flamegraph=lambda lines: lines)
    assert after.count("only_before;") == len(lines)
    assert "only_before" in capsys.readouterr().out


def test_torch_reads_the_file_itself(on_gpu: Estimate, tmp_path: Path) -> None:
    file, page = tmp_path / "s.pickle", tmp_path / "page.html"
    write_snapshot(on_gpu, file)
    script = str(Path(_memory_viz.__file__))
    for action in ("trace_plot", "segment_plot"):
        subprocess.run([sys.executable, script, action, str(file), "-o", str(page)], check=True)
        assert "<script" in page.read_text()
    stats = subprocess.run([sys.executable, script, "stats", str(file)], check=True, capture_output=True)
    assert b"total_reserved" in stats.stdout


def test_the_viewer_can_read_every_byte(result: Estimate | PlanResult, tmp_path: Path) -> None:
    write_snapshot(result, tmp_path / "s.pickle")
    data = (tmp_path / "s.pickle").read_bytes()
    used = {opcode.name for opcode, _, _ in pickletools.genops(data)}
    assert used <= VIEWER_READS
    assert next(arg for opcode, arg, _ in pickletools.genops(data) if opcode.name == "PROTO") == 4


def test_time_does_not_go_back(written: dict[str, Any]) -> None:
    times = [entry["time_us"] for entry in written["device_traces"][0]]
    assert times == sorted(times) and times[-1] > times[0]


def test_entries_are_objects_of_their_own(written: dict[str, Any]) -> None:
    """The viewer writes into entries and blocks: one that stands for two would be changed twice."""
    entries = written["device_traces"][0]
    blocks = [block for segment in written["segments"] for block in segment["blocks"]]
    assert len({id(entry) for entry in entries}) == len(entries)
    assert len({id(block) for block in blocks}) == len(blocks)
    # It colours by category, and fails unless one of them is unknown.
    assert "unknown" in {entry.get("category") for entry in entries}


def test_frames_name_the_op_the_modules_and_the_phase(on_gpu: Estimate) -> None:
    entries = memory_snapshot(shown_step(on_gpu))["device_traces"][0]
    trace = on_gpu.trace
    seen: Counter[str] = Counter()
    for entry in entries:
        if entry["action"] != "alloc" or entry["frames"][-1]["name"] == "before the step":
            continue
        kind, operator, *modules = entry["frames"][:-1]
        op = trace.ops[operator["line"]]
        assert operator["name"] == trace.op_name(operator["line"])
        assert entry["frames"][-1] == {"filename": "step", "line": 0, "name": op.phase}
        assert [frame["name"] for frame in modules[:1]] == (
            [trace.module_name(op.module)] if op.module >= 0 else []
        )
        if kind["filename"] == "storage":
            assert trace.storages[kind["line"]].producer in (operator["line"], -1)
        seen[kind["filename"]] += 1
    workspaces = sum(1 for op in trace.ops if trace.signatures[op.signature].workspace_bytes)
    assert seen["workspace"] == workspaces
    made = sum(1 for storage in trace.storages if not storage.persistent and storage.bytes)
    assert seen["storage"] == made


def test_hostile_names_stay_in_one_line(on_cpu: Estimate) -> None:
    modules = list(on_cpu.trace.modules)
    modules[1] = replace(modules[1], name="GPT2.a;b\nc\x1b[31m</script>", class_name="X;\n")
    trace = replace(on_cpu.trace, modules=tuple(modules))
    found = memory_snapshot(shown_step(trainfit.estimate(trace, device="cpu")))
    lines = _memory_viz.memory(found, format_flamegraph=lambda lines: lines).splitlines()
    assert all(re.fullmatch(r"stream_0;\w+;.* \d+", line) for line in lines)
    assert "</script" not in _memory_viz.trace_plot(found).partition("local_files = ")[2].partition("\n")[0]


def test_only_steps_have_snapshots(tmp_path: Path, on_cpu: Estimate) -> None:
    with pytest.raises(OptionError, match=r"trainfit\.estimate"):
        write_snapshot({"peak": 1}, tmp_path / "s.pickle")
    with pytest.raises(FileFormatError, match="cannot write"):
        write_snapshot(on_cpu, tmp_path / "no" / "s.pickle")
    assert not list(tmp_path.iterdir())


def test_it_has_the_keys_of_a_snapshot_from_a_gpu(on_gpu: Estimate) -> None:
    found = memory_snapshot(shown_step(on_gpu))
    assert set(found) == {"segments", "device_traces", "allocator_settings", "external_annotations"}
    segment = found["segments"][0]
    assert set(segment) == {
        *("device", "address", "total_size", "allocated_size", "active_size", "requested_size", "stream"),
        *("segment_type", "segment_pool_id", "is_expandable", "frames", "blocks"),
    }
    assert set(segment["blocks"][0]) == {"address", "size", "requested_size", "state", "frames"}
    keys = {"action", "addr", "size", "stream", "time_us", "frames"}
    assert all(keys <= set(entry) for entry in found["device_traces"][0])
    # Sixteen intervals from 1 MiB on, named by their MiB.
    assert found["allocator_settings"]["roundup_power2_divisions"] == {str(1 << at): 0 for at in range(16)}
    phases = found["external_annotations"]
    assert [(one["stage"], one["name"]) for one in phases] == [
        (stage, phase) for phase in ("forward", "backward", "optimizer") for stage in ("START", "END")
    ]
    times = [one["time_us"] for one in phases]
    assert times == sorted(times) and on_gpu.time is not None
    assert times[-1] == pytest.approx(on_gpu.time.step_seconds * 1e6, abs=1)
