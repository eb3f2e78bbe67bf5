"""Help texts for the width that there is: sentences flow, examples keep their shape.

A line that is indented is an example. Where it is too long, what stands beside a command goes below it, and
the command itself goes on in the next line, after a backslash, as one can type it.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterator
from itertools import groupby

_EDGES = 2
"""Columns that are left free beside a help text."""
_LEAST = 30
_KEPT = "\N{NO-BREAK SPACE}"
"""Stands for a space at which no line ends."""
_SHELL = "trainfit ", "torchrun "


def fitted(text: str, columns: int | None = None) -> str:
    """Return a help text laid out for a terminal of so many columns; by default the one there is."""
    width = max((columns or shutil.get_terminal_size((80, 24)).columns) - _EDGES, _LEAST)
    lines: list[str] = []
    whole = re.sub(r" \\\n +", " ", text)  # a command of several lines is divided anew
    for is_example, members in groupby(whole.splitlines(), key=lambda line: line.startswith(" ") or not line):
        if is_example:
            lines += [part for line in members for part in _example(line, width)]
        else:
            lines += _paragraph(" ".join(members), width)
    return "\n".join(lines)


def _paragraph(text: str, width: int) -> list[str]:
    """Divide a paragraph; marks of bold words take no room, and such words stay in one line."""
    bold = re.search(r"\[bold\](.*?)\[/bold\]", text)
    if bold is not None:
        kept = bold[1].replace(" ", _KEPT)
        text = f"{text[: bold.start()]}{kept}{text[bold.end() :]}"
    found = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
    if bold is not None:
        found = [line.replace(kept, bold[0], 1) for line in found]
    return found


def _example(line: str, width: int) -> Iterator[str]:
    if len(line) <= width:
        yield line
        return
    code = line.lstrip()
    indent = line[: len(line) - len(code)]
    command, *about = re.split(r"\s{2,}", code, maxsplit=1)
    sign = " \\" if code.startswith(_SHELL) else ""
    parts = textwrap.wrap(
        re.sub(r"(?<= )(-[-\w]+) (?=[^-])", rf"\1{_KEPT}", command),  # an option and its value stay together
        width - len(sign),
        initial_indent=indent,
        subsequent_indent=f"{indent}    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    parts = [part.replace(_KEPT, " ") for part in parts]
    yield from (f"{part}{sign}" for part in parts[:-1])
    yield parts[-1]
    for words in about:
        yield from textwrap.wrap(f"# {words}", width, initial_indent=indent, subsequent_indent=indent)
