"""`Sweep`: a grid of steps as one table, with its text and its JSON."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainfit.errors import StepError
from trainfit.report.json_result import result_json, write_json
from trainfit.report.swept_data import SweepData


@dataclass(frozen=True)
class Sweep:
    """What `sweep` answers."""

    data: SweepData

    def __repr__(self) -> str:
        """One line; the text has the rest."""
        return f"<Sweep of {self.data.grid}: {self.data.count} rows, {self.data.failed} failed>"

    def __str__(self) -> str:
        """What the command line prints, as plain text."""
        from trainfit.report.tables import as_text
        from trainfit.report.text_swept import sweep_view

        return as_text(sweep_view(self.data))

    @property
    def rows(self) -> tuple[dict[str, Any], ...]:
        """One dictionary per row, in the order of the grid, all with the same keys."""
        return self.data.results

    @property
    def failed(self) -> tuple[dict[str, Any], ...]:
        """The rows without figures; their `error` says why."""
        return tuple(row for row in self.rows if row["error"] is not None)

    def check(self) -> None:
        """Raise if no row at all has figures."""
        if len(self.failed) == len(self.rows):
            raise StepError(
                f"all {len(self.rows)} rows failed, the first one because: {self.rows[0]['error']}"
            )

    def json(self) -> dict[str, Any]:
        """Return all of it as one JSON object."""
        return result_json(self.data)

    def save_json(self, path: str | Path) -> None:
        """Write that object."""
        write_json(self.json(), str(path))
