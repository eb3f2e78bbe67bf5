"""What was measured of the real step on this machine beside what was predicted; and the real runs for it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from trainfit.basics.doing import as_part_of, doing
from trainfit.basics.in_notebooks import ShownInNotebooks
from trainfit.basics.units import format_bytes
from trainfit.basics.user_errors import raise_as_user_error
from trainfit.capturing.compiled import is_compiler_error
from trainfit.devices.device_table import Device
from trainfit.devices.hardware import free_bytes
from trainfit.errors import MemoryGuard, StepError
from trainfit.plans.plan import Plan
from trainfit.plans.ways import Way
from trainfit.steps.step import Step
from trainfit.timing.load import LoadMeter, busiest, busy_warning
from trainfit.traces.assumptions import Assumption
from trainfit.traces.settings import Difference
from trainfit.traces.simulate import Timeline
from trainfit.traces.step_runs import Steps
from trainfit.traces.trace import CATEGORIES, Trace
from trainfit.verifying.measuring import Measurement, measure_step
from trainfit.verifying.plan_comparison import SameResults, compare_results

_LONGEST = 300
"""Characters that are shown of a compiler's message."""
_SAFE_SHARE = 0.9
"""Share of the machine's free memory above which a real run needs `force`."""


@dataclass(frozen=True)
class Comparison:
    """A step with a plan or a way against the same step without: same seeds, same data."""

    plan: Plan | None
    """None for a way, which may have one."""
    baseline: Measurement
    results: SameResults
    way: Way | None = None
    tolerance: float | None = None
    """How far apart results may be, as a share of the largest: 0 where they have to be the same bit by bit,
    None where nothing is claimed about them."""

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

    @property
    def results_hold(self) -> bool | None:
        """Whether results are as a plan or a way promises; None where nothing is claimed, or was compared."""
        results, most = self.results, self.tolerance
        if most is None:
            return None
        if most == 0.0:
            equal = self.loss_equal, self.gradients_equal, self.state_equal
            return None if None in equal else all(equal)
        if results.loss.equal is results.gradients.equal is None:
            return None
        apart = self.relative_loss_difference, self.relative_gradient_difference
        return all(difference <= most for difference in apart)

    @property
    def relative_loss_difference(self) -> float:
        """Of what `run` returned, as a share of its largest number."""
        return self.results.loss.largest_difference / (self.results.loss_scale or 1.0)

    @property
    def relative_gradient_difference(self) -> float:
        """The same of the gradients."""
        return self.max_gradient_difference / (self.results.gradient_scale or 1.0)


@dataclass(frozen=True)
class Verification(ShownInNotebooks):
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
        counts = {what: sum(getattr(run, what) for run in runs) for what in ("warm_up", "observed", "timed")}
        counts["compared"] = self.comparison.results.runs if self.comparison else 0
        return {"total": sum(counts.values()), **counts}

    @property
    def error(self) -> float:
        """Relative error of the predicted peak: (predicted - measured) / measured."""
        return (self.predicted_peak_bytes - self.measured.peak_bytes) / max(self.measured.peak_bytes, 1)


def run_for_real(
    build: Callable[[], Step],
    kind: str,
    steps: Steps,
    *,
    plan: Plan | None,
    timed: int,
    eager: bool,
    meter: LoadMeter | None,
) -> tuple[Measurement, Comparison | None]:
    """Measure the step on a kind of device; with a plan also without it, and compare the results of both."""
    measure = functools.partial(measure_step, build, kind, steps=steps, timed=timed, eager=eager, meter=meter)
    with errors_of_real_runs():
        with as_part_of("the real step" if plan is None else "the real step with the plan"):
            measured = measure(plan)
        if plan is None:
            return measured, None
        with as_part_of("the real step without the plan"):
            baseline = measure()
        doing("comparing the results of both")
        return measured, Comparison(plan, baseline, compare_results(build, plan), tolerance=0.0)


@contextlib.contextmanager
def errors_of_real_runs() -> Iterator[None]:
    """Let what goes wrong in a real step be one message."""
    try:
        yield
    except Exception as error:
        _raise_compiler_error(error)
        raise_as_user_error(error, "the real step")


def needed_bytes(timeline: Timeline, plan: Plan | None) -> dict[str, int]:
    """Return what each real run is predicted to need; with a plan, the step also runs without it."""
    if plan is None:
        return {"the real step": timeline.peak_bytes}
    return needed_bytes_with(timeline, plan.peak_bytes, "the plan")


def needed_bytes_with(timeline: Timeline, peak_bytes: int, what: str) -> dict[str, int]:
    """Return what the runs with and without a plan or a way need, and comparing their results.

    Then those of the first run are still there: gradients, parameters, buffers.
    """
    sums = dict.fromkeys(CATEGORIES, 0)
    for storage, size in zip(timeline.trace.storages, timeline.trace.occupied_bytes):
        sums[storage.category] += size
    gradients = min(sums["gradient"], sums["parameter"])
    largest = max(timeline.peak_bytes, peak_bytes)
    return {
        f"the real step with {what}": peak_bytes,
        f"the real step without {what}, which is run to be compared with": timeline.peak_bytes,
        "comparing the results of both runs": largest + sums["parameter"] + sums["buffer"] + 2 * gradients,
    }


def guard_memory(device: Device, needed: dict[str, int]) -> None:
    """Refuse real runs whose predicted needs do not fit into this machine's free memory."""
    free = free_bytes(device.kind)
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


def said_of_real_runs(assumptions: tuple[Assumption, ...]) -> tuple[str, ...]:
    """Say of what the capture did not do to files that the real runs have done it."""
    done = [assumption for assumption in assumptions if assumption.kind == "skipped"]
    others = tuple(str(assumption) for assumption in assumptions if assumption not in done)
    if not done:
        return others
    listed = "; ".join(f"{assumption.text} {assumption.where}" for assumption in done)
    return (*others, f"the step has run for real, and did to files what it does in training: {listed}")


def notes_on(measured: Measurement, comparison: Comparison | None) -> tuple[str, ...]:
    """Say what the measured figures suffered from."""
    runs = [measured] if comparison is None else [measured, comparison.baseline]
    busy = busy_warning(
        busiest(run.load for run in runs), "the step was measured", "its measured time is too long."
    )
    return busy + tuple(dict.fromkeys(note for run in runs for note in run.notes))
