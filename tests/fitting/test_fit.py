"""`fit` as a user has it: ways that fit, applied to the real model with the results that they promise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

import trainfit
from trainfit.cli import commands as cli
from trainfit.plans.ways import BIT_EQUAL, ChangeMade, Way
from trainfit.verifying.measuring import measure_step

WIDTH, CLASSES, TOKENS = 64, 4096, 128


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, tokens: torch.Tensor) -> Any:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits = self.head(hidden)
        return F.cross_entropy(logits.view(-1, CLASSES), tokens.view(-1))


def build() -> trainfit.Step:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return trainfit.Step.of(model, torch.randint(CLASSES, (4, TOKENS)), optimizer=optimizer)


def changed(way: Way) -> trainfit.Step:
    """The step as a training script has it that applies a way."""
    step = build()
    trainfit.apply(step.model, way, optimizer=step.optimizers)
    return step


@pytest.fixture(scope="module")
def found() -> Any:
    torch.set_num_threads(1)
    return trainfit.fit(build, device="cpu", budget="20MiB", keep_numerics=True, seconds_limit=300.0)


def test_every_way_is_within_the_budget_and_the_list_is_in_order(found: Any) -> None:
    assert not found.fits and found.complete and len(found.ways) >= 2
    assert all(way.memory_bytes <= found.budget_bytes for way in found.ways)
    assert [way.step_seconds for way in found.ways] == sorted(way.step_seconds for way in found.ways)
    assert all(way.exactness != "different numerics" for way in found.ways)
    assert all(way.code for way in found.ways)


def test_ways_that_apply_makes_need_what_they_promise(found: Any) -> None:
    own = [way for way in found.ways if all(change.by_apply for change in way.changes)]
    assert own, [way.words for way in found.ways]
    for way in own:
        measured = measure_step(lambda way=way: changed(way), "cpu", timed=0).peak_bytes
        assert measured <= found.budget_bytes, way.words
        assert measured == pytest.approx(way.peak_bytes, rel=0.001), way.words


def test_results_are_as_exact_as_the_list_says(found: Any) -> None:
    def trained(way: Way | None) -> list[torch.Tensor]:
        step = build() if way is None else changed(way)
        losses = [step.run().detach() for _ in range(3)]
        return [*losses, *(p.detach() for p in step.model.parameters())]

    plain = trained(None)
    before = [*(torch.zeros(()) for _ in range(3)), *(p.detach() for p in build().model.parameters())]
    for way in found.ways:
        if not all(change.by_apply for change in way.changes):
            continue
        for begin, one, other in zip(before, plain, trained(way)):
            if way.exactness == BIT_EQUAL:
                assert torch.equal(one, other), way.words
            else:
                # Adam divides by the gradient's size: where that is rounding, a single weight may differ by
                # as much as it moves. Of all weights together the difference is small beside what they moved.
                assert (one - other).norm() <= 1e-3 * (one - begin).norm(), way.words


def test_a_way_is_written_read_applied_and_removed(found: Any, tmp_path: Path) -> None:
    way = next(way for way in found.ways if all(change.by_apply for change in way.changes))
    trainfit.save_way(way, tmp_path / "way.json")
    assert trainfit.load_way(tmp_path / "way.json") == way
    step = changed(way)
    with pytest.raises(trainfit.PlanError, match="already"):
        trainfit.apply(step.model, way, optimizer=step.optimizers)
    trainfit.remove(step.model)
    assert all("forward" not in vars(module) for module in step.model.modules())
    with pytest.raises(trainfit.PlanError, match="runs no plan"):
        trainfit.remove(step.model)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"schema": 1}', "\0", '{"kind": "way"}'])
def test_a_file_that_is_no_way_is_one_message(text: str, tmp_path: Path) -> None:
    (tmp_path / "way.json").write_text(text)
    with pytest.raises(trainfit.FileFormatError):
        trainfit.load_way(tmp_path / "way.json")


def of_changes(*changes: ChangeMade) -> Way:
    return Way("step", "cpu", changes, None, 0, 0, 1.0, None, None)


def test_updates_in_backward_need_the_optimizer_and_leave_it_as_it_was() -> None:
    way = of_changes(ChangeMade("optimizer", "in backward, fused", "", BIT_EQUAL, by_apply=True))
    with pytest.raises(trainfit.PlanError, match="needs the optimizer"):
        trainfit.apply(build().model, way)
    step = build()
    before = [dict(group) for group in step.optimizers[0].param_groups]
    with trainfit.applied(step.model, way, optimizer=step.optimizers):
        step.run()
        assert all(group["fused"] for group in step.optimizers[0].param_groups)
    after = [dict(group) for group in step.optimizers[0].param_groups]
    assert [{**group, "params": 0} for group in before] == [{**group, "params": 0} for group in after]


def test_a_way_of_another_version_or_for_no_model_is_one_message() -> None:
    unknown = of_changes(ChangeMade("loss", "by prayer", "", BIT_EQUAL, by_apply=True))
    with pytest.raises(trainfit.PlanError, match="does not know the change 'loss: by prayer'"):
        trainfit.apply(build().model, unknown)
    with pytest.raises(trainfit.PlanError, match=r"a way is applied to a torch\.nn\.Module"):
        trainfit.apply("model", unknown)  # type: ignore[arg-type]
    headless = of_changes(ChangeMade("loss", "in chunks", "", BIT_EQUAL, by_apply=True))
    with pytest.raises(trainfit.PlanError, match="cannot be done here: the model has no linear layer"):
        trainfit.apply(nn.Linear(4, 4), headless)


def test_the_command_shows_and_writes_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["fit", "gpt2-tiny", "--batch", "2", "--device", "h100", "--budget", "60%"]
    result = CliRunner().invoke(cli.app, [*arguments, "--json", "fit.json", "-o", "way.json"])
    assert result.exit_code == 0, result.output
    assert "fits as it is" in result.output and "way (predicted)" in result.output
    written = json.loads(Path("fit.json").read_text())
    assert written["fits"] and written["ways_found"][0]["step_seconds"] > 0
    assert trainfit.load_way("way.json").step_seconds == written["ways_found"][0]["step_seconds"]


def test_nothing_fits_is_exit_code_3() -> None:
    arguments = ["fit", "gpt2-tiny", "--device", "h100", "--budget", "3MiB", "--seconds", "20"]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 3
    assert "nothing that was tried fits into 3.00 MiB" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seconds", "0"], "--seconds must be"),
        (["--seconds", "nan"], "--seconds must be"),
        (["--budget", "x"], "x"),
        (["--device", "abacus"], "abacus"),
    ],
)
def test_mistakes_are_one_message(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(cli.app, ["fit", "gpt2-tiny", *arguments])
    assert result.exit_code == 2 and message in result.output
    assert "Traceback" not in result.output
