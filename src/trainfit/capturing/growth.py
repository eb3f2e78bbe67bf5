"""What a run of the step leaves behind, and who holds what grows from run to run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from trainfit.capturing.ledger import LiveStorage
from trainfit.traces.memory_model import MemoryModel
from trainfit.traces.step_runs import Growth

if TYPE_CHECKING:
    from trainfit.capturing.session import Session


Key = tuple[str, ...]
"""Category, producer, module and line: where something was made; and, in sizes, who holds it."""
Leftovers = list[tuple[LiveStorage, Key]]
"""What one run has left behind: storages that are still there when the run that made them has ended."""


def leftovers_of(session: Session) -> Leftovers:
    """Find what the run that has just ended made and did not free."""
    found: Leftovers = []
    for live in session.ledger.created:
        if live.producer_op >= 0 and live.end is None and live.nbytes:
            row = session.recorder.rows[live.producer_op]
            category = "gradient" if live.gradient_since is not None else "activation"
            found.append((live, (category, live.producer, session.modules.name(row.module), row.line)))
    return found


def growth_of(runs: Sequence[Leftovers], memory: MemoryModel) -> tuple[Growth, ...]:
    """Return what the later half of the runs left that is still there, by where it was made; largest first.

    The next run may still replace what the last one left. If every run replaces what the one before left, but
    by more, then that is what grows.
    """
    looked_at = runs[len(runs) // 2 : -1]
    held = (leftover for run in looked_at for leftover in run if leftover[0].end is None)
    found = _sizes(held, memory)
    if not found and looked_at:
        found = _sizes(runs[-1], memory)
        found.subtract(_sizes(looked_at[0], memory))
    grows = [Growth(round(size / len(looked_at)), *key) for key, size in found.items()]
    grows.sort(key=lambda growth: -growth.bytes_per_step)
    return tuple(growth for growth in grows if growth.bytes_per_step > 0)


def _sizes(leftovers: Iterable[tuple[LiveStorage, Key]], memory: MemoryModel) -> Counter[Key]:
    sizes: Counter[Key] = Counter()
    for live, made in leftovers:
        holder = "autograd" if any(hold.end is None for hold in live.saved) else "program"
        sizes[*made, holder] += memory.occupied(live.nbytes)
    return sizes
