"""LBFGS: how much it does in a step, and how much it keeps, depends on values.

It stops when it converges, and remembers only steps along which the gradient changed enough. A step that is
small enough to be run is captured with all values; for others a note says what its history may grow to.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from trainfit.basics.units import format_bytes
from trainfit.traces.assumptions import Assumption

_HISTORY = ("old_dirs", "old_stps")


def decides_by_values(optimizers: Iterable[torch.optim.Optimizer]) -> bool:
    """Whether an optimizer looks at values to decide what it does and keeps."""
    return any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers)


def history_assumptions(optimizers: Iterable[torch.optim.Optimizer]) -> tuple[Assumption, ...]:
    """Say what a history that is not full yet may still take."""
    found = []
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.LBFGS):
            continue
        (group,) = optimizer.param_groups
        state = optimizer.state[group["params"][0]]
        kept = len(state.get(_HISTORY[0]) or ())
        pair = len(_HISTORY) * sum(p.numel() * p.element_size() for p in group["params"])
        missing = group["history_size"] - kept
        if missing > 0:
            text = (
                f"LBFGS remembers up to {group['history_size']} steps; {kept} were there when the step was "
                f"recorded. The others may take {format_bytes(missing * pair)}, which is not counted."
            )
            found.append(Assumption("runs", text))
    return tuple(found)
