"""Steps that do something to files, for the tests of what a capture does to the disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainfit.steps.step import Step
from trainfit.traces.trace import Trace

PRECIOUS = b"a checkpoint of last week"


def checkpoint_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file that was there before, in what is the present folder now."""
    monkeypatch.chdir(folder)
    path = folder / "old.pt"
    path.write_bytes(PRECIOUS)
    return path


def step_with(
    after: Callable[[nn.Module, torch.optim.Optimizer], Any], width: int = 300
) -> Callable[[], Step]:
    """Return a builder of a step that does something at its end."""

    def build() -> Step:
        model = nn.Linear(width, width)
        optimizer = torch.optim.Adam(model.parameters())
        inputs = torch.randn(3, width)

        def run() -> torch.Tensor:
            loss: torch.Tensor = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            after(model, optimizer)
            return loss

        return Step(model, optimizer, run)

    return build


def notes(trace: Trace) -> list[str]:
    """Return what the result says about files."""
    return [warning for warning in trace.warnings if "was skipped" in warning]
