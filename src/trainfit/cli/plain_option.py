"""How an option of the command line is written down."""

from __future__ import annotations

from typing import Any

import typer


def option(metavar: str, help: str, *names: str) -> Any:
    """Return an option that is named after its parameter, unless `names` are given."""
    return typer.Option(*names, metavar=metavar, help=help)
