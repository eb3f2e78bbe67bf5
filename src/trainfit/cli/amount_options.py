"""The options that every command has: how much of the result is shown."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from trainfit.errors import OptionError

if TYPE_CHECKING:
    from trainfit.report.amounts import Amount


@dataclass(frozen=True)
class AmountFlags:
    """How much is shown."""

    panel: ClassVar[str] = "What is shown and written"
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print the verdict alone, as one line; no progress.")
    ] = False
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            "-v",
            help="Print everything: all modules, operators, regions and notes, and how long each stage took.",
        ),
    ] = False

    def amount(self) -> Amount:
        """Return it in one word."""
        if self.quiet and self.verbose:
            raise OptionError("-q and -v contradict each other: leave one of them out.")
        return "verdict" if self.quiet else "all" if self.verbose else "usual"


amount_now: ContextVar[Amount] = ContextVar("amount", default="usual")
"""What the command that runs was asked for; `cli_running` sets it."""
