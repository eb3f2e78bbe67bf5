"""What a run of the step leaves behind, and who holds what grows from run to run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from trainfit.capturing.ledger import LiveStorage
from trainfit.traces.step_runs import Growth

if TYPE_CHECKING:
    from trainfit.capturing.session import Session


class Leftover(NamedTuple):
    """A storage that is still there when the run that made it has ended."""

    live: LiveStorage
    producer: str
    module: str
    line: str
    category: str


class Leftovers(list[Leftover]):
    """What one run has left behind."""

    def __init__(self, session: Session) -> None:
        """Find what the run that has just ended made and did not free."""
        super().__init__()
        rows = session.recorder.rows
        for live in session.ledger.created:
            if live.producer_op < 0 or live.end is not None or not live.nbytes:
                continue
            row = rows[live.producer_op]
            category = "gradient" if live.gradient_since is not None else "activation"
            module = session.modules.name(row.module)
            self.append(Leftover(live, live.producer, module, row.line, category))


Key = tuple[str, str, str, str, str]
"""Category, producer, module, line and holder: where something was made, and who has it."""


def growth_of(runs: Sequence[Leftovers]) -> tuple[Growth, ...]:
    """Return what the later half of the runs left that is still there, by where it was made; largest first.

    The next run may still replace what the last one left. If every run replaces what the one before left, but
    by more, then that is what grows.
    """
    looked_at = runs[len(runs) // 2 : -1]
    found = _sizes(leftover for run in looked_at for leftover in run if leftover.live.end is None)
    if not found and looked_at:
        before = _sizes(looked_at[0])
        found = {key: size - before.get(key, 0) for key, size in _sizes(runs[-1]).items()}
    grows = [Growth(round(size / len(looked_at)), *key) for key, size in found.items()]
    return tuple(
        sorted((g for g in grows if g.bytes_per_step > 0), key=lambda growth: -growth.bytes_per_step)
    )


def _sizes(leftovers: Iterable[Leftover]) -> dict[Key, int]:
    sizes: dict[Key, int] = {}
    for live, producer, module, line, category in leftovers:
        holder = "autograd" if any(hold.end is None for hold in live.saved) else "program"
        key = (category, producer, module, line, holder)
        sizes[key] = sizes.get(key, 0) + live.nbytes
    return sizes
