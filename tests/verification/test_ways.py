"""A way is carried out for real: its peak as predicted, its results held to what it promises."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

import trainfit
from trainfit.cli import commands as cli
from trainfit.plans.ways import BIT_EQUAL, OTHER_NUMERICS, SAME_ARITHMETIC, ChangeMade, Exactness, Way
from trainfit.report.reading import verification_data
from trainfit.report.text_verification import verification_view
from trainfit.traces.simulate import simulate
from trainfit.verifying.verification import Verification

WIDTH, CLASSES = 32, 2048


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.blocks(self.embedding(tokens)))
        return F.cross_entropy(logits.view(-1, CLASSES), tokens.view(-1))


def build(batch: int = 4) -> trainfit.Step:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return trainfit.Step.of(model, torch.randint(CLASSES, (batch, 64)), optimizer=optimizer)


def change(name: str, exactness: Exactness, by_apply: bool = True) -> ChangeMade:
    kind, value = name.split(": ")
    return ChangeMade(kind, value, "", exactness, by_apply=by_apply)


def of(*changes: ChangeMade, peak: int = 0, device: str = "cpu") -> Way:
    return Way("step", device, changes, None, peak, peak, 1.0, None, None)


def verified(way: Way, batch: int = 4) -> Verification:
    options = trainfit.StepOptions(batch=batch)
    found = trainfit.verify(build, way=way, options=options, costs="roofline", runs=1)
    assert isinstance(found, Verification)
    return found


def shown(found: Verification) -> str:
    text = io.StringIO()
    Console(width=400, file=text).print(verification_view(verification_data(found)))
    return text.getvalue()


HOST = (change("parameters: on the host", BIT_EQUAL), change("state: on the host", BIT_EQUAL))


@pytest.fixture(scope="module")
def found() -> Verification:
    return verified(of(*HOST))


def test_bit_equal_is_proved_and_the_peak_is_exact(found: Verification) -> None:
    assert found.predicted_peak_bytes == found.measured.peak_bytes
    comparison = found.comparison
    assert comparison is not None and comparison.results_hold
    assert comparison.loss_equal and comparison.gradients_equal and comparison.state_equal
    assert found.measured.peak_bytes < comparison.baseline.peak_bytes
    assert "With the way the loss is equal" in shown(found)


def test_a_promise_that_is_kept_needs_no_word_and_another_one_does(found: Verification) -> None:
    kept = verified(of(*HOST, peak=found.predicted_peak_bytes))
    assert not any("was made for" in note for note in kept.warnings)
    assert "peak, promised by the way" in shown(kept)
    assert any("the way was made for step on cpu, and promises 0 B" in note for note in found.warnings)


def test_the_same_in_exact_arithmetic_is_held_to_rounding() -> None:
    found = verified(of(change("loss: in chunks", SAME_ARITHMETIC)))
    comparison = found.comparison
    assert comparison is not None and comparison.results_hold
    assert not comparison.gradients_equal and 0 < comparison.relative_gradient_difference < 1e-5
    assert "as promised, the same in exact arithmetic, at most 1e-03 apart" in shown(found)


def test_a_promise_about_results_that_is_broken_is_seen() -> None:
    found = verified(of(change("loss: in chunks", BIT_EQUAL)))
    assert found.comparison is not None and found.comparison.results_hold is False
    assert "NOT equal" in shown(found)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (change("dtype: bf16-autocast", OTHER_NUMERICS, by_apply=False), "promises nothing about results"),
        (change("batch: 2 x 2", SAME_ARITHMETIC, by_apply=False), "not parts of the larger one"),
    ],
)
def test_what_is_not_claimed_is_not_compared(made: ChangeMade, said: str) -> None:
    """And what the user writes is made here as well: the peak is that of the changed step."""
    found = verified(of(made, device="h100"))
    assert found.predicted_peak_bytes == found.measured.peak_bytes
    assert found.comparison is not None and found.comparison.results_hold is None
    assert "With the way results are not compared" in shown(found) and said in shown(found)


def test_a_way_with_a_plan_is_as_fit_promises() -> None:
    def deep() -> trainfit.Step:
        block = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        model = nn.Sequential(*(copy.deepcopy(block) for _ in range(4)))
        optimizer = torch.optim.AdamW(model.parameters())
        loss = lambda out: out.square().mean()  # noqa: E731
        return trainfit.Step.of(model, torch.randn(512, WIDTH), loss=loss, optimizer=optimizer)

    trace = trainfit.capture(deep)
    plan = trainfit.plan(trace, budget=int(0.7 * simulate(trace).peak_bytes))
    assert plan.regions
    way = Way("step", "cpu", (HOST[1],), plan, 0, 0, 1.0, None, None)
    found = trainfit.verify(deep, way=way, costs="roofline", runs=1)
    assert isinstance(found, Verification)
    assert found.predicted_peak_bytes == pytest.approx(found.measured.peak_bytes, rel=0.001)
    assert found.measured.peak_bytes < 0.7 * simulate(trace).peak_bytes
    assert found.comparison is not None and found.comparison.results_hold


def test_the_command_and_its_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainfit.save_way(of(*HOST), "way.json")
    trainfit.save_way(of(change("optimizer: 8-bit state", OTHER_NUMERICS, by_apply=False)), "bits.json")
    Path("broken.json").write_text("{}")
    step = ["verify", "gpt2-tiny", "--batch", "1", "--seq", "16", "--costs", "roofline", "--runs", "1"]

    def run(*more: str) -> Any:
        return CliRunner().invoke(cli.app, [*step, *more])

    result = run("--way", "way.json", "--json", "found.json", "--report", "page.html")
    assert result.exit_code == 0, result.output
    assert "the predicted peak is exact" in result.output and "peak without the way" in result.output
    written = json.loads(Path("found.json").read_text())["way"]
    assert written["results_hold"] is True and written["name"].startswith("parameters: on the host")
    assert "peak without the way" in Path("page.html").read_text()
    for arguments, message in (
        (["--way", "way.json", "--plan", "x"], "--way has its own plan"),
        (["--way", "broken.json"], "not a trainfit way"),
        (["--way", "none.json"], "none.json"),
        (["--way", "bits.json"], "8-bit state cannot be made to this step here"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2 and message in result.output, result.output
        assert "Traceback" not in result.output
