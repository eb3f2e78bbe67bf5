"""The step of Hugging Face's Trainer: what its loop does from one update of the weights to the next.

Losses are the Trainer's own (`training_step`, with `compute_loss`, autocast, label smoothing and what a
subclass makes of them), and so are accumulation, clipping and the optimizer. What the loop does besides
(learning rates, logging, saving, evaluation, callbacks) takes no memory in a step, and is left out.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import torch

from trainfit.capturing.python_parts import variables_of
from trainfit.errors import PlanError
from trainfit.steps.step import Step, count_inputs

_FOLLOWED = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP2")
"""What accelerate calls the ways to train that are followed."""
_FRAMES = 12
"""How far above a callback the Trainer is at most."""


def trainer_above(callback: object, frame: FrameType | None) -> Any:
    """Return the Trainer that is calling a callback: it does not tell its callbacks who it is."""
    for _ in range(_FRAMES):
        if frame is None:
            break
        owner = dict(variables_of(frame)).get("self")
        handler = getattr(owner, "callback_handler", None)
        if hasattr(owner, "training_step") and callback in getattr(handler, "callbacks", ()):
            return owner
        frame = frame.f_back
    raise PlanError(
        "PlanCallback() makes its plan for the Trainer that calls it, and here none does. Pass it to the "
        "Trainer, as in Trainer(..., callbacks=[trainfit.PlanCallback()]), or give it a plan."
    )


def refuse_other_backends(trainer: Any) -> None:
    """Refuse what accelerate puts around a model whose state cannot be put back after a capture."""
    accelerator = trainer.accelerator
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind == "FSDP":
        kind = f"FSDP{getattr(accelerator.state.fsdp_plugin, 'fsdp_version', 1)}"
    if kind not in _FOLLOWED:
        raise PlanError(
            f"accelerate trains with {kind} here, which PlanCallback() cannot look at while it runs: it "
            "plans for one process, for DistributedDataParallel and for FSDP2. Make the plan beforehand, "
            "with trainfit plan, and pass it: PlanCallback('plan.json')."
        )


def update_step(trainer: Any, batches: Sequence[Any], items: Any) -> Step:
    """Return one update of the weights, on the batches that the Trainer has fetched for it."""
    model = trainer.model_wrapped

    def run() -> torch.Tensor:
        loss = torch.zeros((), device=trainer.args.device)
        trainer.current_gradient_accumulation_steps = len(batches)
        with _silent(trainer):
            for number, inputs in enumerate(batches, start=1):
                with _synchronised(trainer, model, number == len(batches)):
                    # A copy, because losses may take labels out of it.
                    loss += trainer.training_step(model, copy.copy(inputs), items)
            _update(trainer, model)
        return loss

    counts = [count_inputs(inputs) for inputs in batches]
    samples, tokens = (sum(count or 0 for count in column) or None for column in zip(*counts))
    return Step(trainer.model, None, run, samples=samples, tokens=tokens)


def _update(trainer: Any, model: Any) -> None:
    limit = trainer.args.max_grad_norm
    if limit is not None and limit > 0:
        if hasattr(trainer, "_clip_grad_norm"):
            trainer._clip_grad_norm(model)
        else:
            trainer.accelerator.clip_grad_norm_(model.parameters(), limit)
    trainer.optimizer.step()
    model.zero_grad()


@contextlib.contextmanager
def _synchronised(trainer: Any, model: Any, last: bool) -> Iterator[None]:
    """Tell accelerate whether gradients are complete after this batch, as the Trainer's loop does."""
    trainer.accelerator.gradient_state._set_sync_gradients(last)
    with contextlib.nullcontext() if last else trainer.accelerator.no_sync(model):
        yield


@contextlib.contextmanager
def _silent(trainer: Any) -> Iterator[None]:
    """Log nothing meanwhile: the losses of a capture are no losses."""
    found = vars(trainer).get("log")
    trainer.log = lambda *args, **kwargs: None
    try:
        yield
    finally:
        if found is None:
            del trainer.log
        else:
            trainer.log = found
