"""An optimizer that keeps no state: plain stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from trainfit.changes.change import StepChange
from trainfit.changes.unchanged_step import UnchangedStep
from trainfit.plans.ways import OTHER_NUMERICS, ChangeMade
from trainfit.steps.step import Step


def changes(step: UnchangedStep) -> Iterator[StepChange]:
    """Yield SGD, if the step's optimizer keeps state."""
    if not any(storage.category == "optimizer_state" for storage in step.trace.storages):
        return
    code = "optimizer = torch.optim.SGD(model.parameters(), lr=...)"
    yield StepChange(ChangeMade("optimizer", "SGD without momentum", code, OTHER_NUMERICS), make=with_sgd)


def with_sgd(step: Step) -> Step:
    """Let the step's optimizers do what SGD does, with the learning rates that they have."""
    for optimizer in step.optimizers:
        groups = [{"params": group["params"], "lr": group["lr"]} for group in optimizer.param_groups]
        plain = torch.optim.SGD(groups)
        # The user's code holds the optimizer: it stays the same object.
        optimizer.step = plain.step  # type: ignore[method-assign]
        optimizer.state = plain.state
    return step
