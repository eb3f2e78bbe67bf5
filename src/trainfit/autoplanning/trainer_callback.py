"""`PlanCallback`: Hugging Face's Trainer runs a plan, which is given or made for its own first batch.

The only file that imports transformers when it is loaded, because a callback has to be one of its classes. It
is loaded when `trainfit.PlanCallback` is first asked for.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from trainfit.autoplanning.at_hand import Size, Wishes
from trainfit.autoplanning.autoplan_result import AutoPlan
from trainfit.autoplanning.callback_plan import CallbackPlan
from trainfit.autoplanning.plan_here import fit_here
from trainfit.autoplanning.trainer_step import refuse_other_backends, trainer_above, update_step
from trainfit.devices.device_table import Device
from trainfit.errors import MissingExtra, PlanError
from trainfit.plans.plan import Plan

_INSTALL_LINE = "pip install -c constraints.txt 'trainfit[hf]'"
_FETCHES = "get_batch_samples"
"""The Trainer's method that fetches the batches of an update."""
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

    Without a plan, `PlanCallback()`, one is made where the training runs: the step that the Trainer is about
    to run is captured with the first batches that it fetches, planned for the memory that is free, and
    applied before anything is trained. If it fits anyway, nothing is done. A line in the log says which;
    `result` has it as an object. Losses and weights are those of a training without the callback.

    `budget`, `device` and `reserve` are those of `trainfit.autoplan`.

    The Trainer tells its callbacks nothing of a training that fails. The model then keeps its plan, which
    changes no result, until the next `train()` applies it afresh or `trainfit.remove(model)` takes it off.
    """

    def __init__(
        self,
        plan: Plan | str | Path | None = None,
        *,
        budget: Size | None = None,
        device: str | Device | None = None,
        reserve: Size | None = None,
    ) -> None:
        """Take a plan, or the file that holds it, which is read now; without one, what to plan for."""
        if _MISSING:
            raise MissingExtra(f"PlanCallback needs transformers, which is not installed:\n  {_INSTALL_LINE}")
        self._plan = CallbackPlan("PlanCallback", plan, Wishes(budget, device, reserve))
        self._waiting: tuple[Any, Any] | None = None
        """The Trainer whose first batches are waited for, and what it had of its own to fetch them."""
        self.result: AutoPlan | None = None
        """What was found when training began, if the plan was made there."""

    def on_init_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Refuse as early as possible what cannot be combined with a plan."""
        _check_arguments(args)

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **others: Any) -> None:
        """Apply the plan, or wait for the first batches to make one."""
        _check_arguments(args)
        word = _word_for_checkpointing(model, "is_{}_checkpointing")
        if getattr(model, f"is_{word}_checkpointing", False):
            raise PlanError(
                f"a plan and {word} checkpointing cannot be combined: the plan already decides what is "
                f"recomputed. Call model.{word}_checkpointing_disable() before training, or leave the "
                "callback out."
            )
        self._take_off()
        if not self._plan.apply_given(model):
            self._wait(trainer_above(self, sys._getframe(1)))

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Remove the plan."""
        self._take_off()

    def _wait(self, trainer: Any) -> None:
        """Plan when the Trainer has fetched its first batches: it loses none, and gets them in its order."""
        refuse_other_backends(trainer)
        if not hasattr(trainer, _FETCHES):
            raise PlanError(f"this Trainer has no {_FETCHES}: PlanCallback() needs transformers 5 or newer.")
        fetch = getattr(trainer, _FETCHES)

        def fetched(*args: Any, **kwargs: Any) -> Any:
            self._stop_waiting()
            batches, items = fetch(*args, **kwargs)
            if batches:
                self._fit(trainer, batches, items)
            return batches, items

        self._waiting = (trainer, vars(trainer).get(_FETCHES))
        # A method of this Trainer alone, which is gone when it has been called.
        setattr(trainer, _FETCHES, fetched)

    def _fit(self, trainer: Any, batches: Any, items: Any) -> None:
        roots = [("trainer", trainer), ("batch", batches), ("num_items_in_batch", items)]
        data = (trainer.train_dataset, trainer.eval_dataset)
        found = fit_here(update_step(trainer, batches, items), roots, self._plan.wishes, data)
        self.result = self._plan.made(trainer.model, found)

    def _stop_waiting(self) -> None:
        if self._waiting is None:
            return
        (trainer, own), self._waiting = self._waiting, None
        if own is None:
            vars(trainer).pop(_FETCHES, None)
        else:
            setattr(trainer, _FETCHES, own)

    def _take_off(self) -> None:
        self._stop_waiting()
        self._plan.take_off()


def _word_for_checkpointing(thing: Any, name: str) -> str:
    """Return what transformers calls it: `activation` since 5.23, where the older word warns."""
    return "activation" if hasattr(thing, name.format("activation")) else "gradient"


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
