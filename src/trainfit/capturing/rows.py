"""What the recorder keeps of a step while it runs: operator calls, module calls, backward nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainfit.capturing.ledger import LiveStorage
from trainfit.capturing.metadata import Call
from trainfit.traces.trace import COMPUTE

Lives = Sequence[LiveStorage]


@dataclass(slots=True, eq=False)
class CallInProgress:
    """One call of a module. Positions are operator counts; -1 means "did not happen"."""

    module: int
    parent: int
    recompute: bool
    forward_start: int
    forward_end: int = -1
    backward_start: int = -1
    backward_end: int = -1
    body_start: int = -1
    """Where `forward` begins between the hooks of the module, if it has some."""
    body_end: int = -1
    backward_left: int = -1
    """How many backward nodes had run when the last one of this call ended."""


@dataclass(slots=True)
class BackwardNode:
    """What is known about a backward node: its module call, or the parameter it accumulates into."""

    call: int
    module: int
    sequence: int
    parameter: torch.Tensor | None = None
    name: str = ""


@dataclass(slots=True)
class Row:
    """One recorded operator call."""

    call: Call
    phase: str
    module: int
    module_call: int
    recompute: bool
    sequence: int
    reads: Lives
    writes: Lives
    creates: Lives
    live_bytes: int
    queue: str = COMPUTE
    waits_for: tuple[int, ...] = ()
    host_waits: bool = False
    reads_value: bool = False
    exchange: str = ""
    line: str = ""
    wrapped: int = 0
    converted: int = 0


NO_NODE = BackwardNode(-1, -1, -1)
