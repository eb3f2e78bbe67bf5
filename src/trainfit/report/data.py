"""What a reader sees of each result, as plain data. Text and JSON are made from it, and compute nothing.

Bytes are integers and times are seconds. `reading.py` makes these from results. The fields of a result are
the keys of its JSON, in this order, except those that `json_result.py` leaves to people.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from trainfit.devices.device_table import Verdict
from trainfit.report.way_checked import WayChecked
from trainfit.traces.settings import Difference
from trainfit.traces.step_runs import Growth

if TYPE_CHECKING:
    from trainfit.costs.estimates import Peak
    from trainfit.costs.summary import StepTime
    from trainfit.devices.distinct_ranks import RankPeak
    from trainfit.memory.advice import Advice
    from trainfit.memory.module_stats import ModuleStats
    from trainfit.planning.baselines import Baseline

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class StepsSeen:
    """Which run of the step was recorded, and what was seen of the others."""

    looked_at: int
    recorded: int
    first: int
    differ: bool
    smallest_peak_bytes: int | None
    largest_peak_bytes: int | None
    changing: tuple[str, ...]
    complete: bool
    leak_bytes_per_step: int
    leaks: tuple[Growth, ...]


@dataclass(frozen=True)
class Subject:
    """What a result is about, and how it was found."""

    target: str
    device: str
    device_usable_bytes: int
    torch: str
    seconds: dict[str, float]
    """Wall time of each stage."""
    ops: int
    settings: dict[str, Any]
    steps: StepsSeen
    warnings: tuple[str, ...]
    world_size: int
    rank: int
    """Which of so many processes the step is; 0 of 1 for a step of one."""
    mesh: dict[str, int]
    """The sizes of the mesh's dimensions by name, outermost first; empty if none was given."""
    own_mesh: dict[str, int]
    """The same of the mesh that the step's own code made, where none was given."""
    gpus_per_node: int | None
    captured_for: str
    """The kind of device."""
    description: str
    """The settings in one line."""

    @property
    def mesh_words(self) -> str:
        """The mesh as people write it: `dp=8, tp=4`."""
        return ", ".join(f"{name}={size}" for name, size in (self.mesh or self.own_mesh).items())


@dataclass(frozen=True)
class Share:
    """A part of the peak."""

    name: str
    bytes: int
    share: float


@dataclass(frozen=True)
class ModuleRow:
    """Modules that play the same part, as one row: `h.0-11` stands for twelve. Figures are their sums."""

    label: str
    """Dotted name without what the row around it already says; several numbers as `0-11` or `1,4..16`."""
    indent: int
    """How many of the shown rows this one is inside of."""
    class_name: str
    count: int
    held_bytes: int
    """Parameters, buffers and what the modules made that is alive at the peak of the step."""
    parameter_bytes: int
    whole_parameter_bytes: int
    """Those of all ranks, each counted once."""
    activation_bytes: int
    """What forward leaves alive for backward."""
    forward_seconds: float
    """0 where costs are not known."""
    backward_seconds: float


@dataclass(frozen=True)
class MemoryCurve:
    """Bytes in use over the step, at most some thousand points of it; the peak is one of them."""

    ops: tuple[int, ...]
    """The op of each point: of those that it stands for, the one with the most bytes."""
    names: tuple[str, ...]
    modules: tuple[str, ...]
    phases: tuple[str, ...]
    by_category: dict[str, tuple[int, ...]]
    """For each category its bytes at each point; workspaces of kernels are temporary."""
    peak: int
    """The point of the peak; -1 if it is what is there before the step."""


@dataclass(frozen=True)
class EstimateData:
    """An estimate: does it fit, what the peak consists of, where the time goes."""

    subject: Subject
    peak_bytes: int
    persistent_bytes: int
    allocated_peak_bytes: int
    reserved_peak_bytes: int
    smallest_memory_bytes: int
    libraries: dict[str, int]
    """What cuBLAS and its like keep, by handle; it is in the three figures before."""
    expandable_saves_bytes: int
    """How much less memory would do with `expandable_segments:True`."""
    context_bytes: int
    """What the CUDA context takes, outside of the allocator."""
    communicator_bytes: int
    """What NCCL keeps for the groups that the rank communicates in, outside of the allocator; assumed."""
    communicators: int
    """How many groups those are."""
    fits: bool
    verdict: Verdict
    spare_bytes: int
    margin_bytes: int
    peak: Peak
    by_category: dict[str, int]
    gathered_bytes: int
    """Parameters that FSDP has gathered, at the peak."""
    communication_bytes: int
    """Buffers of collectives, at the peak."""
    ranks: tuple[RankPeak, ...]
    """Where the worst rank was asked for: those that were looked at."""
    advice: tuple[Advice, ...]
    time: StepTime | None
    modules: tuple[ModuleStats, ...]
    orders: dict[str, tuple[str, ...]]
    """The modules in the order in which their forward and backward began and ended."""
    shares: tuple[Share, ...]
    """What there is at the peak by category, the most first."""
    rows: tuple[ModuleRow, ...]
    """The largest modules, as an indented tree."""
    memory: MemoryCurve


@dataclass(frozen=True)
class ComparedWay:
    """A way to run the step beside others."""

    name: str
    peak_bytes: int
    memory_bytes: int
    """The least memory with which it runs."""
    step_seconds: float
    added: float
    """What it adds to the step's time, as a share of the step as it is."""
    fits: bool


@dataclass(frozen=True)
class RegionGroup:
    """Regions of a plan with the same decisions, as one row. Bytes and seconds are their sums."""

    module: str
    """Of the first region."""
    calls: int
    kept_bytes: int
    recompute_seconds: float
    decisions: dict[str, int]
    """How many ops of one region have each decision."""
    offloaded_bytes: int = 0


@dataclass(frozen=True)
class PlanData:
    """A plan: does it fit, what it costs, the usual ways beside it, its regions."""

    subject: Subject
    feasible: bool
    budget_bytes: int
    margin_bytes: int
    """What the budget leaves free of the device's memory; 0 if the budget was named."""
    baseline: dict[str, float]
    """The peak and the time of the step as it is."""
    peak_bytes: int
    smallest_memory_bytes: int
    """The least memory with which the step runs under the plan."""
    reserve_bytes: int
    host_bytes: int
    """What is in the host's memory between forward and backward."""
    step_seconds: float
    recompute_seconds: float
    waiting_seconds: float
    """What the plan adds besides: on a GPU the device waits for the host, on a CPU checkpointing itself."""
    bound_seconds: float
    gap: float
    method: str
    world_size: int
    trace_hash: str
    regions: tuple[dict[str, Any], ...]
    """Each region, and how many of its ops have which decision."""
    baselines: tuple[Baseline, ...]
    by_category: dict[str, int]
    advice: tuple[Advice, ...]
    minimum_peak_bytes: int | None
    """The smallest reachable peak, if nothing fits."""
    minimum_memory_bytes: int | None
    """The least memory with which any plan runs that was found, if nothing fits."""
    expandable: dict[str, float] | None
    """The plan with `expandable_segments:True`, where that is clearly faster, or the only one that fits."""
    added: float
    groups: tuple[RegionGroup, ...]
    """The most regions first."""
    ways: tuple[ComparedWay, ...]
    """This plan, then the usual ways."""
    memory: MemoryCurve


@dataclass(frozen=True)
class PointRow:
    """One point of a frontier."""

    peak_bytes: int
    smallest_memory_bytes: int
    step_seconds: float
    bound_seconds: float
    regions: int
    verdict: Verdict
    added: float | None
    """Beside the fastest, as a share of its time; None if that is not known."""
    recompute_seconds: float
    waiting_seconds: float
    """What the plan adds besides, as in `PlanData`."""


@dataclass(frozen=True)
class WayBeside:
    """One of the usual ways beside the points of a frontier."""

    name: str
    peak_bytes: int
    smallest_memory_bytes: int
    step_seconds: float
    regions: int
    verdict: Verdict
    added: float | None
    """As of a point."""


@dataclass(frozen=True)
class FrontierData:
    """A frontier: the least time for every amount of memory, the least memory first."""

    subject: Subject
    points: tuple[PointRow, ...]
    margin_bytes: int
    baselines: tuple[Baseline, ...]
    best: PointRow | None
    """The fastest that leaves the device's margin free."""
    ways: tuple[WayBeside, ...]
    """The usual ways as a reader sees them."""


@dataclass(frozen=True)
class Compared(Generic[Number]):
    """A figure as predicted and as measured."""

    predicted: Number
    measured: Number

    @property
    def exact(self) -> bool:
        """Whether both are the same."""
        return self.predicted == self.measured

    @property
    def ratio(self) -> float | None:
        """Predicted by measured; None if nothing was measured."""
        return self.predicted / self.measured if self.measured else None

    @property
    def error(self) -> float | None:
        """What was predicted too much, as a share of what was measured; None if nothing was."""
        return (self.predicted - self.measured) / self.measured if self.measured else None


@dataclass(frozen=True)
class VerificationData:
    """Predicted against measured; with a plan or a way also whether it changes results."""

    subject: Subject
    peak_bytes: Compared[int]
    error: float
    """Of the predicted peak."""
    persistent_bytes: Compared[int]
    seconds: Compared[float]
    baseline_measured_peak_bytes: int
    """Of the step without the plan; if there is none, of the measured step."""
    baseline_measured_seconds: float
    plan_made_for: dict[str, Any] | None
    """The device and the settings of the step that the plan was made for; None if there is no plan."""
    plan_differences: tuple[Difference, ...]
    """In what the step is not the one that the plan was made for."""
    compiled: bool
    runs: dict[str, int]
    """How often the real step ran, and what for."""
    other_load: float | None
    loss_equal: bool | None
    gradients_equal: bool | None
    max_gradient_difference: float | None
    """None where no number says it."""
    state_equal: bool | None
    differences: tuple[str, ...]
    not_compared: tuple[str, ...]
    relative_gradient_difference: float | None
    """Of the largest element of any gradient."""
    way: WayChecked | None = None

    @property
    def ran_with(self) -> str:
        """What the step was run with, and then without: `the plan` or `the way`; empty if with neither."""
        return "the plan" if self.plan_made_for is not None else "the way" if self.way is not None else ""
