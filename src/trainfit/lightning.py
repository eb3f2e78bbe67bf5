"""Lightning runs a plan, which it is given or which is made for its own first batch: `LightningPlanCallback`.

The only file that imports lightning, because a callback has to be one of its classes.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from trainfit.autoplanning.at_hand import Size, Wishes
from trainfit.autoplanning.autoplan_result import AutoPlan
from trainfit.autoplanning.callback_plan import CallbackPlan
from trainfit.autoplanning.plan_here import fit_here
from trainfit.devices.device_table import Device
from trainfit.errors import MissingExtra, PlanError
from trainfit.plans.plan import Plan
from trainfit.steps.step import Step, count_inputs

if TYPE_CHECKING:
    Callback = object
else:
    try:
        from lightning.pytorch.callbacks import Callback
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "lightning":
            raise
        raise MissingExtra(
            "trainfit.lightning needs lightning, which is not installed:\n"
            "  pip install -c constraints.txt 'trainfit[lightning]'"
        ) from None


_FOLLOWED = ("DDPStrategy", "ModelParallelStrategy")
"""Strategies of several processes that are followed."""


class LightningPlanCallback(Callback):
    """Applies a plan when training begins and removes it when training ends or fails.

    `Trainer(..., callbacks=[LightningPlanCallback()])`

    Without a plan, one is made where the training runs: before the first batch is trained on, the step that
    the Trainer is about to run is captured with it (`training_step`, precision, accumulation, clipping,
    optimizer, hooks), planned for the memory that is free, and applied. If it fits anyway, nothing is done. A
    line in the log says which; `result` has it as an object. Losses and weights are those of a training
    without the callback.

    `budget`, `device` and `reserve` are those of `trainfit.autoplan`.
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
        self._plan = CallbackPlan("LightningPlanCallback", plan, Wishes(budget, device, reserve))
        self._waiting = False
        self.result: AutoPlan | None = None
        """What was found before the first batch, if the plan was made there."""

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Apply the plan, or wait for the first batch to make one."""
        self._take_off()
        if self._plan.apply_given(pl_module):
            return
        if trainer.world_size > 1 and type(trainer.strategy).__name__ not in _FOLLOWED:
            raise PlanError(
                f"Lightning trains with {type(trainer.strategy).__name__} here, which "
                "LightningPlanCallback() cannot look at while it runs: it plans for one process, for "
                "DDPStrategy and for ModelParallelStrategy (FSDP2). Make the plan beforehand, with trainfit "
                "plan, and pass it."
            )
        self._waiting = True

    def on_train_batch_start(self, trainer: Any, pl_module: nn.Module, batch: Any, batch_idx: int) -> None:
        """Make the plan for the first batch, and apply it."""
        if not self._waiting:
            return
        self._waiting = False
        step = _update_step(trainer, pl_module, batch)
        roots = [("trainer", trainer), ("batch", batch)]
        self.result = self._plan.made(pl_module, fit_here(step, roots, self._plan.wishes))

    def on_train_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """Remove the plan."""
        self._take_off()

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        """Remove the plan."""
        self._take_off()

    def _take_off(self) -> None:
        self._waiting = False
        self._plan.take_off()


def _update_step(trainer: Any, model: nn.Module, batch: Any) -> Step:
    """Return one update of the weights by Lightning's own loop, each of its batches like the first."""
    epoch = trainer.fit_loop.epoch_loop
    automatic = model.automatic_optimization
    batches = trainer.accumulate_grad_batches if automatic else 1

    def run() -> Any:
        returned = None
        with _silent(trainer):
            for number in range(batches):
                # By these Lightning knows which of the accumulated batches it is.
                epoch.batch_progress.current.ready = number + 1
                arguments = epoch._build_kwargs(OrderedDict(), batch, number)
                if automatic:
                    optimizer = trainer.optimizers[0]
                    returned = epoch.automatic_optimization.run(optimizer, number, arguments)
                else:
                    returned = epoch.manual_optimization.run(arguments)
        return returned

    samples, tokens = count_inputs(batch)
    of_all = (None if count is None else count * batches for count in (samples, tokens))
    return Step(model, None, run, *of_all)


@contextlib.contextmanager
def _silent(trainer: Any) -> Iterator[None]:
    """Log nothing meanwhile: the losses of a capture are no losses."""
    from lightning.pytorch.loggers.logger import DummyLogger

    found = trainer.loggers
    trainer.loggers = [DummyLogger() for _ in found]
    try:
        yield
    finally:
        trainer.loggers = found
