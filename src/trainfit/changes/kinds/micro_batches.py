"""The same samples in several smaller batches, whose gradients are added up before the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from trainfit.changes.accumulation import in_micro_batches
from trainfit.changes.change import Change
from trainfit.changes.situation import Situation
from trainfit.plans.ways import SAME_ARITHMETIC, ChangeMade

_MOST_PARTS = 64


def changes(situation: Situation) -> Iterator[Change]:
    """Yield halves, quarters and so on of the batch, down to one sample."""
    batch = situation.settings.batch
    if batch is None or not situation.optimizers or situation.passes != 1:
        return
    parts = 2
    while parts <= min(batch, _MOST_PARTS):
        if batch % parts == 0 and situation.takes({"batch": batch // parts}):
            code = (
                f"(loss / {parts}).backward(), and optimizer.step() after every {parts} batches of "
                f"{batch // parts}"
            )
            yield Change(
                ChangeMade("batch", f"{parts} x {batch // parts}", code, SAME_ARITHMETIC),
                make=partial(in_micro_batches, parts=2),
                options={"batch": batch // parts},
                repeats=parts,
            )
        parts *= 2
