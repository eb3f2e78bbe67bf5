"""What the callbacks of all trainers share: the plan that one was given, and the model that runs it."""

from __future__ import annotations

import weakref
from pathlib import Path

from torch import nn

from trainfit.applying import apply, remove, runs_plan
from trainfit.autoplanning.at_hand import Wishes
from trainfit.autoplanning.autoplan_result import AutoPlan
from trainfit.errors import OptionError, PlanError
from trainfit.plans.plan import Plan
from trainfit.plans.plan_store import load_eager_plan


class CallbackPlan:
    """The plan of one callback: given, or made when training begins; and what runs it."""

    def __init__(self, callback: str, plan: Plan | str | Path | None, wishes: Wishes) -> None:
        """Take a plan, or the file that holds it, which is read now; without one, what to plan for."""
        if plan is not None and not isinstance(plan, Plan | str | Path):
            raise PlanError(f"{callback} takes a plan or the name of its file, not a {type(plan).__name__}.")
        if plan is not None and wishes != Wishes():
            raise OptionError(
                f"a plan is made for its own budget: give {callback} a plan, or a budget, device or reserve "
                "to make one for."
            )
        self.wishes = wishes
        self._given = load_eager_plan(plan) if isinstance(plan, str | Path) else plan
        self._model: weakref.ref[nn.Module] | None = None

    def apply_given(self, model: nn.Module) -> bool:
        """Apply the plan that was given to a model; return whether there was one."""
        if self._given is None:
            return False
        apply(model, self._given)
        self._model = weakref.ref(model)
        return True

    def made(self, model: nn.Module, result: AutoPlan) -> AutoPlan:
        """Remember the model that runs it now, if a plan was needed."""
        if result.plan is not None:
            self._model = weakref.ref(model)
        return result

    def take_off(self) -> None:
        """Remove the plan from the model that the callback put it on, if it is still there."""
        model = self._model() if self._model is not None else None
        self._model = None
        if model is not None and runs_plan(model):
            remove(model)
