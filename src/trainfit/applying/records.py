"""What is known of one region call between its forward and its backward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch

from trainfit.applying.modes import Facts
from trainfit.applying.offloaded_results import HostCopy, HostMemory
from trainfit.applying.op_results import Result
from trainfit.plans.decisions import Decision
from trainfit.plans.recomputation import NOBODY, Flow, FlowOp, Rerun

VIEW, VALUE, COMPUTATION = "view", "value", "computation"


class OutsideArgument(NamedTuple):
    """An argument from outside of the region, as an op saw it in forward."""

    argument: int
    storage: int
    version: int
    place: int
    """Where `Record.counts` has torch's own count of writes to it."""


@dataclass(slots=True)
class OpRecord(FlowOp):
    """One op of a region's forward: what it did, and what it returned.

    Nothing in it is about one call alone: calls that do the same share it.
    """

    func: Any = None
    kind: str = COMPUTATION
    result: Result = ()
    cast: bool = False
    """Whether it is autocast's cast of a weight."""
    draw_before: int = NOBODY
    generator: torch.Generator | None = None
    outside: list[OutsideArgument] = field(default_factory=list)

    def does_the_same(self, other: OpRecord) -> bool:
        """Whether another op is the same operator and does the same to the storages of a region."""
        return (
            self.func is other.func
            and self.kind is other.kind
            and (self.reads, self.writes, self.creates) == (other.reads, other.writes, other.creates)
            and (self.must_run, self.cast, self.outside) == (other.must_run, other.cast, other.outside)
            and (self.stream, self.starts_stream) == (other.stream, other.starts_stream)
            and self.draw_before == other.draw_before
            and self.generator is other.generator
        )


class LastDraw(NamedTuple):
    """What drew from a generator last."""

    stream: int
    op: int
    decision: Decision | None


class OpCall(NamedTuple):
    """One call of an op that computes, and what came of it. Not to be held: there are tensors in it."""

    facts: Facts
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[torch.Tensor]
    out: Any
    decision: Decision
    storages_before: int
    """How many storages were known before it."""
    draw_before: LastDraw | None


@dataclass(slots=True)
class CountedTensor:
    """A tensor, and how often its storage had been written to when forward was over."""

    tensor: torch.Tensor
    storage: int
    writes: int = 0

    @property
    def is_modified(self) -> bool:
        """Whether it has been written to since."""
        changed: bool = self.tensor._version != self.writes
        return changed


@dataclass(slots=True)
class Record:
    """All that is known of one region call between its forward and its backward."""

    ops: list[OpRecord] = field(default_factory=list)
    flow: Flow = field(init=False)
    """The same ops, and their storages."""
    sizes: list[tuple[int, torch.device]] = field(default_factory=list)
    """Bytes and device of each storage."""
    counts: list[int] = field(default_factory=list)
    """Torch's own count of writes to each outside argument, in order, which also sees those outside of the
    region; -1 if the tensor is an input of the region, which is checked as such."""
    weights: dict[int, int] = field(default_factory=dict)
    """For autocast's casts of weights, by their numbers: the weight's storage."""
    states: dict[int, torch.Tensor] = field(default_factory=dict)
    """For draws that start a stream, by their numbers: the generator's state before them."""
    inputs: list[CountedTensor] = field(default_factory=list)
    """The region's inputs that were used in it, unless torch keeps them."""
    kept: dict[int, CountedTensor] = field(default_factory=dict)
    """A tensor without history over each kept storage."""
    snapshots: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    """Versions of outside storages that the region read and then overwrote."""
    left: dict[int, CountedTensor] = field(default_factory=dict)
    """What the region wrote to besides its inputs, by the tensors' ids."""
    rerun: Rerun | None = None
    for_host: list[int] = field(default_factory=list)
    """Which of the kept storages are to be in the host's memory until backward."""
    on_host: dict[int, HostCopy] = field(default_factory=dict)
    """Those that are."""
    inputs_for_host: set[int] = field(default_factory=set)
    """Which inputs are to be in the host's memory until backward."""
    values_read: bool = False
    """Whether Python code read values without an operator call."""

    def __post_init__(self) -> None:
        """The flow's ops are those of the record."""
        self.flow = Flow(cast("list[FlowOp]", self.ops))

    def outside(self, argument: int, storage: int, count: int) -> OutsideArgument:
        """Note torch's count of writes to an argument from outside, as it is now."""
        self.counts.append(count)
        return OutsideArgument(argument, storage, self.flow.version(storage), len(self.counts) - 1)

    def offload(self, memory: HostMemory) -> list[HostCopy]:
        """Begin to copy what belongs in the host's memory, and return the copies."""
        for number in self.for_host:
            self.on_host[number] = HostCopy(memory, self.kept.pop(number).tensor.untyped_storage())
        return list(self.on_host.values())

    def fetch(self) -> None:
        """Bring back what is in the host's memory: from here on it is like what was kept."""
        for copy in self.on_host.values():
            copy.fetch()
        for number, copy in self.on_host.items():
            tensor = copy.taken()
            self.kept[number] = CountedTensor(tensor, number, tensor._version)

    def check_outside(self, rerun: Rerun, region: str) -> None:
        """Refuse to run again where a tensor from outside that is needed has been modified meanwhile."""
        if not any(one.is_modified for one in (*self.inputs, *self.left.values())):
            return
        running = [op for op, runs in zip(self.ops, rerun.runs) if runs]
        needed = {outside.storage for op in running for outside in op.outside}
        needed |= {storage for storage, _ in self.flow.needed}
        for given in self.inputs:
            if given.storage in needed and given.is_modified:
                raise modified_error(f"an input of {region}, of shape {list(given.tensor.shape)},")
        as_left = {
            outside.storage
            for op in running
            for outside in op.outside
            if outside.version == self.flow.version(outside.storage)
            and all(outside.storage != written for written, _ in op.writes)
        }
        for left in self.left.values():
            if left.storage in as_left and left.is_modified:
                what = f"a tensor of shape {list(left.tensor.shape)}"
                raise modified_error(f"{what} that {region} writes to and needs to run again")


def modified_error(what: str, when: str = "between forward and backward") -> RuntimeError:
    """Return the error of a region that cannot be recomputed, because a tensor was written to."""
    return RuntimeError(
        f"{what} was modified in place {when}. Modify a copy, or leave the module out of the plan."
    )
