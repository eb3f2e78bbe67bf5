"""`python -m trainfit.allocator`: what it prints, its exit codes, its help."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainfit.allocator.__main__ import main

MIB = 1 << 20
SEQUENCE = "a x 3000000\nm here\nf x\na y 30000000\na z 1\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "sequence.txt"
    path.write_text(SEQUENCE, encoding="utf-8")
    return path


def rows(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def test_it_runs_as_a_module(file: Path) -> None:
    command = [sys.executable, "-m", "trainfit.allocator", str(file), "--capacity", "1GiB"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")
    mark, end = rows(result.stdout)
    assert (mark["event"], mark["line"], mark["label"], mark["allocated"]) == ("mark", 2, "here", 3000320)
    assert (end["event"], end["events"], end["oom"], end["reserved"]) == ("end", 5, "no", 52 * MIB)
    assert list(end)[3:5] == ["allocated", "allocated_peak"] and list(end)[-1] == "seconds"


def test_out_of_memory(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(file), "--capacity", "20MiB"]) == 3
    _, failure, end = rows(capsys.readouterr().out)
    assert {key: failure[key] for key in ("event", "line", "id", "bytes", "stream", "num_ooms")} == {
        "event": "oom",
        "line": 4,
        "id": "y",
        "bytes": 30000000,
        "stream": 0,
        "num_ooms": 1,
    }
    assert str(failure["message"]).startswith("CUDA out of memory. Tried to allocate 30.00 MiB. GPU 0 has")
    assert (end["oom"], end["allocated"]) == ("yes", 0)
    assert main([str(file), "--capacity", "20MiB", "--keep-going"]) == 3
    assert rows(capsys.readouterr().out)[-1]["allocated"] == 512


def test_placements_and_options(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = tmp_path / "placements.txt"
    arguments = [str(file), "--capacity", "1GiB", "--total", "2GiB", "--placements", str(places)]
    assert main([*arguments, "--conf", "expandable_segments:True", "--torch", "2.12.0"]) == 0
    base = 96 << 40
    small = base + ((2 * 1024 + 256 + 1024) << 20) + 16 * MIB  # the space of x: 2.25 GiB in pages of 20 MiB
    assert places.read_text(encoding="utf-8").splitlines() == [f"1 {base}", f"4 {base}", f"5 {small}"]
    assert rows(capsys.readouterr().out)[-1]["reserved"] == 42 * MIB
    assert main([str(file), "--capacity", "1GiB", "--fraction", "0.01"]) == 3


def test_search(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(file), "--search"]) == 0
    (row,) = rows(capsys.readouterr().out)
    assert (row["event"], row["reserved_peak"], row["min_capacity"]) == ("search", 52 * MIB, 32 * MIB)
    assert (row["min_capacity_retries"], row["min_capacity_without_retries"]) == (1, 52 * MIB)
    assert main([str(file), "--search", "--capacity", "10MiB"]) == 2
    assert "does not even run in 10485760 bytes" in capsys.readouterr().err


def test_manual_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sequence.txt"
    path.write_text("a x 1\nr x 1\nf x\na y 1\nm\ns\na z 1\nm\n", encoding="utf-8")
    main([str(path), "--capacity", "1GiB", "--events", "manual"])
    assert [row["active_blocks"] for row in rows(capsys.readouterr().out)] == [2, 2, 2]
    main([str(path), "--capacity", "1GiB"])
    assert [row["active_blocks"] for row in rows(capsys.readouterr().out)] == [1, 2, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--capacity is missing: how much memory does the device have?"),
        (["--capacity", "lots"], "'lots' is not a size; sizes are such as 40GiB, 512MiB or 1000000."),
        (["--capacity=-1GiB"], "'-1GiB' is not a size"),
        (
            ["--capacity", "1GiB", "--conf", "nonsense:1"],
            "'nonsense' is no option of torch's CUDA allocator.",
        ),
        (
            ["--capacity", "1GiB", "--torch", "1.0"],
            "torch 1.0: only the allocators of 2.9 to 2.13 are known.",
        ),
        (["--capacity", "1GiB", "--fraction", "2"], "a memory fraction of 2 is not within 0 and 1."),
    ],
)
def test_mistakes(file: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(file), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("trainfit.allocator: ") and message in captured.err
    assert captured.err.count("\n") == 1


def test_garbage_names_the_line(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("a x 1\nwhat is this\n", encoding="utf-8")
    assert main([str(file), "--capacity", "1GiB"]) == 2
    assert f"{file}, line 2: 'what' is no event" in capsys.readouterr().err


def test_the_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "a ID BYTES [STREAM]   allocate" in text and "expandable_segments:True" in text
