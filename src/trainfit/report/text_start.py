"""What `trainfit` alone prints: in ten lines, what to type first."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

_QUESTION = "Does a PyTorch training step fit, how long does it take, how to make it fit?"
_LINES = (
    ("trainfit estimate gpt2 --device a100-40gb", "does a known model fit?"),
    ("trainfit estimate train.py:build --device h100", "does yours?"),
    ("trainfit plan gpt2 --device a100-40gb --budget 8GiB", "the fastest way to fit"),
    ("trainfit verify gpt2-tiny", "is it right? run it here"),
    ("trainfit devices", "the GPUs it knows"),
)
_MORE = (
    "train.py:build is a function of yours; trainfit --help shows one, and the rest.\n"
    "Tab completes names after trainfit --install-completion."
)


class FirstWords:
    """The question, five commands and where the rest is."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw commands and what they are for side by side, or the commands alone where it is narrow."""
        wide = options.max_width >= sum(2 + max(map(len, column)) for column in zip(*_LINES))
        table = Table.grid(padding=(0, 2, 0, 0))
        for command, answer in _LINES:
            cells = [Text(command, "bold"), Text(answer, "dim")]
            table.add_row(*cells[: 2 if wide else 1])
        yield from (Text(_QUESTION), Text(), Padding(table, (0, 0, 0, 2)), Text(), Text(_MORE, "dim"))
