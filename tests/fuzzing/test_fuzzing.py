"""A sample of the fuzzer, the same each time; `python tests/fuzzing --inputs 10000` is the whole of it."""

from __future__ import annotations

import pytest
import typer
from generated_results import Pair
from generated_steps import GeneratedStep
from kinds import KINDS, run
from model_parts import Part
from option_values import COMMANDS, CommandLine
from result_checks import check_pair
from results_by_hand import bytes_of_step
from step_checks import TAMPERINGS

from trainfit.cli.commands import app

SAMPLE = {"command lines": 150, "results to compare": 150, "training steps": 6}


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample(kind: str) -> None:
    tally = run(kind, SAMPLE.get(kind, 30))
    assert not tally.failures, "\n\n".join(tally.failures)
    assert tally.tried >= 6


def test_a_difference_that_is_not_seen_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the check: if everything were called equal, the sample would fail."""
    monkeypatch.setattr("trainfit.comparing.matching._difference", lambda one, other: None)
    with pytest.raises(AssertionError, match="called equal: True"):
        check_pair(Pair({"loss": 1.0}, {"loss": 2.0}, "changed"))
    assert run("results to compare", 30).failures


@pytest.mark.parametrize("tampering", TAMPERINGS)
def test_tampering_changes_what_a_step_makes(tampering: str) -> None:
    """So that a comparison which calls everything equal would be found out."""
    step = GeneratedStep(
        parts=(Part("mlp"),),
        batch=2,
        seq=2,
        width=4,
        optimizer="sgd",
        loss="square",
        returns="dict",
        accumulate=1,
        clip="",
        precision="fp32",
        inputs="same",
        average=False,
        scheduler=False,
        to_none=True,
    )
    same = bytes_of_step(step.build) == bytes_of_step(lambda: TAMPERINGS[tampering](step.build()))
    assert same == (tampering == "nothing")


def test_every_option_is_tried() -> None:
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        options = {option for one in command.params for option in one.opts if option.startswith("--")}
        assert options - {"--help"} == set(COMMANDS[name]), name


def test_what_failed_is_shown_as_it_is_typed() -> None:
    assert (
        repr(CommandLine(("plan", "a b", "--budget", "1 %"), None, False))
        == "trainfit plan 'a b' --budget '1 %'"
    )
