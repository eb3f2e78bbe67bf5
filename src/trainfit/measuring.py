"""Run the real step on this machine and measure it: what it allocates, and how long it takes.

`run` is called until the step is steady (`_warm_up`), once more to see every allocation, and a few times for
the clock. A step that is compiled runs compiled, unless told otherwise.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from trainfit.capturing.compiled import compilations, noticed
from trainfit.capturing.random_stream import seeded
from trainfit.capturing.surroundings import Surroundings
from trainfit.errors import StepError
from trainfit.plan_comparison import planned
from trainfit.plans import Plan
from trainfit.profiler import no_cycle_collection, profile_allocations
from trainfit.step import Step
from trainfit.step_marks import StepMarks
from trainfit.timing.load import LoadMeter
from trainfit.trace import USUAL_STEPS, Steps
from trainfit.user_errors import data_ended

TIMED_RUNS = 10
"""So many steps are timed at most, if nothing else is said."""
_MOST_WARM_UPS = 20
_ENOUGH_RUNS, _ENOUGH_SECONDS = 3, 2.0
"""Timing ends early when this many steps have taken this long."""


@dataclass(frozen=True)
class Runs:
    """How often `run` was called."""

    warm_up: int
    observed: int
    """While every allocation was counted."""
    timed: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.warm_up + self.observed + self.timed


@dataclass(frozen=True)
class Measurement:
    """What one real, steady step did."""

    peak_bytes: int
    persistent_bytes: int
    seconds: float
    """The median of the timed steps; without any, of the one whose allocations were counted."""
    runs: Runs = Runs(0, 0, 0)
    compiled: bool = False
    """Whether compiled code ran."""
    load: float | None = None
    """The share of this machine's processors that other work took meanwhile; None if it is not known."""
    notes: tuple[str, ...] = ()
    """What else to know about the figures."""


def measure_step(
    build: Callable[[], Step],
    kind: str,
    plan: Plan | None = None,
    *,
    steps: Steps = USUAL_STEPS,
    timed: int = TIMED_RUNS,
    eager: bool = False,
    meter: LoadMeter | None = None,
) -> Measurement:
    """Build the real step, with a plan or without, run it until it is steady, and measure it.

    `steps` says which run was captured: that one is measured. At most `timed` runs are timed. With `eager`,
    what the step compiles runs as its eager original.
    """
    build = planned(build, plan)
    compiled: list[bool] = []
    stance = torch.compiler.set_stance("force_eager") if eager else noticed(lambda: compiled.append(True))
    gc.collect()  # what earlier runs left behind in cycles would take real memory beside this one
    observe = _observe_cuda if kind == "cuda" else _observe_cpu
    with _nothing_remembered(), stance, seeded(), no_cycle_collection():
        seen = observe(build, steps)
        with (meter or LoadMeter()).watching() as watch:
            times, notes = _timed_runs(seen, timed)
    return Measurement(
        peak_bytes=seen.peak_bytes,
        persistent_bytes=seen.persistent_bytes,
        seconds=statistics.median(times) if times else seen.seconds,
        runs=Runs(seen.warm_ups, 1, len(times)),
        compiled=bool(compiled),
        load=watch.share if times else None,
        notes=notes,
    )


@contextlib.contextmanager
def _nothing_remembered() -> Iterator[None]:
    """Empty the function caches that the block filled: a later measurement has to allocate that as well."""
    surroundings = Surroundings()
    try:
        yield
    finally:
        surroundings.put_back()


@dataclass(frozen=True)
class _Observed:
    """A steady step, and what it allocated."""

    step: Step
    warm_ups: int
    peak_bytes: int
    persistent_bytes: int
    seconds: float
    leaves_marks: bool
    """Whether its runs change anything that is looked at; then one that changes nothing did nothing."""


def _observe_cpu(build: Callable[[], Step], steps: Steps) -> _Observed:
    # A build that keeps its model in a global variable lets go of the one that it made before.
    with profile_allocations(only_own=True) as log:
        step = build()
        warm_ups, leaves_marks = _warm_up(step, steps)
        before = StepMarks(step)
        with log.range("step"):
            result = step.run()
    _refuse_idle(step, before, warm_ups, leaves_marks)
    del result
    usage = log.usage("step")
    return _Observed(step, warm_ups, usage.peak_bytes, usage.start_bytes, usage.seconds, leaves_marks)


def _observe_cuda(build: Callable[[], Step], steps: Steps) -> _Observed:
    outside = torch.cuda.memory_allocated()
    step = build()
    warm_ups, leaves_marks = _warm_up(step, steps)
    before = StepMarks(step)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    persistent = torch.cuda.memory_allocated() - outside
    with _clock() as seconds:
        result = step.run()
    peak = torch.cuda.max_memory_allocated() - outside
    _refuse_idle(step, before, warm_ups, leaves_marks)
    del result
    return _Observed(step, warm_ups, peak, persistent, seconds[0], leaves_marks)


def _refuse_idle(step: Step, before: StepMarks, runs: int, leaves_marks: bool) -> None:
    """Refuse a run that did nothing for the truth about the step."""
    if leaves_marks and not StepMarks(step).differ_from(before):
        raise StepError(
            f"the real step trained in its first {runs} runs and did nothing in the next, which was to be "
            "measured. If its data has ended, let it begin again, as itertools.cycle does, or take more."
        )


def _warm_up(step: Step, steps: Steps) -> tuple[int, bool]:
    """Run the step as often as before the run that was captured; return how often, and whether that shows.

    And on until every optimizer has stepped, if they all had then, and nothing is compiled any more: a
    gradient scaler may skip the first steps, and a compiler may compile again what it sees a second time.
    """
    stepped: set[int] = set()

    def after_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        stepped.update(_parameter_ids(optimizer))

    def is_steady() -> bool:
        own = (_parameter_ids(optimizer) for optimizer in step.optimizers)
        return not steps.all_stepped or all(not parameters or parameters & stepped for parameters in own)

    # Known by their parameters: what the step has may be a wrapper around an optimizer, as in Accelerate.
    handle = register_optimizer_step_post_hook(after_step)
    runs, compiling, begin = 0, True, StepMarks(step)
    try:
        while runs < steps.runs_before or (runs < _MOST_WARM_UPS and (compiling or not is_steady())):
            before = compilations()
            step.run()
            runs += 1
            compiling = compilations() > before
    finally:
        handle.remove()
    gc.collect()
    # Without an optimizer nothing has to change: the gradients may be gone again.
    return runs, bool(stepped) and StepMarks(step).differ_from(begin)


def _parameter_ids(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _timed_runs(seen: _Observed, most: int) -> tuple[list[float], tuple[str, ...]]:
    """Time some steps without the profiler, which slows every operator down; end well if their data does."""
    taken: list[float] = []
    begin = time.perf_counter()
    while len(taken) < most and (len(taken) < _ENOUGH_RUNS or time.perf_counter() - begin < _ENOUGH_SECONDS):
        before = StepMarks(seen.step)
        measured = f"{len(taken)} of {most} steps were timed" if taken else "no step was timed by itself"
        try:
            with _clock() as seconds:
                seen.step.run()
        except Exception as error:
            if not data_ended(error):
                raise
            return taken, (f"the step's data ended while it was timed: {measured}",)
        if seen.leaves_marks and not StepMarks(seen.step).differ_from(before):
            return taken, (f"the step did nothing when it was timed again, as if its data ended: {measured}",)
        taken += seconds
    return taken, ()


@contextlib.contextmanager
def _clock() -> Iterator[list[float]]:
    """Put the seconds that the block took into a list, when the device is done with it."""
    seconds: list[float] = []
    begin = time.perf_counter()
    yield seconds
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    seconds.append(time.perf_counter() - begin)
