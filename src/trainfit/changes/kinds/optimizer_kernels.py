"""How torch's optimizers go over the parameters: one by one, all at once, or in one kernel.

`foreach` makes temporaries as large as all parameters; one by one they are as large as one parameter, and a
fused kernel makes none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from trainfit.changes.change import NotPossible, StepChange
from trainfit.changes.unchanged_step import UnchangedStep
from trainfit.memory.advice import HAS_FUSED
from trainfit.plans.ways import SAME_ARITHMETIC, ChangeMade
from trainfit.steps.step import Step

_HAS_FOREACH = (
    *HAS_FUSED,
    *("Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "Adafactor"),
)
FUSED = {"fused": True, "foreach": False}
_FLAGS = {
    "fused": FUSED,
    "foreach": {"fused": False, "foreach": True},
    "for-loop": {"fused": False, "foreach": False},
}


def changes(step: UnchangedStep) -> Iterator[StepChange]:
    """Yield the ways to go over the parameters that the step does not use."""
    names = step.optimizers
    if not names or not set(names) <= set(_HAS_FOREACH):
        return
    for value, flags in _FLAGS.items():
        if value == step.settings.optimizer_kernels:
            continue
        has_fused = set(names) <= set(HAS_FUSED)
        if value == "fused" and not has_fused:
            continue
        if value == "for-loop" and has_fused:
            continue  # one kernel is faster and makes no temporaries either
        shown = "fused=True" if value == "fused" else f"foreach={flags['foreach']}"
        code = f"optimizer = torch.optim.{names[0]}(..., {shown})"
        yield StepChange(
            ChangeMade("optimizer", value, code, SAME_ARITHMETIC),
            make=partial(_with_kernels, flags=flags),
        )


def _with_kernels(step: Step, flags: dict[str, bool]) -> Step:
    use_kernels(step.optimizers, flags)
    return step


def use_kernels(optimizers: Iterable[torch.optim.Optimizer], flags: dict[str, bool]) -> Callable[[], None]:
    """Let optimizers go over the parameters so; returns what undoes it."""
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for optimizer in optimizers:
        for name in flags:
            if flags[name] and name not in optimizer.defaults:
                raise NotPossible(f"{type(optimizer).__name__} has no {name}=True")
        for group in (*optimizer.param_groups, optimizer.defaults):
            before.append((group, {name: group[name] for name in flags if name in group}))
            group.update({name: flag for name, flag in flags.items() if name in optimizer.defaults})
        if flags["fused"]:
            # What their constructors do with fused=True: the kernel takes GradScaler's scale itself.
            optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
            optimizer._need_device_dtype_check_for_fused = True  # type: ignore[attr-defined]

    def undo() -> None:
        for group, values in before:
            group.update(values)

    return undo
