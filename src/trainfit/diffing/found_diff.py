"""`Diff`: what grew between two results, with its text, its JSON and its tables."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainfit.errors import GrewTooMuch
from trainfit.report.diff_data import DiffData
from trainfit.report.json_result import result_json, write_json


@dataclass(frozen=True)
class Diff:
    """What `diff` answers; `data` has every change."""

    data: DiffData

    def __repr__(self) -> str:
        """One line; the text has the rest."""
        shares = {"peak": self.data.peak_share, "step": self.data.time_share}
        known = [f"{name} {share:+.2%}" for name, share in shares.items() if share is not None]
        return f"<Diff of {self.data.old.name} and {self.data.new.name}: {', '.join(known) or 'no shares'}>"

    def __str__(self) -> str:
        """What the command line prints, as plain text."""
        from trainfit.report.tables import as_text
        from trainfit.report.text_diffs import diff_view

        return as_text(diff_view(self.data))

    @property
    def peak_share(self) -> float | None:
        """By how much the peak grew, as a share of the old one; None if that was zero."""
        return self.data.peak_share

    @property
    def time_share(self) -> float | None:
        """By how much the step's time grew; None if it is not known on both sides."""
        return self.data.time_share

    @property
    def exceeded(self) -> tuple[str, ...]:
        """What grew by more than was allowed."""
        return self.data.exceeded

    def check(self) -> None:
        """Raise `GrewTooMuch` if anything grew by more than was allowed."""
        if self.exceeded:
            raise GrewTooMuch("; ".join(self.exceeded) + ".")

    def json(self) -> dict[str, Any]:
        """Return all of it as one JSON object."""
        return result_json(self.data)

    def save_json(self, path: str | Path) -> None:
        """Write that object."""
        write_json(self.json(), str(path))

    def save_csv(self, folder: str | Path) -> None:
        """Write every table into a folder, each as a CSV file of its own."""
        from trainfit.exports.csv_tables import write_tables

        write_tables(self.data, self, folder)
