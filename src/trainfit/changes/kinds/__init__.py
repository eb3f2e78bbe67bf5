"""One file for each kind of change: its `changes` yields what may be done to a step.

Every file here is asked; a new kind is a new file.

- `allocator_segments`: how torch's caching allocator cuts memory up
- `chunked_loss`: logits and loss a part of the tokens at a time
- `eight_bit_state`: the optimizer's moments in 8 bits
- `micro_batches`: the same samples in several smaller batches
- `number_format`: what numbers are computed and kept in
- `optimizer_class`: an optimizer with less state
- `optimizer_in_backward`: each parameter is updated as soon as it has its gradient
- `optimizer_kernels`: how the optimizer goes over the parameters
- `over_a_mesh`: the step on all devices of a mesh
- `parameters_on_host`: large parameters are in the host's memory
- `state_on_host`: the optimizer's state is in the host's memory
"""

from __future__ import annotations

import importlib
import pkgutil

from trainfit.changes.change import StepChange
from trainfit.changes.unchanged_step import UnchangedStep


def changes_of(step: UnchangedStep) -> list[StepChange]:
    """Return everything that may be done to a step, kind by kind."""
    found: list[StepChange] = []
    for file in pkgutil.iter_modules(__path__):
        kind = importlib.import_module(f"{__name__}.{file.name}")
        found += kind.changes(step)
    return found
