"""What a reader sees of a way that was carried out for real: whether its results are as it promises."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainfit.verifying.verification import Comparison


@dataclass(frozen=True)
class WayChecked:
    """A way beside what became of it."""

    name: str
    """What is done differently."""
    target: str
    device: str
    """What it was made for."""
    promised_peak_bytes: int
    """There."""
    exactness: str
    """What it promises about results."""
    results_hold: bool | None
    """Whether that is so; null where nothing is promised, or nothing could be compared."""
    tolerance: float | None
    """How far apart results may be, as a share of the largest: 0 for bit by bit."""
    loss_difference_share: float | None
    gradient_difference_share: float | None
    """How far apart they were; null where no number says it."""

    @property
    def by_rounding(self) -> bool:
        """Whether results may differ by rounding."""
        return bool(self.tolerance)


def way_checked(comparison: Comparison | None) -> WayChecked | None:
    """Return what became of a way; None if there is none."""
    way = comparison.way if comparison is not None else None
    if comparison is None or way is None:
        return None
    return WayChecked(
        name=way.words,
        target=way.target,
        device=way.device,
        promised_peak_bytes=way.peak_bytes,
        exactness=way.exactness,
        results_hold=comparison.results_hold,
        tolerance=comparison.tolerance,
        loss_difference_share=_number(comparison, comparison.relative_loss_difference),
        gradient_difference_share=_number(comparison, comparison.relative_gradient_difference),
    )


def _number(comparison: Comparison, value: float) -> float | None:
    # JSON has no infinity; and what was not compared is not zero apart.
    return value if math.isfinite(value) and comparison.tolerance is not None else None


def rounding_words(way: WayChecked) -> str:
    """Say how far apart results are that are the same in exact arithmetic."""
    if way.results_hold is None:
        return "With the way nothing could be compared."
    shares = way.loss_difference_share, way.gradient_difference_share
    loss, gradients = ("not a number" if share is None else f"{share:.1e}" for share in shares)
    verdict = "as" if way.results_hold else "NOT as"
    return (
        f"With the way the loss is {loss} of its size apart, the gradients up to {gradients} of the largest "
        f"(measured): {verdict} promised, the same in exact arithmetic, at most {way.tolerance:.0e} apart."
    )
