"""`Plan`: which parts of a step are checkpointed, op by op, and what that promises. Plain data.

A `Region` is one call of a module that runs under `torch.utils.checkpoint`. For each op of its forward, in
order, the plan has a decision (`decisions.py`).

Regions whose ops and decisions are the same share one `RegionKind`. Ops are matched by name and position when
the plan is applied; shapes say what the plan was made for, and may differ in another batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainfit.basics.in_notebooks import ShownInNotebooks
from trainfit.basics.units import format_bytes, format_seconds
from trainfit.plans.decisions import Decision
from trainfit.traces.ranks import Cluster
from trainfit.traces.settings import UNKNOWN_SETTINGS, Settings


@dataclass(frozen=True, slots=True)
class OpDecision:
    """What happens to one op call of a region."""

    name: str
    """The operator, such as `aten.mm.default`."""
    shapes: tuple[tuple[int, ...], ...]
    """The shapes of its results in the trace."""
    decision: Decision
    random: bool = False
    """Whether it draws random numbers: recomputed, it starts from the generator's state of forward."""


@dataclass(frozen=True, slots=True, order=True)
class InputPlace:
    """Where an input of a region is first read: names it, whatever the region is called with."""

    op: int
    """Which of the region's ops, counted from 0."""
    argument: int
    """Which of the tensors among the op's arguments."""


@dataclass(frozen=True, slots=True)
class RegionKind:
    """The ops of a region's forward with their decisions; views and bookkeeping ops are among them."""

    ops: tuple[OpDecision, ...]
    host_inputs: tuple[InputPlace, ...] = ()
    """Inputs that are in the host's memory from forward to backward, instead of being held."""


@dataclass(frozen=True, slots=True)
class NamedCall:
    """One call of a module in a step."""

    module: str
    """The module's qualified name, which begins with the root's class name."""
    call: int
    """Which of the module's calls, counted from 0."""


@dataclass(frozen=True, slots=True)
class Region:
    """One call of a module that is checkpointed as a unit."""

    module: str
    """The module's qualified name, which begins with the root's class name."""
    call: int
    """Which of the module's calls in a step, counted from 0."""
    kind: int
    kept_bytes: int
    """What it keeps from forward to backward, besides its inputs."""
    recompute_seconds: float
    continues: bool = False
    """Whether its input is not held, but recomputed by the region before it in the plan."""
    whole: bool = False
    """Whether it keeps nothing and is recomputed as a whole: then torch alone can do it."""
    offloaded_bytes: int = 0
    """What it has in the host's memory from forward to backward."""
    beside: NamedCall | None = None
    """The call in whose forward results are copied to the host, and in whose backward they are brought back;
    None if copies do not overlap with anything."""


@dataclass(frozen=True, slots=True)
class ModulePart:
    """What a rank has of the parameters that a module owns itself, in bytes."""

    module: str
    bytes: int
    gathered_bytes: int
    """What FSDP gathers them into, beside that; 0 if it does not."""


@dataclass(frozen=True)
class Plan(ShownInNotebooks):
    """Regions and decisions, what they promise, and the trace that they belong to."""

    target: str
    device: str
    torch: str
    trace_hash: str
    """Of the operators of its step, in order, and the shapes of their results."""
    budget_bytes: int
    kinds: tuple[RegionKind, ...]
    regions: tuple[Region, ...]
    peak_bytes: int
    """Certified by replaying the plan on the trace; with the reserve."""
    memory_bytes: int
    """The least memory with which the step runs, as the device's allocator hands it out; with the reserve. On
    a CPU it is the peak."""
    step_seconds: float
    baseline_peak_bytes: int
    baseline_step_seconds: float
    bound_seconds: float
    """No plan of this form within the budget takes less time per step than this."""
    method: str = "regions"
    """The solver: `regions` or `modules`."""
    reserve_bytes: int = 0
    """What is set aside in the peak because memory depends on data, and was captured for an assumption."""
    world_size: int = 1
    """Bytes are those of one of so many processes, which divide parameters, gradients and optimizer state."""
    settings: Settings = UNKNOWN_SETTINGS
    """Of the step that it was made for."""
    cluster: Cluster | None = None
    """Which rank of which processes it was made for; None for a step of one process."""
    parts: tuple[ModulePart, ...] = ()
    """Of a step of several processes: what this rank has of each module."""

    def __repr__(self) -> str:
        """One line: a plan decides about thousands of ops."""
        of_rank = "" if self.cluster is None else f", {self.cluster.words}"
        return (
            f"<Plan for {self.target} on {self.device}{of_rank}: {len(self.regions)} regions, peak "
            f"{format_bytes(self.peak_bytes)} of {format_bytes(self.budget_bytes)}, "
            f"{format_seconds(self.step_seconds)} per step>"
        )

    @property
    def added_seconds(self) -> float:
        """What the plan adds to the step."""
        return self.step_seconds - self.baseline_step_seconds

    @property
    def gap(self) -> float:
        """How much of the step's time a better plan could save at most, as a share of the step."""
        return (
            max(0.0, self.step_seconds - self.bound_seconds) / self.step_seconds if self.step_seconds else 0.0
        )

    @property
    def host_bytes(self) -> int:
        """What it needs of the host's memory."""
        return sum(region.offloaded_bytes for region in self.regions)

    def kind_of(self, region: Region) -> RegionKind:
        """Return the decisions of a region."""
        return self.kinds[region.kind]
