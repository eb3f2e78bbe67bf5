"""The optimizer's state is kept in the host's memory, and comes to the device for its own update alone.

The copies run on the queue of the kernels, one after the other: nothing overlaps with them.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainfit.changes.change import StepChange
from trainfit.changes.least_copies import least_state_bytes
from trainfit.changes.offloaded_state import keep_state_on_host
from trainfit.changes.step_in_parts import BY_PARAMETER
from trainfit.changes.unchanged_step import UnchangedStep
from trainfit.plans.ways import APPLIED_WITH_OPTIMIZER, BIT_EQUAL, ChangeMade
from trainfit.steps.step import Step

STATE_ON_HOST = "on the host"
_COPIES = 2
"""In for its update, and out again."""
OTHER_OPTIMIZERS = frozenset({"optimizer: 8-bit state", "optimizer: SGD without momentum"})
"""They take the place of the step's own for a prediction: its hooks are not called."""


def changes(step: UnchangedStep) -> Iterator[StepChange]:
    """Yield it for torch's optimizers that keep something."""
    names = set(step.optimizers)
    if not names or not names <= set(BY_PARAMETER):
        return
    if any(storage.category == "optimizer_state" for storage in step.trace.storages):
        made = ChangeMade("state", STATE_ON_HOST, APPLIED_WITH_OPTIMIZER, BIT_EQUAL, by_apply=True)
        least = _COPIES * least_state_bytes(step)
        yield StepChange(made, make=_on_host, excludes=OTHER_OPTIMIZERS, least_copied_bytes=least)


def _on_host(step: Step) -> Step:
    keep_state_on_host(step.optimizers)
    return step
