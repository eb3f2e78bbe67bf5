"""What numbers are computed in and kept in: autocast in bf16 or fp16, or all parameters in bf16."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from trainfit.changes.change import StepChange
from trainfit.changes.unchanged_step import UnchangedStep
from trainfit.plans.ways import OTHER_NUMERICS, ChangeMade
from trainfit.steps.step import Step

_AUTOCAST = {"bf16-autocast": torch.bfloat16, "fp16-autocast": torch.float16}


def changes(step: UnchangedStep) -> Iterator[StepChange]:
    """Yield the formats with fewer bits than the step has."""
    now, kind = step.settings.dtype, step.device.kind
    wanted: tuple[str, ...] = ()
    if now == "fp32":
        wanted = ("bf16-autocast", "fp16-autocast", "bf16")
    elif now in _AUTOCAST:
        wanted = ("bf16",)
    for value in wanted:
        takes = step.is_recipe
        if value == "fp16-autocast" and (kind != "cuda" or not takes):
            continue  # needs a GradScaler, which a loop of the user's own has to have
        if value == "bf16":
            code, make = "model.to(torch.bfloat16)", in_bfloat16
        else:
            shown = str(_AUTOCAST[value])
            code = f'with torch.autocast("{kind}", {shown}): loss = ...'
            make = partial(in_autocast, kind=kind, dtype=_AUTOCAST[value])
        if not takes and value != "bf16":
            code = f'model.forward = torch.autocast("{kind}", {shown})(model.forward)'
        yield StepChange(
            ChangeMade("dtype", value, code, OTHER_NUMERICS),
            make=None if takes else make,
            options={"dtype": value} if takes else {},
        )


def in_autocast(step: Step, kind: str, dtype: torch.dtype) -> Step:
    """Run the model's forward under autocast."""
    model = step.model
    object.__setattr__(model, "forward", torch.autocast(kind, dtype)(model.forward))
    return step


def in_bfloat16(step: Step) -> Step:
    """Keep the model in bf16; floating inputs become so when they come in."""
    step.model.to(torch.bfloat16)
    step.model.register_forward_pre_hook(_inputs_in_bfloat16, with_kwargs=True)
    return step


def _inputs_in_bfloat16(model: nn.Module, args: Any, kwargs: Any) -> Any:
    def converted(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor

    return tree_map_only(torch.Tensor, converted, (args, kwargs))
