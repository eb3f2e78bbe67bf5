"""The terminal as people use it: first words, pictures, -q and -v, completion, colours, narrow windows."""

from __future__ import annotations

import io
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

import trainfit
from trainfit.basics.doing import counted, doing, heard_by, in_turn
from trainfit.cli import commands as cli
from trainfit.cli import completions
from trainfit.models.catalog import PRESETS
from trainfit.models.preset_names import PRESET_NAMES
from trainfit.report.data import MemoryCurve
from trainfit.report.progress import Reporter
from trainfit.report.sparkline import Sparkline, phase_line, picture
from trainfit.report.tables import show

COMMANDS = ["estimate", "plan", "frontier", "max-batch", "max-seq", "verify", "order", "calibrate", "devices"]
OPTIONS = ["--batch", "2", "--seq", "32", "--device", "a100-40gb"]


def run(*arguments: str, columns: int = 80) -> str:
    result = CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": str(columns)})
    assert result.exit_code == 0, result.output
    return result.output


def curve(sizes: list[int], phases: list[str]) -> MemoryCurve:
    count = len(sizes)
    half = {"activation": tuple(size // 2 for size in sizes)}
    rest = {"temporary": tuple(size - size // 2 for size in sizes)}
    names = ("aten.mm.default",) * count
    return MemoryCurve(tuple(range(count)), names, names, tuple(phases), half | rest, sizes.index(max(sizes)))


def test_without_arguments_it_says_what_to_type_in_ten_lines() -> None:
    lines = run().splitlines()
    assert len(lines) == 10 and max(map(len, lines)) <= 80
    typed = [line.split("  ")[1] for line in lines if line.startswith("  trainfit ")]
    assert len(typed) == 5
    for line in typed:  # each names a command, and flags that the command has
        words = line.split()[1:]
        help_text = run(words[0], "--help", columns=200)
        assert all(word in help_text for word in words if word.startswith("--"))
    assert max(map(len, run(columns=40).splitlines())) <= 40


def test_a_picture_is_as_high_as_the_bytes() -> None:
    # 24 levels for 240 bytes: 10 bytes each.
    assert picture([0, 10, 80, 160, 200, 240], 3) == ["    ▄█", "   ███"[:3] + "███", " ▁████"]
    assert picture([0, 0], 2) == ["  ", "  "]
    assert picture([1, 10_000], 1) == ["▁█"]  # what there is at all is seen


def test_phases_are_named_where_there_is_room() -> None:
    phases = ["forward"] * 12 + ["backward"] * 10 + ["optimizer"] * 3
    assert phase_line(phases) == "forward ───┤backward ┤──┤"
    assert len(phase_line(phases)) == len(phases)


@pytest.mark.parametrize("columns", [40, 61, 100, 200])
def test_the_picture_is_as_wide_as_fits_and_shows_the_peak(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    sizes = [100] * 500 + [800] + [300] * 499
    stream = io.StringIO()
    show(Sparkline(curve(sizes, ["forward"] * 500 + ["backward"] * 500)), stream)
    top, _, bottom, phases = stream.getvalue().splitlines()[-4:]
    width = min(columns, 160)
    assert len(bottom) == len(phases) == width
    assert top.strip() == "█" and top.index("█") == width // 2  # one column, where the peak is
    assert bottom[: width // 2] == "▃" * (width // 2)


def test_a_short_step_is_not_stretched_and_no_step_is_no_picture() -> None:
    stream = io.StringIO()
    show(Sparkline(curve([4, 8], ["forward", "backward"])), stream)
    assert len(stream.getvalue().splitlines()[-2]) == 2
    empty = io.StringIO()
    show(Sparkline(MemoryCurve((), (), (), (), {"activation": ()}, -1)), empty)
    assert empty.getvalue() == ""


def test_an_output_without_such_signs_gets_plain_ones() -> None:
    buffer = io.BytesIO()
    stream = io.TextIOWrapper(buffer, encoding="ascii")
    show(Sparkline(curve([10, 240], ["forward", "backward"])), stream)
    stream.flush()
    assert buffer.getvalue().decode("ascii").splitlines()[-2] == ".#"


@pytest.mark.parametrize("command", [("estimate",), ("plan",), ("frontier", "--points", "2")])
def test_quiet_is_one_line_and_verbose_is_more(command: tuple[str, ...]) -> None:
    usual = run(command[0], "gpt2-tiny", *OPTIONS, *command[1:])
    quiet = run(command[0], "gpt2-tiny", *OPTIONS, *command[1:], "-q", columns=60)
    verbose = run(command[0], "gpt2-tiny", *OPTIONS, *command[1:], "-v")
    assert quiet.count("\n") == 1 and quiet.startswith("gpt2-tiny")
    assert "".join(quiet.split()) in "".join(usual.split())
    assert "time taken here" in verbose and "time taken here" not in usual
    assert "capture" in verbose.split("time taken here")[1]


def test_verbose_lists_every_operator() -> None:
    usual, verbose = (run("estimate", "gpt2-tiny", *OPTIONS, *more) for more in ([], ["-v"]))
    estimate = trainfit.estimate(
        "gpt2-tiny", device="a100-40gb", options=trainfit.StepOptions(batch=2, seq=32)
    )
    assert estimate.time is not None
    last = [operator for operator in estimate.time.operators if operator.seconds][-1]
    shown = last.name.removeprefix("aten.").removesuffix(".default")
    assert shown in verbose and f"\n{shown} " not in usual


def test_quiet_says_that_there_are_notes() -> None:
    line = run("estimate", "mixtral-tiny", *OPTIONS, "-q")
    assert "note" in line and line.count("\n") == 1


def test_quiet_devices_are_names() -> None:
    assert "h100-sxm-80gb" in run("devices", "-q").splitlines()
    assert run("devices", "NVIDIA H100 80GB HBM3", "-q") == "h100-sxm-80gb\n"
    assert run("devices", "-v").count("CUDA context") > 50


def test_quiet_and_verbose_contradict_each_other() -> None:
    result = CliRunner().invoke(cli.app, ["devices", "-q", "-v"])
    assert result.exit_code == 2 and "-q and -v contradict each other" in result.output


def test_names_of_presets_are_those_of_the_catalog() -> None:
    assert tuple(PRESETS) == PRESET_NAMES


def test_tab_offers_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("def build(): pass\ndef _hidden(): pass\ndef bench(): pass\n")
    Path("broken.py").write_text("def (")
    Path("my.json").write_text("{}")
    Path("models").mkdir()
    assert completions.targets("llama-3") == ["llama-3-8b", "llama-3-70b", "llama-3-405b"]
    assert completions.targets("tr") == ["train.py:"]
    assert completions.targets("train.py:") == ["train.py:build", "train.py:bench"]
    assert completions.targets("train.py:bu") == ["train.py:build"]
    assert completions.targets("broken.py:") == completions.targets("nowhere/") == []
    assert completions.targets("mod") == ["models/"]
    assert completions.targets("hf:m") == ["hf:models/", "hf:my.json"]
    assert completions.devices("h100-p")[0].startswith("h100-pcie")
    assert completions.devices("my") == ["my.json"]
    assert "my.json" in completions.graphs_and_targets("my")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("trainfit est", "estimate"),
        ("trainfit estimate vit-", "vit-b-16"),
        ("trainfit estimate gpt2 --device rtx-40", "rtx-4090"),
        ("trainfit plan gpt2 --solver m", "modules"),
        ("trainfit devices b2", "b200"),
    ],
)
def test_a_shell_is_answered_without_torch(typed: str, offered: str) -> None:
    code = (
        "import sys; sys.argv = ['trainfit']\n"
        "from trainfit.cli.commands import main\n"
        "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules\n"
    )
    environment = {**os.environ, "_TRAINFIT_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": typed}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment
    )
    assert offered in done.stdout and "Error" not in done.stderr, done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_that_fit_a_narrow_window(command: str) -> None:
    text = run(command, "--help")
    assert "Examples" in text and f"trainfit {command}" in text
    assert max(map(len, run(command, "--help", columns=40).splitlines())) <= 40


def on_a_terminal(*arguments: str, **environment: str) -> str:
    """Run a command on a pseudo-terminal; return what it wrote there."""
    ours, theirs = pty.openpty()
    line = [sys.executable, "-m", "trainfit", *arguments]
    variables = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "CI")}
    variables |= {"TERM": "xterm-256color", "COLUMNS": "80", **environment}
    process = subprocess.Popen(line, stdout=theirs, stderr=theirs, env=variables)
    os.close(theirs)
    found, end = b"", time.monotonic() + 100
    while time.monotonic() < end:
        if select.select([ours], [], [], 0.5)[0]:
            try:
                read = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            found += read
            if not read:
                break
    assert process.wait(timeout=60) == 0
    os.close(ours)
    return found.decode()


def test_colours_only_where_they_are_wanted() -> None:
    assert "\x1b[" in on_a_terminal("devices", "h100")
    plain = on_a_terminal("devices", "h100", NO_COLOR="1")
    assert "\x1b[3" not in plain and "\x1b[9" not in plain  # no colour; bold is none


def test_a_person_who_waits_is_told_what_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("slow.py").write_text(
        "import time, torch, trainfit\n"
        "def build():\n"
        "    model = torch.nn.Linear(8, 8)\n"
        "    time.sleep(1.5)\n"
        "    return trainfit.Step.of(model, torch.randn(4, 8), loss=lambda y: y.mean())\n"
    )
    text = on_a_terminal("estimate", "slow.py:build", "--device", "a100-40gb")
    assert "building the model" in text and "0:0" in text
    quiet = on_a_terminal("estimate", "slow.py:build", "--device", "a100-40gb", "-q")
    assert "building the model" not in quiet


def test_the_time_left_follows_from_what_is_done() -> None:
    shown: list[dict[str, object]] = []
    now = [100.0]
    reporter = Reporter(lambda **what: shown.append(what), clock=lambda: now[0])
    reporter("measuring")
    now[0] = 100.2
    reporter.measuring(1, 10, "mm")
    assert shown[-1]["ends"] is None  # too early to tell
    now[0] = 104.0
    reporter.measuring(4, 10, "mm")
    assert shown[-1]["ends"] == pytest.approx(110.0)  # a second each, six to go
    reporter("solving")
    assert shown[-1]["ends"] is None


def test_parts_in_turn_say_how_many_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 0.0, 3.0, 6.0])
    monkeypatch.setattr("trainfit.basics.doing.time.monotonic", lambda: next(now))
    heard: list[str] = []
    with heard_by(heard.append):
        for part in in_turn("part", ["a", "b", "c"]):
            doing(part)
    doing("not heard")
    assert heard == [
        *("part 1 of 3", "part 1 of 3: a"),
        *("part 2 of 3, about 6.00 s left", "part 2 of 3, about 6.00 s left: b"),
        *("part 3 of 3, about 3.00 s left", "part 3 of 3, about 3.00 s left: c"),
    ]


def test_what_is_too_fine_to_tell_is_counted() -> None:
    told: list[tuple[int, int, str]] = []
    done = [0]
    with heard_by(None, lambda *what: told.append(what)), counted(lambda: done[0], 100, "operators"):
        done[0] = 42
        time.sleep(0.5)
    assert told and set(told) == {(42, 100, "operators")}
    with counted(lambda: 1, 100, "operators"):  # nobody listens: nothing runs beside
        pass


def test_a_narrow_terminal_has_no_bar() -> None:
    from trainfit.report.progress import spinner

    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=40)
    with spinner(console) as reporter:
        reporter("a stage with a name that is longer than a narrow terminal is wide")
        time.sleep(1.5)
    assert "a stage" in stream.getvalue() and "━" not in stream.getvalue()
