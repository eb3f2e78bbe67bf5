"""`DeviceComparison`: one step on several devices, with its text, its JSON and its tables."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainfit.basics.units import format_bytes
from trainfit.errors import BudgetTooSmall
from trainfit.report.compared_data import ComparisonData, DeviceRow
from trainfit.report.json_result import result_json, write_json


@dataclass(frozen=True)
class DeviceComparison:
    """What `compare` answers; `data` has every figure. All bytes, seconds and costs are predicted."""

    data: ComparisonData

    def __repr__(self) -> str:
        """One line; the text has the rest."""
        runs = sum(row.runs for row in self.devices)
        named = {"cheapest": self.data.cheapest, "fastest": self.data.fastest}
        best = "".join(f", {what} {name}" for what, name in named.items() if name is not None)
        on = f"runs on {runs} of {len(self.devices)} devices"
        return f"<DeviceComparison of {self.data.target}: {on}{best}>"

    def __str__(self) -> str:
        """What the command line prints, as plain text."""
        from trainfit.report.tables import as_text
        from trainfit.report.text_compared import comparison_view

        return as_text(comparison_view(self.data))

    @property
    def devices(self) -> tuple[DeviceRow, ...]:
        """One row per device, in the order in which they were named."""
        return self.data.devices

    @property
    def cheapest(self) -> DeviceRow | None:
        """Where the run costs least, of those devices on which it runs; None without prices."""
        return self.data.row(self.data.cheapest)

    @property
    def fastest(self) -> DeviceRow | None:
        """Where the step takes least time, of those devices on which it runs; None if none does."""
        return self.data.row(self.data.fastest)

    def check(self) -> None:
        """Raise `BudgetTooSmall` if the step runs on none of the devices, with or without a plan."""
        if any(row.runs for row in self.devices):
            return
        needed = [
            row.smallest_memory_bytes if row.plan_memory_bytes is None else row.plan_memory_bytes
            for row in self.devices
        ]
        largest = max(self.devices, key=lambda row: row.usable_bytes)
        raise BudgetTooSmall(
            f"{self.data.target} fits on none of these devices, with or without a plan: the least that was "
            f"found to run needs {format_bytes(min(needed))}, and {largest.name}, the largest of them, has "
            f"{format_bytes(largest.usable_bytes)} for tensors. `trainfit plan` with one of them says what "
            "that consists of.",
            min(needed),
        )

    def json(self) -> dict[str, Any]:
        """Return all of it as one JSON object."""
        return result_json(self.data)

    def save_json(self, path: str | Path) -> None:
        """Write that object."""
        write_json(self.json(), str(path))

    def save_report(self, path: str | Path) -> None:
        """Write a page to look at, as `--report` does."""
        from trainfit.webpage.saved_report import save_report

        save_report(self, path)

    def save_csv(self, folder: str | Path) -> None:
        """Write every table into a folder, each as a CSV file of its own."""
        from trainfit.exports.csv_tables import write_tables

        write_tables(self.data, self, folder)
