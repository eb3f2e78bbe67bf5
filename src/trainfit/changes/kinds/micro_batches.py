"""The same samples in several smaller batches, whose gradients are added up before the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterator

from trainfit.changes.accumulation import in_micro_batches
from trainfit.changes.change import StepChange
from trainfit.changes.unchanged_step import UnchangedStep
from trainfit.plans.ways import SAME_ARITHMETIC, ChangeMade

_MOST_PARTS = 64


def changes(step: UnchangedStep) -> Iterator[StepChange]:
    """Yield halves, quarters and so on of the batch, down to one sample."""
    batch = step.settings.batch
    if batch is None or not step.optimizers or step.passes != 1:
        return
    parts = 2
    while parts <= min(batch, _MOST_PARTS):
        if batch % parts == 0 and step.takes({"batch": batch // parts}):
            code = (
                f"(loss / {parts}).backward(), and optimizer.step() after every {parts} batches of "
                f"{batch // parts}"
            )
            yield StepChange(
                ChangeMade("batch", f"{parts} x {batch // parts}", code, SAME_ARITHMETIC),
                make=in_micro_batches,
                options={"batch": batch // parts},
                repeats=parts,
            )
        parts *= 2
