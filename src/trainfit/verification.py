"""Run the real step on this machine and compare what was measured with what was predicted."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from trainfit import capturing
from trainfit.capturing.random_stream import seeded
from trainfit.costs.pricing import CostSource, Measuring, price_trace
from trainfit.costs.schedule import schedule
from trainfit.devices import Device
from trainfit.errors import MemoryGuard
from trainfit.plan_comparison import SameResults, compare_results, planned
from trainfit.plan_origin import plan_differences
from trainfit.plans import Plan
from trainfit.profiler import no_cycle_collection, profile_allocations
from trainfit.settings import UNKNOWN_SETTINGS, Difference, Settings
from trainfit.simulate import simulate
from trainfit.step import Step
from trainfit.trace import Trace
from trainfit.units import format_bytes
from trainfit.user_errors import raise_as_user_error
from trainfit.workspace.measured import THOROUGH

_MOST_WARM_UPS = 20
_LEAST_TIMED, _MOST_TIMED, _TIMING_SECONDS = 3, 20, 2.0
_SAFE_SHARE = 0.9
"""Share of the machine's free memory above which a real run needs `force`."""


@dataclass(frozen=True)
class Measurement:
    """What one real, steady step did."""

    peak_bytes: int
    persistent_bytes: int
    seconds: float


@dataclass(frozen=True)
class Comparison:
    """A planned step against the same step without its plan: same seeds, same data."""

    plan: Plan
    baseline: Measurement
    results: SameResults

    @property
    def loss_equal(self) -> bool | None:
        """Whether what `run` returned is the same, bit by bit; None if nothing in it can be compared."""
        return self.results.loss.equal

    @property
    def gradients_equal(self) -> bool | None:
        """Whether every gradient is the same, bit by bit; None if no gradient was seen."""
        return self.results.gradients.equal

    @property
    def state_equal(self) -> bool | None:
        """Whether parameters and buffers are the same when the step is done, bit by bit."""
        return self.results.state.equal

    @property
    def max_gradient_difference(self) -> float:
        """The largest difference of any element of any gradient; infinite where no number says it."""
        return self.results.gradients.largest_difference


@dataclass(frozen=True)
class Verification:
    """Predicted against measured. `seconds` is the wall time of each stage of the verification itself."""

    target: str
    device: Device
    trace: Trace
    predicted_peak_bytes: int
    predicted_persistent_bytes: int
    predicted_seconds: float
    measured: Measurement
    warnings: tuple[str, ...]
    comparison: Comparison | None = None
    """With a plan: what it was compared with."""
    plan_differences: tuple[Difference, ...] = ()
    """In what the step is not the one that the plan was made for: then its promise is about another one."""
    seconds: dict[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        """One line; the parts have the rest."""
        return (
            f"<Verification of {self.target} on {self.device.name}: predicted "
            f"{format_bytes(self.predicted_peak_bytes)}, measured {format_bytes(self.measured.peak_bytes)}>"
        )

    @property
    def error(self) -> float:
        """Relative error of the predicted peak: (predicted - measured) / measured."""
        return (self.predicted_peak_bytes - self.measured.peak_bytes) / max(self.measured.peak_bytes, 1)


def verify_step(
    build: Callable[[], Step],
    device: Device,
    *,
    target: str,
    settings: Settings = UNKNOWN_SETTINGS,
    plan: Plan | None = None,
    costs: CostSource = "measured",
    force: bool = False,
    progress: Callable[[str], None] | None = None,
    measuring: Measuring | None = None,
) -> Verification:
    """Predict, then measure; refuses to run what this machine's memory cannot hold, unless forced.

    With a plan, the promise is the plan's, and the step also runs without it: results have to be the same.
    """
    begin = time.perf_counter()
    report = progress or (lambda stage: None)
    trace = capturing.capture(
        build, device=device, target=target, settings=settings, limits=THOROUGH, progress=progress
    )
    timeline = simulate(trace)
    captured = time.perf_counter()
    if not force:
        guard_memory(timeline.peak_bytes, device)
    table = price_trace(trace, device, costs=costs, progress=measuring)
    priced = time.perf_counter()
    report("real run")
    comparison = None
    try:
        measured = measure_step(build, device.kind, plan)
        if plan is not None:
            report("real run without the plan")
            baseline = measure_step(build, device.kind)
            report("comparing results")
            comparison = Comparison(plan, baseline, compare_results(build, plan))
    except Exception as error:
        raise_as_user_error(error, "the real step")
    end = time.perf_counter()
    return Verification(
        target=target,
        device=device,
        trace=trace,
        predicted_peak_bytes=timeline.peak_bytes if plan is None else plan.peak_bytes,
        predicted_persistent_bytes=timeline.persistent_bytes,
        predicted_seconds=schedule(trace, table).step_seconds if plan is None else plan.step_seconds,
        measured=measured,
        warnings=trace.warnings + table.warnings,
        comparison=comparison,
        plan_differences=plan_differences(plan, trace, device.name) if plan is not None else (),
        seconds={
            "capture": captured - begin,
            "price": priced - captured,
            "measure": end - priced,
            "total": end - begin,
        },
    )


def guard_memory(peak_bytes: int, device: Device) -> None:
    """Refuse a real run whose predicted peak does not fit into this machine's free memory."""
    free = torch.cuda.mem_get_info()[0] if device.kind == "cuda" else free_host_bytes()
    if peak_bytes > _SAFE_SHARE * free:
        raise MemoryGuard(
            f"the real step would need {format_bytes(peak_bytes)} (predicted), and this machine has "
            f"{format_bytes(free)} free. Use a smaller batch, or --force to run it all the same."
        )


def free_host_bytes() -> int:
    """Return the host memory that can be had without swapping."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def measure_step(
    build: Callable[[], Step], kind: str, plan: Plan | None = None, *, timed: bool = True
) -> Measurement:
    """Build and run the real step twice, with a plan or without, and measure the second, steady one.

    A few more are timed without the profiler; if not `timed`, the seconds are those under it.
    """
    build = planned(build, plan)
    gc.collect()  # what earlier runs left behind in cycles would take real memory beside this one
    if kind == "cuda":
        return _measure_cuda(build)
    # A compiled function is measured as its eager original, which is what was captured.
    eager = torch.compiler.set_stance("force_eager")
    with eager, seeded(), no_cycle_collection():
        with profile_allocations() as log:
            step = build()
            _warm_up(step)
            with log.range("step"):
                result = step.run()
        del result
        usage = log.usage("step")
        seconds = _typical_seconds(step) if timed else usage.seconds
    return Measurement(usage.peak_bytes, usage.start_bytes, seconds)


def _typical_seconds(step: Step) -> float:
    """Time a few more steps without the profiler, which slows every operator down; return the median."""
    taken: list[float] = []
    begin = time.perf_counter()
    while len(taken) < _LEAST_TIMED or (
        len(taken) < _MOST_TIMED and time.perf_counter() - begin < _TIMING_SECONDS
    ):
        start = time.perf_counter()
        step.run()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _warm_up(step: Step) -> None:
    """Run the step until every optimizer has stepped: a gradient scaler may skip the first ones."""
    stepped: set[int] = set()

    def after_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        stepped.update(_parameter_ids(optimizer))

    # Known by their parameters: what the step has may be a wrapper around an optimizer, as in Accelerate.
    handle = register_optimizer_step_post_hook(after_step)
    try:
        for _ in range(_MOST_WARM_UPS):
            step.run()
            if all(_parameter_ids(optimizer) <= stepped for optimizer in step.optimizers):
                break
    finally:
        handle.remove()
    gc.collect()


def _parameter_ids(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _measure_cuda(build: Callable[[], Step]) -> Measurement:
    outside = torch.cuda.memory_allocated()
    with seeded(), no_cycle_collection():
        step = build()
        _warm_up(step)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        persistent = torch.cuda.memory_allocated() - outside
        result = step.run()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - outside
        del result
        seconds = _typical_seconds(step)
    return Measurement(peak, persistent, seconds)
