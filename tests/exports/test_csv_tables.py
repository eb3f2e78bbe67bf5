"""Tables as CSV: every figure of the JSON result exactly, and of a step every op."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import trainfit
from trainfit.cli.commands import app
from trainfit.costs.estimates import Estimate
from trainfit.errors import FileFormatError, OptionError
from trainfit.exports.csv_tables import csv_text, tables_of, write_tables
from trainfit.exports.shown_step import shown_step
from trainfit.exports.table_folder import check_folder, write_folder
from trainfit.planning.plan_results import PlanResult
from trainfit.report.json_result import result_json
from trainfit.report.reading import estimate_data, frontier_data, plan_data


def read(file: Path) -> list[dict[str, str]]:
    with file.open(newline="", encoding="utf-8") as text:
        return list(csv.DictReader(text, strict=True))


def test_an_estimate_has_all_its_tables(on_gpu: Estimate, tmp_path: Path) -> None:
    folder = tmp_path / "tables"
    data = estimate_data(on_gpu)
    write_tables(data, on_gpu, folder)
    result = result_json(data)
    found = {file.stem: read(file) for file in folder.iterdir()}
    assert {"summary", "modules", "operators", "by_category", "memory", "settings", "libraries"} <= set(found)
    assert {row["category"]: int(row["bytes"]) for row in found["by_category"]} == on_gpu.by_category
    modules = [{name: typed(text, row["name"]) for name, text in row.items()} for row in found["modules"]]
    assert modules == result["modules"]
    assert [float(row["seconds"]) for row in found["operators"]] == [
        o["seconds"] for o in result["operators"]
    ]
    summary = {row["name"]: row["value"] for row in found["summary"]}
    assert int(summary["peak_bytes"]) == on_gpu.peak_bytes
    assert float(summary["step_seconds"]) == result["step_seconds"]
    assert summary["fits"] == "true" and summary["peak.module"] == on_gpu.peak.module
    assert summary["steps.recorded"] == "2"
    # Every figure of the JSON is in some table.
    cells = {cell for rows in found.values() for row in rows for cell in row.values()}
    missing = [number for number in numbers_in(result) if repr(number) not in cells]
    assert not missing


def typed(text: str, name: str) -> Any:
    """Read a cell of the table of modules as JSON has it; names stay texts, however they look."""
    if text == "" or text == name or not text[0].isdigit():
        return text or None
    return float(text) if "." in text or "e" in text else int(text)


def numbers_in(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for part in value.values() for number in numbers_in(part)]
    if isinstance(value, list):
        return [number for part in value for number in numbers_in(part)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


def test_memory_has_a_row_for_every_op(on_cpu: Estimate, planned: PlanResult) -> None:
    for result, data in ((on_cpu, estimate_data(on_cpu)), (planned, plan_data(planned))):
        rows = tables_of(data, result)["memory"]
        timeline = result.timeline
        assert [row["total_bytes"] for row in rows] == timeline.used_bytes.tolist()
        parts = [name for name in rows[0] if name.endswith("_bytes") and name != "total_bytes"]
        assert all(sum(row[part] for part in parts) == row["total_bytes"] for row in rows)
        assert [row["operator"] for row in rows] == [
            timeline.trace.op_name(op) for op in range(len(timeline.trace.ops))
        ]
        assert sum(row["recompute"] for row in rows) == sum(op.recompute for op in timeline.trace.ops)
        times = shown_step(result).times
        assert times is not None
        assert sum(row["device_seconds"] for row in rows) == pytest.approx(times.device_seconds.sum())


def test_a_plan_and_a_frontier_have_theirs(planned: PlanResult, on_gpu: Estimate) -> None:
    tables = tables_of(plan_data(planned), planned)
    assert [row["module"] for row in tables["regions"]] == [region.module for region in planned.plan.regions]
    assert tables["regions"][0].keys() >= {"kept_bytes", "recompute_seconds", "decisions.recompute"}
    assert [row["name"] for row in tables["usual_ways"]] == [way.name for way in planned.baselines]
    summary = {row["name"]: row["value"] for row in tables["summary"]}
    assert summary["baseline.peak_bytes"] == planned.plan.baseline_peak_bytes
    frontier = trainfit.frontier(on_gpu.trace, device="a100-40gb", points=2)
    points = tables_of(frontier_data(frontier), frontier)["frontier"]
    assert [row["peak_bytes"] for row in points] == [point.peak_bytes for point in frontier.points]


def test_cells_are_written_as_rfc_4180_has_them() -> None:
    rows: list[dict[str, Any]] = [
        {"a": 'x"y', "b": 1.5e-07},
        {"a": "p,q\nr", "c": [1, "z"]},
        {"b": 2**70, "c": True},
    ]
    assert csv_text(rows) == (
        'a,b,c\r\n"x""y",1.5e-07,\r\n"p,q\nr",,"[1, ""z""]"\r\n,1180591620717411303424,true\r\n'
    )
    lines = list(csv.reader(csv_text(rows).splitlines(keepends=True), strict=True))
    assert lines[2] == ["p,q\nr", "", '[1, "z"]']


def test_a_folder_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tables"
    write_folder(folder, {"a.csv": "1\r\n", "b.csv": "2\r\n"})
    (folder / "mine.txt").write_text("stays")
    write_folder(folder, {"a.csv": "3\r\n"})
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {
        "a.csv": b"3\r\n",
        "b.csv": b"2\r\n",
        "mine.txt": b"stays",
    }
    real = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if path.name == "b.csv":
            raise OSError(28, "No space left on device")
        return real(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    for target in (folder, tmp_path / "new"):
        with pytest.raises(FileFormatError, match="No space left"):
            write_folder(target, {"a.csv": "4\r\n", "b.csv": "5\r\n"})
    assert (folder / "a.csv").read_bytes() == b"3\r\n"
    assert sorted(os.listdir(tmp_path)) == ["tables"]


def test_what_is_no_folder_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    for name, words in {
        "file": "needs the name of a folder",
        "no/such": "there is no folder",
        "file/inside": "there is no folder",
        "nowhere": "it is not a folder",
        "x" * 300: "File name too long",
        "nul\0": "null byte",
    }.items():
        with pytest.raises(OptionError, match=words):
            check_folder(str(tmp_path / name), "--csv")
    with pytest.raises(OptionError, match="needs the name of a folder"):
        check_folder("", "--csv")
    check_folder(str(tmp_path / "new"), "--csv")
    check_folder(str(tmp_path), "--csv")


def test_the_command_writes_every_kind_of_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["estimate", "gpt2-tiny", "--batch", "1", "--seq", "32", "--device", "a100-40gb"]
    command += ["--json", "r.json", "--csv", "t", "--snapshot", "s.pickle", "--perfetto", "p.json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert sorted(os.listdir()) == ["p.json", "r.json", "s.pickle", "t"]
    peak = json.loads(Path("r.json").read_text())["peak_bytes"]
    assert max(int(row["total_bytes"]) for row in read(Path("t/memory.csv"))) == peak
    assert json.loads(Path("p.json").read_text())["otherData"]["peak_bytes"] == peak


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--csv", "file"], "--csv needs the name of a folder"),
        (["--snapshot", "-"], "--snapshot - : only --json"),
        (["--perfetto", "no/such.json"], "--perfetto no/such.json: there is no folder"),
        (["--snapshot", "a", "--perfetto", "./a"], "--snapshot and --perfetto name the same file"),
        (["--json", "a", "--save-trace", "a"], "--json and --save-trace name the same file"),
    ],
)
def test_mistakes_are_found_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    result = CliRunner().invoke(app, ["estimate", "no-such-model", *arguments])
    assert result.exit_code == 2
    assert words in result.stderr and "no-such-model" not in result.stderr
