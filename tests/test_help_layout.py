"""Help texts at any width: nothing is cut, and examples can be typed as they stand."""

from __future__ import annotations

import shlex

import pytest

from trainfit.cli.help_layout import fitted
from trainfit.cli.help_text import HELP

EXAMPLES = """Find the fastest way, and
say it in a line.

  trainfit plan llama-3-8b --solver modules --ac-unit "blocks.*" \\
      --fsdp-unit "blocks.*" --device h100
  trainfit devices                       what --device knows
"""


@pytest.mark.parametrize("columns", [36, 40, 60, 80, 120])
def test_commands_are_the_same_when_typed(columns: int) -> None:
    text = fitted(EXAMPLES, columns)
    assert max(map(len, text.splitlines())) <= max(columns - 2, 30)
    typed = text.replace("\\\n", " ").splitlines()
    commands = [shlex.split(line, comments=True) for line in typed if line.startswith("  trainfit plan")]
    plan = (
        'trainfit plan llama-3-8b --solver modules --ac-unit "blocks.*" --fsdp-unit "blocks.*" --device h100'
    )
    assert commands == [shlex.split(plan)]
    assert "what --device knows" in text


def test_an_option_stays_with_its_value() -> None:
    lines = fitted(EXAMPLES, 40).splitlines()
    assert any(line.strip() == "--solver modules \\" for line in lines)


def test_sentences_flow() -> None:
    assert fitted(EXAMPLES, 80).splitlines()[0] == "Find the fastest way, and say it in a line."


def test_the_usual_terminal_needs_no_change_of_the_examples() -> None:
    assert "this machine, measured" in fitted(HELP, 80) and "# " not in fitted(HELP, 80)
