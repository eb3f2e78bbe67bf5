"""Each parameter is updated in backward, as soon as it has its gradient, which is freed at once.

So no more than a few gradients are there at the same time. It cannot be done where gradients are accumulated
over several backwards, or clipped, scaled or looked at before the optimizer's step.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainfit.changes.change import StepChange
from trainfit.changes.kinds.optimizer_kernels import FUSED, use_kernels
from trainfit.changes.unchanged_step import UnchangedStep
from trainfit.changes.updates_in_backward import PER_PARAMETER, update_in_backward
from trainfit.memory.advice import HAS_FUSED
from trainfit.plans.ways import APPLIED_WITH_OPTIMIZER, BIT_EQUAL, SAME_ARITHMETIC, ChangeMade
from trainfit.steps.step import Step

IN_BACKWARD, FUSED_IN_BACKWARD = "in backward", "in backward, fused"
_ACCUMULATED = frozenset({"batch"})


def changes(step: UnchangedStep) -> Iterator[StepChange]:
    """Yield it with the kernels of the step, and with fused ones."""
    names = set(step.optimizers)
    if not names or not names <= set(PER_PARAMETER) or step.passes != 1:
        return
    if step.rewrites_gradients:
        return
    code = APPLIED_WITH_OPTIMIZER
    made = ChangeMade("optimizer", IN_BACKWARD, code, BIT_EQUAL, by_apply=True)
    yield StepChange(made, make=_in_backward, excludes=_ACCUMULATED)
    if names <= set(HAS_FUSED) and step.settings.optimizer_kernels != "fused":
        made = ChangeMade("optimizer", FUSED_IN_BACKWARD, code, SAME_ARITHMETIC, by_apply=True)
        yield StepChange(made, make=_fused_in_backward, excludes=_ACCUMULATED)


def _in_backward(step: Step) -> Step:
    update_in_backward(step.model, step.optimizers, first_looks=True)
    return step


def _fused_in_backward(step: Step) -> Step:
    use_kernels(step.optimizers, FUSED)
    return _in_backward(step)
