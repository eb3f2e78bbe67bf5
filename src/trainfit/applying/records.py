"""What is known of one region call between its forward and its backward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from trainfit.applying.op_results import Result
from trainfit.recomputation import NOBODY, Flow, FlowOp, Rerun, rerun

VIEW, VALUE, COMPUTATION = "view", "value", "computation"


@dataclass(slots=True)
class OutsideArgument:
    """An argument from outside of the region, as an op saw it in forward."""

    argument: int
    storage: int
    version: int
    counter: int
    """Torch's own count of writes to the tensor, which also sees those outside of the region; -1 if the
    tensor is an input of the region, which is checked as such."""


@dataclass(slots=True)
class OpRecord(FlowOp):
    """One op of a region's forward: what it did, and what it returned."""

    func: Any = None
    kind: str = COMPUTATION
    result: Result = ()
    weight: int = NOBODY
    """For autocast's cast of a weight: the weight's storage."""
    draw_before: int = NOBODY
    generator: torch.Generator | None = None
    state: torch.Tensor | None = None
    outside: list[OutsideArgument] = field(default_factory=list)


@dataclass(slots=True)
class KeptStorage:
    """A kept storage: a tensor over it that has no history, and how often it had been written to."""

    tensor: torch.Tensor
    version: int = 0


@dataclass(slots=True)
class WrittenOutside:
    """A tensor from outside that the region wrote to, and how often it had been written to in the end."""

    storage: int
    tensor: torch.Tensor
    version: int = 0


@dataclass(slots=True)
class Record:
    """All that is known of one region call between its forward and its backward."""

    flow: Flow = field(default_factory=Flow)
    ops: list[OpRecord] = field(default_factory=list)
    sizes: list[tuple[int, torch.device]] = field(default_factory=list)
    """Bytes and device of each storage."""
    kept: dict[int, KeptStorage] = field(default_factory=dict)
    snapshots: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    """Versions of outside storages that the region read and then overwrote."""
    left: dict[int, WrittenOutside] = field(default_factory=dict)
    """What the region wrote to besides its inputs, by the tensors' ids."""
    rerun: Rerun | None = None
    unseen_kernels: bool = False
    """Whether something filled memory without an operator call: then nothing can be left out."""
    values_read: bool = False
    """Whether Python code read values without an operator call."""

    def without_kept(self) -> Rerun:
        """Return what runs again when nothing that was kept can be used."""
        if self.unseen_kernels:
            return Rerun(tuple(op.kind is COMPUTATION for op in self.ops), frozenset())
        return rerun(self.flow, ())

    def outside_needed(self, rerun: Rerun) -> set[int]:
        """Return the storages from outside whose content is needed: by ops that run again, or by autograd."""
        read = {outside.storage for op, runs in zip(self.ops, rerun.runs) if runs for outside in op.outside}
        return read | {storage for storage, _ in self.flow.needed}

    def left_needed(self, rerun: Rerun) -> set[int]:
        """Return the storages from outside that ops which run again read as the region left them."""
        return {
            outside.storage
            for op, runs in zip(self.ops, rerun.runs)
            for outside in (op.outside if runs else ())
            if outside.version == self.flow.version(outside.storage)
            and all(outside.storage != written for written, _ in op.writes)
        }
