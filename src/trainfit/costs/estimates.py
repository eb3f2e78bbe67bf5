"""`Estimate`: what is predicted for a step on a device, as one result."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainfit.allocator.allocator_options import AllocatorOptions
from trainfit.allocator.device_memory import DeviceMemory
from trainfit.allocator.named_options import DEFAULT_OPTIONS
from trainfit.basics.in_notebooks import ShownInNotebooks
from trainfit.basics.units import format_bytes, format_seconds
from trainfit.costs.advised_seconds import advised_seconds
from trainfit.costs.schedule import schedule
from trainfit.costs.summary import StepTime
from trainfit.costs.table import CostTable
from trainfit.devices.device_table import Device, Verdict
from trainfit.devices.distinct_ranks import RankPeak
from trainfit.memory.advice import Advice, ChangedStep, advice
from trainfit.memory.module_stats import ModuleStats
from trainfit.traces.simulate import Timeline
from trainfit.traces.trace import Trace


@dataclass(frozen=True)
class Peak:
    """Where the peak is."""

    op: str
    op_index: int
    module: str
    phase: str


@dataclass(frozen=True)
class Estimate(ShownInNotebooks):
    """What `estimate` answers. All bytes and seconds are predicted."""

    target: str
    device: Device
    trace: Trace
    timeline: Timeline
    memory: DeviceMemory
    """What of the device's memory the step takes."""
    peak: Peak
    modules: tuple[ModuleStats, ...]
    """One entry per module, in the order of the module tree."""
    costs: CostTable | None
    time: StepTime | None
    """None if nothing is known about the device's speed."""
    allocator: AllocatorOptions | None = DEFAULT_OPTIONS
    """How torch's caching allocator is set; None if memory is taken as it is asked for."""
    expandable_bytes: int | None = None
    """What it would need of the memory with `expandable_segments:True`; None if that makes no difference."""
    sixteen_bits: ChangedStep | None = None
    """The step with 16-bit parameters, where it was captured to say what that would save."""
    ranks: tuple[RankPeak, ...] = ()
    """Where the worst rank of a cluster was asked for: those that were looked at, this one among them."""
    notes: tuple[str, ...] = ()
    """What else to know about the figures."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time of each stage, at least `capture` and `total`."""

    def __repr__(self) -> str:
        """One line; the parts have the rest."""
        time = f", {format_seconds(self.time.step_seconds)} per step" if self.time is not None else ""
        return (
            f"<Estimate of {self.target} on {self.device.name}: peak {format_bytes(self.peak_bytes)}, "
            f"{self.verdict}{time}>"
        )

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once, on the device: storages and workspaces of kernels."""
        return self.timeline.peak_bytes

    @property
    def smallest_memory_bytes(self) -> int:
        """The least memory with which the step runs, as the device's allocator hands it out."""
        return self.memory.smallest_memory_bytes

    @property
    def by_category(self) -> dict[str, int]:
        """Bytes at the peak by category."""
        return self.timeline.peak_by_category

    @property
    def warnings(self) -> tuple[str, ...]:
        """What had to be assumed, and what went wrong while costs were measured."""
        priced = self.costs.warnings if self.costs else ()
        return self.trace.warnings + self._about_memory + priced + self.notes

    @property
    def _about_memory(self) -> tuple[str, ...]:
        steps = self.memory.grows_for_steps
        if steps is None:
            return ()
        return (
            f"torch's caching allocator still reserved more memory in step {steps} than before: how memory "
            "is cut up does not become steady, and later steps may need more than is said here",
        )

    @property
    def fits(self) -> bool:
        """Whether what the step needs is within the device's memory and leaves its margin free."""
        return self.verdict == "fits"

    @property
    def verdict(self) -> Verdict:
        """`fits`, `does not fit`, or between the margin and the limit `too close to call`."""
        return self.device.verdict(self.smallest_memory_bytes)

    @property
    def spare_bytes(self) -> int:
        """What the step leaves of the memory that the device has for tensors; negative if it lacks some."""
        return self.device.usable_bytes - self.smallest_memory_bytes

    @property
    def expandable_saves_bytes(self) -> int:
        """How much less memory would do with `expandable_segments:True`; 0 if no less."""
        return max(self.smallest_memory_bytes - (self.expandable_bytes or self.smallest_memory_bytes), 0)

    @property
    def advice(self) -> tuple[Advice, ...]:
        """What would lower the peak, the most first, whether the step fits or not."""
        seconds = None if self.costs is None else advised_seconds(schedule(self.trace, self.costs))
        return advice(self.timeline, seconds=seconds, sixteen_bits=self.sixteen_bits)


def peak_of(timeline: Timeline) -> Peak:
    """Say where the peak is."""
    if timeline.peak_op < 0:
        return Peak(op="", op_index=-1, module="Global", phase="forward")
    trace = timeline.trace
    op = trace.ops[timeline.peak_op]
    return Peak(trace.op_name(timeline.peak_op), timeline.peak_op, trace.module_name(op.module), op.phase)
