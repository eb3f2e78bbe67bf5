"""Run the real step on this machine and compare what was measured with what was predicted."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from trainfit import capturing
from trainfit.capturing.compiled import is_compiler_error
from trainfit.costs.pricing import CostSource, Measuring, price_trace
from trainfit.costs.schedule import schedule
from trainfit.devices import Device
from trainfit.errors import MemoryGuard, StepError
from trainfit.measuring import TIMED_RUNS, Measurement, measure_step
from trainfit.plan_comparison import SameResults, compare_results
from trainfit.plan_origin import plan_differences
from trainfit.plans import Plan
from trainfit.settings import UNKNOWN_SETTINGS, Difference, Settings
from trainfit.simulate import Timeline, simulate
from trainfit.step import Step
from trainfit.timing.load import LoadMeter, busiest, busy_warning
from trainfit.trace import CATEGORIES, Trace
from trainfit.units import format_bytes
from trainfit.user_errors import raise_as_user_error
from trainfit.workspace.measured import THOROUGH

_LONGEST = 300
"""Characters that are shown of a compiler's message."""
_SAFE_SHARE = 0.9
"""Share of the machine's free memory above which a real run needs `force`."""


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
    def runs(self) -> dict[str, int]:
        """How often `run` was called on real tensors, and what for."""
        runs = [self.measured.runs, *([self.comparison.baseline.runs] if self.comparison else [])]
        counts = {
            "warm_up": sum(run.warm_up for run in runs),
            "observed": sum(run.observed for run in runs),
            "timed": sum(run.timed for run in runs),
            "compared": self.comparison.results.runs if self.comparison else 0,
        }
        return {"total": sum(counts.values()), **counts}

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
    refresh: bool = False,
    steps: int | None = None,
    force: bool = False,
    eager: bool = False,
    timed_runs: int = TIMED_RUNS,
    progress: Callable[[str], None] | None = None,
    measuring: Measuring | None = None,
    meter: LoadMeter | None = None,
) -> Verification:
    """Predict, then measure; refuses to run what this machine's memory cannot hold, unless forced.

    With a plan, the promise is the plan's, and the step also runs without it: results have to be the same.
    What the step compiles runs compiled, unless `eager`; predicted is the eager step.
    """
    begin = time.perf_counter()
    report = progress or (lambda stage: None)
    trace = capturing.capture(
        build,
        device=device,
        target=target,
        settings=settings,
        limits=THOROUGH,
        steps=steps,
        progress=progress,
        guard=None if force else lambda needed: guard_memory(device, {"the real step": needed}),
    )
    timeline = simulate(trace)
    captured = time.perf_counter()
    if not force:
        guard_memory(device, _needed_bytes(timeline, plan))
    table = price_trace(trace, device, costs=costs, refresh=refresh, progress=measuring)
    priced = time.perf_counter()
    report("real run")
    comparison = None
    try:
        measure = functools.partial(
            measure_step,
            build,
            device.kind,
            steps=trace.steps,
            timed=timed_runs,
            eager=eager,
            meter=meter,
        )
        measured = measure(plan)
        if plan is not None:
            report("real run without the plan")
            baseline = measure()
            report("comparing results")
            comparison = Comparison(plan, baseline, compare_results(build, plan))
    except Exception as error:
        _raise_compiler_error(error)
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
        warnings=_of_real_runs(trace.warnings) + table.warnings + _notes(measured, comparison),
        comparison=comparison,
        plan_differences=plan_differences(plan, trace, device.name) if plan is not None else (),
        seconds={
            "capture": captured - begin,
            "price": priced - captured,
            "measure": end - priced,
            "total": end - begin,
        },
    )


def _needed_bytes(timeline: Timeline, plan: Plan | None) -> dict[str, int]:
    """Return what each real run is predicted to need; with a plan, the step also runs without it.

    When their results are compared, those of the first run are still there: gradients, parameters, buffers.
    """
    if plan is None:
        return {"the real step": timeline.peak_bytes}
    sums = dict.fromkeys(CATEGORIES, 0)
    for storage in timeline.trace.storages:
        sums[storage.category] += storage.bytes
    gradients = min(sums["gradient"], sums["parameter"])
    largest = max(timeline.peak_bytes, plan.peak_bytes)
    return {
        "the real step with the plan": plan.peak_bytes,
        "the real step without the plan, which is run to be compared with": timeline.peak_bytes,
        "comparing the results of both runs": largest + sums["parameter"] + sums["buffer"] + 2 * gradients,
    }


def guard_memory(device: Device, needed: dict[str, int]) -> None:
    """Refuse real runs whose predicted needs do not fit into this machine's free memory."""
    free = torch.cuda.mem_get_info()[0] if device.kind == "cuda" else free_host_bytes()
    for what, needed_bytes in needed.items():
        if needed_bytes > _SAFE_SHARE * free:
            raise MemoryGuard(
                f"{what} would need {format_bytes(needed_bytes)} (predicted), and this machine has "
                f"{format_bytes(free)} free. Use a smaller batch, or --force to run it all the same."
            )


def _raise_compiler_error(error: BaseException) -> None:
    """Raise what torch's compiler could not do as a mistake that the user can get around; nothing else."""
    if is_compiler_error(error):
        # What follows is for people who work on torch.
        summary = " ".join(str(error).partition("Set TORCHDYNAMO_VERBOSE")[0].split())
        raise StepError(
            f"the step is compiled, and torch's compiler failed on this machine: {summary:.{_LONGEST}}. "
            "Add --eager (in Python: eager=True) to measure the step without the compiler."
        ) from error


def _of_real_runs(warnings: tuple[str, ...]) -> tuple[str, ...]:
    """Say of what the capture did not do to files that the real runs have done it."""
    skipped = [warning for warning in warnings if _SKIPPED in warning]
    if not skipped:
        return warnings
    done = "; ".join(
        f"{warning.partition(_REASON)[0].replace(_SKIPPED, '')} ({warning.rpartition('(')[2]}"
        for warning in skipped
    )
    said = f"the step has run for real, and did to files what it does in training: {done}"
    return (*(warning for warning in warnings if warning not in skipped), said)


_SKIPPED, _REASON = " was skipped", ": a capture "
"""In every note about files that a capture leaves alone (`capturing/disk/`); its line follows in brackets."""


def _notes(measured: Measurement, comparison: Comparison | None) -> tuple[str, ...]:
    """Say what the measured figures suffered from."""
    runs = [measured] if comparison is None else [measured, comparison.baseline]
    busy = busy_warning(
        busiest(run.load for run in runs), "the step was measured", "its measured time is too long."
    )
    return busy + tuple(dict.fromkeys(note for run in runs for note in run.notes))


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
