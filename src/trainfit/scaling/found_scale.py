"""`Scale`: a model on clusters of several sizes, with its text, its JSON, its tables and its plans."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainfit.basics.units import format_bytes, format_count
from trainfit.errors import BudgetTooSmall
from trainfit.plans.plan import Plan
from trainfit.report.json_result import result_json, write_json
from trainfit.report.scale_data import MeshRow, ScaleData, SizeOfCluster


@dataclass(frozen=True)
class Scale:
    """What `scale` answers; `data` has every figure. All bytes and seconds are predicted."""

    data: ScaleData
    plans: dict[int, Plan] = field(default_factory=dict, repr=False)
    """By world size: the certified plan of a mesh that was confirmed and needs one."""

    def __repr__(self) -> str:
        """One line; the text has the rest."""
        fits = [one for one in self.sizes if one.winner is not None]
        best = self.best
        words = "" if best is None else f", {best.words} has the most tokens per second and GPU"
        return f"<Scale of {self.data.target}: fits on {len(fits)} of {len(self.sizes)} sizes{words}>"

    def __str__(self) -> str:
        """What the command line prints, as plain text."""
        from trainfit.report.tables import as_text
        from trainfit.report.text_scale import scale_view

        return as_text(scale_view(self.data))

    @property
    def sizes(self) -> tuple[SizeOfCluster, ...]:
        """One for each number of GPUs, ascending."""
        return self.data.sizes

    @property
    def best(self) -> MeshRow | None:
        """The mesh with the most tokens (or samples) per second and GPU; None if nothing fits."""
        found = self.data.size(self.data.most_efficient)
        return None if found is None else found.winner

    def check(self) -> None:
        """Raise `BudgetTooSmall` if no mesh of any size fits."""
        if any(one.winner is not None for one in self.sizes):
            return
        least = min(
            ((row.memory_bytes, one.world_size, row) for one in self.sizes for row in one.others),
            key=lambda found: found[:2],
            default=None,
        )
        if least is None:
            raise BudgetTooSmall(
                f"{self.data.target}: there is no mesh of these sizes that it can be divided over"
                + (
                    f" with a global batch of {format_count(self.data.global_batch)}: the copies of the "
                    "model must divide it."
                    if self.data.global_batch is not None
                    else "."
                ),
                0,
            )
        size, ranks, row = least
        raise BudgetTooSmall(
            f"{self.data.target} fits on none of these numbers of GPUs: the least that was found is "
            f"{format_bytes(size)} for each of {format_count(ranks)} ({row.words}), and {self.data.device} "
            f"has {format_bytes(row.budget_bytes)} for tensors. Ask for larger --world-sizes, or a shorter "
            "--seq.",
            size,
        )

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
