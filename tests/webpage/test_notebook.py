"""Results in a notebook: what `_repr_html_` gives, and a notebook that runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import trainfit
from trainfit.basics.units import format_bytes
from trainfit.webpage.embedding import asset

CELL = """
import torch, trainfit

def build():
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(32, 64)
    def run():
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss
    return trainfit.Step(model=model, optimizer=optimizer, run=run)

trainfit.estimate(build, device="h100")
"""


def test_an_estimate_shows_the_answer_and_the_memory(estimated: trainfit.Estimate, planned: Any) -> None:
    shown = estimated._repr_html_()
    assert "Fits" in shown and "gpt2-tiny" in shown and "<svg" in shown and "tf-picture" in shown
    assert "<script" not in shown and "http" not in shown
    assert len(shown) < 200_000
    assert "Fits with this plan" in planned._repr_html_()


def test_a_plan_shows_what_it_promises(planned: Any) -> None:
    shown = planned.plan._repr_html_()
    assert f"A plan for {format_bytes(planned.plan.budget_bytes)}" in shown
    assert format_bytes(planned.plan.peak_bytes) in shown and "predicted" in shown


def test_names_are_only_names(hostile: trainfit.Estimate) -> None:
    assert "<img" not in hostile._repr_html_() and "onmouseover" not in hostile._repr_html_().split("<b>")[0]


def test_the_style_is_about_nothing_else() -> None:
    rules = re.findall(r"(?:^|\})\s*([^{}]+?)\s*\{", asset("notebook.css"))
    selectors = [one.strip() for rule in rules for one in rule.split(",")]
    assert selectors and all(".tf-notebook" in selector for selector in selectors)


def test_a_notebook_runs_and_shows_it(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute(cwd=str(tmp_path))
    (output,) = notebook.cells[0].outputs
    shown = output["data"]["text/html"]
    assert "Fits" in shown and "tf-picture" in shown
    assert output["data"]["text/plain"].startswith("<Estimate of ")
