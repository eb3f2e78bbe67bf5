"""The example that gates memory and time in CI: it passes as it is, and fails when the model has grown."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import trainfit
from trainfit.errors import OptionError

EXAMPLE = Path(__file__).parent.parent / "examples" / "ci_gate"


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EXAMPLE, tmp_path / "gate", ignore=shutil.ignore_patterns("__pycache__")))


def run(gate: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *options]
    return subprocess.run(command, cwd=gate, capture_output=True, text=True, timeout=240)


def change(gate: Path, old: str, new: str) -> None:
    file = gate / "model.py"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_it_passes_fails_with_a_reason_and_passes_again(gate: Path) -> None:
    unchanged = run(gate)
    assert unchanged.returncode == 0, unchanged.stdout
    change(gate, "FeedForward(width, 4 * width)", "FeedForward(width, 6 * width)")
    grown = run(gate)
    assert grown.returncode == 1
    assert "More than allowed: the peak grew by" in grown.stdout
    assert "layers.*.feed_forward" in grown.stdout and "activation" in grown.stdout
    assert "If this is wanted: pytest --update-baseline" in grown.stdout
    assert run(gate, "--update-baseline").returncode == 0
    again = run(gate, "-s")
    assert again.returncode == 0 and "Within what is allowed" in again.stdout


def test_the_baseline_is_that_of_the_model(gate: Path, tmp_path: Path) -> None:
    """Renewed, it has the same figures: the stored one is not stale, and names nothing of a machine."""
    stored = json.loads((EXAMPLE / "baseline.json").read_text())
    assert run(gate, "--update-baseline").returncode == 0
    renewed = json.loads((gate / "baseline.json").read_text())
    for key in ("target", "device", "peak_bytes", "by_category", "ops", "settings"):
        assert renewed[key] == stored[key], key
    assert renewed["step_seconds"] == pytest.approx(stored["step_seconds"])
    assert "/" not in stored["target"]


def test_results_are_saved_as_the_command_writes_them(tmp_path: Path) -> None:
    result = trainfit.estimate("gpt2-tiny", options=trainfit.StepOptions(batch=1, seq=32), device="h100")
    trainfit.save_result(result, tmp_path / "r.json")
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["peak_bytes"] == result.peak_bytes and written["schema"] == 1
    with pytest.raises(OptionError, match="save_result writes what"):
        trainfit.save_result({"peak": 1}, tmp_path / "x.json")  # type: ignore[arg-type]
