"""Run under torchrun: train small steps with and without plans, and say on every rank what came out.

    torchrun --nproc-per-node 2 train_planned.py folder

In the folder are plans, named `ARRANGEMENT+ANYTHING.json`; each rank adds `rank-N.json`.
"""

from __future__ import annotations

import functools
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import small_steps
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

import trainfit

STEPS = 3
"""The first is followed op by op, the others may be left to torch."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def trained(arrangement: str, plan: trainfit.Plan | None) -> tuple[list[torch.Tensor], nn.Module]:
    """Return losses, gradients and weights of all steps, and the model."""
    torch.manual_seed(0)
    apply_plan: Any = functools.partial(trainfit.apply, plan=plan) if plan else lambda model: None
    model = getattr(small_steps, arrangement)(apply_plan)
    step, found = small_steps.step_of(model), []
    [optimizer] = step.optimizers
    optimizer.register_step_pre_hook(
        lambda *_: found.extend(local(p.grad) for p in model.parameters() if p.grad is not None)
    )
    for _ in range(STEPS):
        found.append(local(step.run()))
    return [*found, *map(local, model.parameters())], model


def compared(file: Path) -> dict[str, Any]:
    arrangement = file.stem.partition("+")[0]
    expected, plain = trained(arrangement, None)
    torch._dynamo.reset()
    counters.clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found, planned = trained(arrangement, trainfit.load_plan(file))
        compiled = counters["stats"]["unique_graphs"]
    texts = [str(each.message) for each in seen]
    said = [text for text in texts if "its plan" in text or "the plan" in text]
    keys = [list(map(str, get_model_state_dict(model))) for model in (plain, planned)]
    # What the planned model saves, the other can load.
    folder = str(file.with_suffix(""))
    checkpoints.save(planned.state_dict(), checkpoint_id=folder)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.zero_()
    checkpoints.load(plain.state_dict(), checkpoint_id=folder)
    weights = zip(map(local, plain.parameters()), map(local, planned.parameters()))
    return {
        "compared": len(expected),
        "equal": len(expected) == len(found) and all(map(torch.equal, expected, found)),
        "keys": keys[0] == keys[1] and keys[0] == small_steps.keys_of(arrangement),
        "loaded": all(torch.equal(one, other) for one, other in weights),
        "said": said,
        "compiled": compiled,
    }


def main(folder: Path) -> None:
    found = {file.stem: compared(file) for file in sorted(folder.glob("*+*.json"))}
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
