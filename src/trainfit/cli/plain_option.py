"""How an option of the command line is written down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer


def option(metavar: str, help: str, *names: str, offered: Callable[[str], list[str]] | None = None) -> Any:
    """Return an option that is named after its parameter, unless `names` are given.

    `offered` says what a shell offers for what has been typed of its value.
    """
    return typer.Option(*names, metavar=metavar, help=help, autocompletion=offered)
