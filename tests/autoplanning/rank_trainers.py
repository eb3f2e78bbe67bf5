"""Trainers of two processes, with and without a plan that they make for their first batches together."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from known_speed import known_speed
from rank_loops import logged
from small_loops import same

from trainfit.applying import runs_plan
from trainfit.applying.region import RegionCall

SHARE = 0.9


def _as_torchrun_starts_it() -> None:
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(
        LOCAL_RANK=rank, LOCAL_WORLD_SIZE=size, GROUP_RANK="0", TORCHELASTIC_RUN_ID="here", NODE_RANK="0"
    )


def _compared(train: Any, callback: Any) -> dict[str, Any]:
    """Train without a plan, with memory enough, and with less; `train` returns results, model and wrapper."""
    _as_torchrun_starts_it()
    ran: list[int] = []
    original = RegionCall.run

    def counted(*args: Any) -> Any:
        ran.append(1)
        return original(*args)

    with logged() as lines, known_speed(), patch.object(RegionCall, "run", counted):
        without, _, _ = train([])
        roomy = callback(budget="1GiB")
        with_room, _, _ = train([roomy])
        assert roomy.result.fits and not ran and same(with_room, without)
        planned = callback(budget=int(roomy.result.needed_bytes * SHARE))
        with_it, model, wrapper = train([planned])
    return {
        "same": same(with_it, without),
        "regions": len(ran),
        "lines": [line for line in lines if line.startswith("trainfit:")],
        "ranks": [(one.needed_bytes, one.planned_bytes, one.fits) for one in planned.result.ranks],
        "wrapped": wrapper,
        "left": runs_plan(model),
    }


def with_transformers(folder: str) -> dict[str, Any]:
    from test_planned_trainer import history, make_trainer

    from trainfit import PlanCallback

    def train(callbacks: list[Any]) -> tuple[Any, Any, str]:
        trainer = make_trainer(Path(folder), callbacks, ddp_backend="gloo")
        trainer.train()
        weights = [parameter.detach().clone() for parameter in trainer.model.parameters()]
        return [history(trainer), weights], trainer.model, type(trainer.model_wrapped).__name__

    return _compared(train, PlanCallback)


def with_lightning(folder: str) -> dict[str, Any]:
    import test_planned_lightning as small

    from trainfit.lightning import LightningPlanCallback

    wrappers: list[str] = []

    class Seen(small.L.Callback):  # type: ignore[misc,name-defined]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            wrappers.append(type(trainer.strategy.model).__name__)

    def train(callbacks: list[Any]) -> tuple[Any, Any, str]:
        options = {"strategy": "ddp", "devices": 2}
        with patch.dict(small.CASES, ranks=options):
            model, _ = small.train("ranks", [*callbacks, Seen()])
        weights = [value.detach().clone() for value in model.state_dict().values()]
        return [model.losses, weights, torch.get_rng_state()], model, wrappers[-1]

    return _compared(train, LightningPlanCallback)
