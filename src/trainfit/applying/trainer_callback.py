"""`PlanCallback`: Hugging Face's Trainer runs a plan.

The only part that imports transformers when it is loaded, because a callback has to be one of its classes. It
is loaded when `trainfit.PlanCallback` is first asked for.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from trainfit.applying import apply, remove, runs_plan
from trainfit.errors import MissingExtra, PlanError
from trainfit.plans.plan import Plan
from trainfit.plans.plan_store import load_plan

_INSTALL_LINE = "pip install -c constraints.txt 'trainfit[hf]'"
_MISSING = False

if TYPE_CHECKING:
    TrainerCallback = object
else:
    try:
        from transformers import TrainerCallback
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        # Asking what trainfit has must not fail; making a callback does.
        TrainerCallback, _MISSING = object, True


class PlanCallback(TrainerCallback):
    """Applies a plan when training begins and removes it when training ends.

    `Trainer(..., callbacks=[trainfit.PlanCallback("plan.json")])`

    The Trainer tells its callbacks nothing of a training that fails. The model then keeps its plan, which
    changes no result, until the next `train()` applies it afresh or `trainfit.remove(model)` takes it off.
    """

    def __init__(self, plan: Plan | str | Path) -> None:
        """Take a plan, or the file that holds it, which is read now."""
        if _MISSING:
            raise MissingExtra(f"PlanCallback needs transformers, which is not installed:\n  {_INSTALL_LINE}")
        if not isinstance(plan, Plan | str | Path):
            raise PlanError(
                f"PlanCallback takes a plan or the name of its file, not a {type(plan).__name__}."
            )
        self._plan = plan if isinstance(plan, Plan) else load_plan(plan)
        self._planned: weakref.ref[nn.Module] | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Refuse as early as possible what cannot be combined with a plan."""
        _check_arguments(args)

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **others: Any) -> None:
        """Apply the plan."""
        _check_arguments(args)
        word = _word_for_checkpointing(model, "is_{}_checkpointing")
        if getattr(model, f"is_{word}_checkpointing", False):
            raise PlanError(
                f"a plan and {word} checkpointing cannot be combined: the plan already decides what is "
                f"recomputed. Call model.{word}_checkpointing_disable() before training, or leave the "
                "callback out."
            )
        self._take_off()
        apply(model, self._plan)
        self._planned = weakref.ref(model)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Remove the plan."""
        self._take_off()

    def _take_off(self) -> None:
        """Remove the plan from the model that this callback put it on, if it is still there."""
        model = self._planned() if self._planned is not None else None
        self._planned = None
        if model is not None and runs_plan(model):
            remove(model)


def _word_for_checkpointing(thing: Any, name: str) -> str:
    """Return what transformers calls it: `activation` since 5.23, where the older word warns."""
    return "activation" if hasattr(type(thing), name.format("activation")) else "gradient"


def _check_arguments(args: Any) -> None:
    name = f"{_word_for_checkpointing(args, '{}_checkpointing')}_checkpointing"
    if getattr(args, name):
        raise PlanError(
            f"a plan and {name}=True cannot be combined: the plan already decides what is "
            f"recomputed. Leave {name} out of the TrainingArguments, or the callback."
        )
    if args.n_gpu > 1:
        raise PlanError(
            f"with {args.n_gpu} GPUs in one process the Trainer uses DataParallel, whose copies of the model "
            "cannot run a plan. Start one process per GPU with torchrun, or show it one GPU."
        )
