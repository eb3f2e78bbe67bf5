"""The Python API: `capture`, `price`, `estimate`, `verify`, with typed results; the command line calls it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from trainfit import capturing
from trainfit.costs.pricing import CostSource, Measuring, price_trace
from trainfit.costs.schedule import schedule
from trainfit.costs.summary import StepTime, summarise
from trainfit.costs.table import CostTable
from trainfit.devices import Device, find_device
from trainfit.errors import StepError
from trainfit.models.recipe import StepOptions
from trainfit.module_stats import ModuleStats, module_stats
from trainfit.simulate import Timeline, simulate
from trainfit.step import Step
from trainfit.targets import Target, load
from trainfit.trace import Trace
from trainfit.verification import Verification, verify_step

Build = Callable[[], Step]
Progress = Callable[[str], None]
"""Called with the name of each stage as it begins."""


@dataclass(frozen=True)
class Peak:
    """Where the peak is."""

    op: str
    op_index: int
    module: str
    phase: str


@dataclass(frozen=True)
class Estimate:
    """What `estimate` answers. All bytes and seconds are predicted."""

    target: str
    device: Device
    trace: Trace
    timeline: Timeline
    peak: Peak
    modules: tuple[ModuleStats, ...]
    """One entry per module, in the order of the module tree."""
    costs: CostTable | None
    time: StepTime | None
    """None if nothing is known about the device's speed."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time of each stage, at least `capture` and `total`."""

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once, on the device."""
        return self.timeline.peak_bytes

    @property
    def by_category(self) -> dict[str, int]:
        """Bytes at the peak by category."""
        return self.timeline.peak_by_category

    @property
    def warnings(self) -> tuple[str, ...]:
        """What had to be assumed."""
        return self.trace.warnings

    @property
    def fits(self) -> bool:
        """Whether the peak is below the memory that the device has for tensors."""
        return self.peak_bytes <= self.device.usable_bytes


def capture(
    target: str | Build,
    *,
    device: str | Device = "cpu",
    options: StepOptions | None = None,
    task: str | None = None,
    progress: Progress | None = None,
) -> Trace:
    """Capture one steady step of `target` for a device, without running it.

    `target` is a name as on the command line, or the function that builds the `Step`.
    """
    found = device if isinstance(device, Device) else find_device(device)
    resolved = _resolve(target, found, options, task)
    return capturing.capture(resolved.build, device=found.kind, target=resolved.name, progress=progress)


def price(
    trace: Trace,
    device: str | Device = "cpu",
    *,
    costs: CostSource = "roofline",
    refresh: bool = False,
    progress: Measuring | None = None,
) -> CostTable:
    """Return what every distinct operator of a trace costs on a device.

    `roofline` prices by formulas, on any device. `measured` runs each operator on this machine, which has to
    be the device, and remembers the result on disk; `refresh` measures again.
    """
    found = device if isinstance(device, Device) else find_device(device)
    _refuse_other_kind(trace, found)
    return price_trace(trace, found, costs=costs, refresh=refresh, progress=progress)


def estimate(
    target: str | Build | Trace,
    *,
    device: str | Device = "cpu",
    options: StepOptions | None = None,
    task: str | None = None,
    costs: CostSource = "roofline",
    refresh: bool = False,
    progress: Progress | None = None,
    measuring: Measuring | None = None,
) -> Estimate:
    """Predict the peak memory of a step on a device and its time, what they consist of and where they go."""
    begin = time.perf_counter()
    found = device if isinstance(device, Device) else find_device(device)
    if isinstance(target, Trace):
        trace = target
    else:
        trace = capture(target, device=found, options=options, task=task, progress=progress)
    _refuse_other_kind(trace, found)
    captured = time.perf_counter()
    timeline = simulate(trace)
    stats = module_stats(timeline)
    simulated = time.perf_counter()
    table = None
    step_time = None
    if found.has_speed or costs == "measured":
        table = price_trace(trace, found, costs=costs, refresh=refresh, progress=measuring)
        step_time = summarise(schedule(trace, table))
        stats = tuple(
            replace(module, forward_seconds=forward, backward_seconds=backward)
            for module, (forward, backward) in zip(stats, step_time.module_seconds)
        )
    end = time.perf_counter()
    return Estimate(
        target=trace.target,
        device=found,
        trace=trace,
        timeline=timeline,
        peak=_peak(timeline),
        modules=stats,
        costs=table,
        time=step_time,
        seconds={
            "capture": captured - begin,
            "simulate": simulated - captured,
            "price": end - simulated,
            "total": end - begin,
        },
    )


def _refuse_other_kind(trace: Trace, device: Device) -> None:
    if trace.device != device.kind:
        raise StepError(
            f"the trace was captured for {trace.device}, but {device.name} is a {device.kind} device; "
            "capture again for this device."
        )


def verify(
    target: str | Build,
    *,
    options: StepOptions | None = None,
    task: str | None = None,
    costs: CostSource = "measured",
    force: bool = False,
    progress: Progress | None = None,
    measuring: Measuring | None = None,
) -> Verification:
    """Run the real step on this machine and compare its measured peak and time with the predicted ones."""
    device = find_device("cuda" if _cuda_is_present() else "cpu")
    resolved = _resolve(target, device, options, task)
    return verify_step(
        resolved.build,
        device,
        target=resolved.name,
        costs=costs,
        force=force,
        progress=progress,
        measuring=measuring,
    )


def _resolve(target: str | Build, device: Device, options: StepOptions | None, task: str | None) -> Target:
    if isinstance(target, Step):
        raise StepError(
            "a Step with real tensors was passed where the step is still to be built; "
            "pass the function that builds it, so that it can be called without allocating anything."
        )
    if isinstance(target, str):
        return load(target, replace(options or StepOptions(), device=device.kind), task)
    return Target(name=getattr(target, "__name__", "step"), build=target, kind="module")


def _peak(timeline: Timeline) -> Peak:
    if timeline.peak_op < 0:
        return Peak(op="", op_index=-1, module="Global", phase="forward")
    trace = timeline.trace
    op = trace.ops[timeline.peak_op]
    return Peak(trace.op_name(timeline.peak_op), timeline.peak_op, trace.module_name(op.module), op.phase)


def _cuda_is_present() -> bool:
    import torch

    return torch.cuda.is_available()
