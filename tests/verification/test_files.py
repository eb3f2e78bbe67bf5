"""What the real runs of `verify` do to files happens, and is not called skipped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

import trainfit


def test_real_runs_write_and_remove_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("last.pt").write_bytes(b"before")
    Path("old.pt").write_bytes(b"before")

    def build() -> trainfit.Step:
        model = nn.Linear(4, 4)

        def run() -> None:
            model(torch.ones(2, 4)).sum().backward()
            model.zero_grad()
            torch.save(model.state_dict(), "last.pt")
            if os.path.exists("old.pt"):
                os.remove("old.pt")

        return trainfit.Step(model, None, run)

    captured = trainfit.capture(build, device="cpu")
    assert Path("last.pt").read_bytes() == Path("old.pt").read_bytes() == b"before"
    assert sum(": a capture " in warning for warning in captured.warnings) == 2
    found = trainfit.verify(build, costs="roofline", runs=1).warnings
    (warning,) = [warning for warning in found if "for real" in warning]
    assert Path("last.pt").read_bytes() != b"before" and not Path("old.pt").exists()
    assert warning.startswith("the step has run for real, and did to files what it does in training: ")
    assert "torch.save (" in warning and "removing " in warning
    assert not any("skipped" in one for one in found)
    assert warning.count("test_files.py:") == 2
