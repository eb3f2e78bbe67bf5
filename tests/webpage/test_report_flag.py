"""`--report` as a user types it, and `save_report` from Python."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import trainfit
from trainfit.cli import commands as cli


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_estimate_writes_a_page_beside_everything_else() -> None:
    done = run(
        "estimate", "gpt2-tiny", "--device", "a100-40gb", "--report", "page.html", "--json", "result.json"
    )
    assert done.exit_code == 0, done.output
    page = Path("page.html").read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>") and "gpt2-tiny" in page and page.endswith("</html>\n")
    assert "peak" in done.output and json.loads(Path("result.json").read_text())["peak_bytes"] > 0


def test_a_plan_that_does_not_fit_has_a_page_too() -> None:
    done = run("plan", "gpt2-tiny", "--device", "a100-40gb", "--budget", "20MiB", "--report", "page.html")
    assert done.exit_code == 3, done.output
    assert "No plan fits" in Path("page.html").read_text(encoding="utf-8")


def test_a_diff_says_what_grew() -> None:
    for name, batch in (("old", "4"), ("new", "8")):
        done = run("estimate", "gpt2-tiny", "--device", "h100", "--batch", batch, "--json", f"{name}.json")
        assert done.exit_code == 0, done.output
    done = run("diff", "old.json", "new.json", "--report", "page.html")
    assert done.exit_code == 0, done.output
    page = Path("page.html").read_text(encoding="utf-8")
    assert "The peak grew by" in page and "batch: 4 before, 8 now" in page
    done = run("diff", "old.json", "new.json", "--max-peak", "2%", "--report", "page.html")
    assert done.exit_code == 4 and "Grew by more than is allowed" in Path("page.html").read_text(
        encoding="utf-8"
    )


def test_a_comparison_says_which_device() -> None:
    tiny = ("compare", "gpt2-tiny", "--batch", "4", "--devices", "h100,t4", "--report", "page.html")
    done = run(*tiny, "--price", "t4=0.01", "--tokens", "1B")
    assert done.exit_code == 0, done.output
    page = Path("page.html").read_text(encoding="utf-8")
    assert "Cheapest on t4" in page and "Without a price: h100-sxm-80gb." in page
    # WITHOUT prices it is the fastest, and nothing costs anything
    done = run(*tiny, "--json", "result.json")
    assert done.exit_code == 0, done.output
    page, fastest = (
        Path("page.html").read_text(encoding="utf-8"),
        json.loads(Path("result.json").read_text())["fastest"],
    )
    assert f"Fastest on {fastest}" in page and "Cost of" not in page
    # WHERE it fits nowhere the page says so, too
    done = run("compare", "gpt2-tiny", "--batch", "100000", "--devices", "t4", "--report", "page.html")
    assert done.exit_code == 3, done.output
    assert "Fits on none of them" in Path("page.html").read_text(encoding="utf-8")


def test_verify_has_predicted_and_measured() -> None:
    done = run("verify", "gpt2-tiny", "--batch", "2", "--seq", "32", "--report", "page.html")
    assert done.exit_code == 0, done.output
    page = Path("page.html").read_text(encoding="utf-8")
    assert "Predicted against measured" in page and "<small>measured</small>" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--report", "no/such/folder/page.html"), "there is no folder 'no/such/folder'"),
        (("--report", "-"), "only --json can be written to standard output"),
        (("--report", "a.html", "--json", "a.html"), "name the same file"),
        (("--report", ""), "needs the name of a file"),
    ],
)
def test_what_cannot_be_written_is_refused_before_the_work(arguments: tuple[str, ...], message: str) -> None:
    done = run("estimate", "gpt2-tiny", "--device", "h100", *arguments)
    assert done.exit_code == 2 and message in done.output
    assert list(Path().iterdir()) == []


def test_save_report_is_the_same_page(estimated: trainfit.Estimate) -> None:
    trainfit.save_report(estimated, "page.html")
    assert "gpt2-tiny" in Path("page.html").read_text(encoding="utf-8")
    with pytest.raises(trainfit.OptionError, match="got int"):
        trainfit.save_report(7, "other.html")
    with pytest.raises(trainfit.OptionError, match="no folder"):
        trainfit.save_report(estimated, "no/page.html")
    assert [file.name for file in Path().iterdir()] == ["page.html"]
