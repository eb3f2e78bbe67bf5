"""Run the real step on this machine and measure it: what it allocates, and how long it takes.

`run` is called until the step is steady (`_warm_up`), once more to see every allocation, and a few times for
the clock. A step that is compiled runs compiled, unless told otherwise; one that is compiled only when it is
being measured is measured again after that.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from trainfit.basics.doing import doing
from trainfit.basics.user_errors import data_ended
from trainfit.capturing.compiled import compilations, noticed
from trainfit.capturing.left_as_found import FoundState
from trainfit.capturing.random_stream import seeded
from trainfit.devices.hardware import CUDA, Cuda
from trainfit.errors import StepError
from trainfit.plans.plan import Plan
from trainfit.steps.step import Step
from trainfit.steps.step_marks import StepMarks
from trainfit.timing.load import LoadMeter
from trainfit.traces.step_runs import USUAL_STEPS, Steps
from trainfit.verifying.plan_comparison import planned
from trainfit.workspace.profiler import no_cycle_collection, profile_allocations

TIMED_RUNS = 10
"""The most steps that are timed, unless told otherwise."""
_MOST_WARM_UPS = 20
_MOST_MEASUREMENTS = 3
"""How often a step is measured that keeps being compiled meanwhile."""
_ENOUGH_RUNS, _ENOUGH_SECONDS = 3, 2.0
"""Timing ends early when this many steps have taken this long."""
_COMPILED_MEANWHILE = (
    "the step did not become steady: something was compiled while it was measured, or compiled code ran in "
    "some of the measured runs only. The measured peak is that of one run, and the measured time may have "
    "compilation in it."
)


@dataclass(frozen=True)
class RunCounts:
    """How often `run` was called."""

    warm_up: int
    observed: int
    """While every allocation was counted."""
    timed: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.warm_up + self.observed + self.timed

    def after(self, others: int) -> RunCounts:
        """Add runs that were not measured, or whose figures were given up."""
        return replace(self, warm_up=self.warm_up + others)


@dataclass(frozen=True)
class Measurement:
    """What one real, steady step did."""

    peak_bytes: int
    persistent_bytes: int
    seconds: float
    """The median of the timed steps; without any, of the one whose allocations were counted."""
    runs: RunCounts = RunCounts(0, 0, 0)
    compiled: bool = False
    """Whether compiled code ran when allocations were counted."""
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
    cuda: Cuda = CUDA,
) -> Measurement:
    """Build the real step, with a plan or without, run it until it is steady, and measure it.

    `steps` says which run was captured: that one is measured. At most `timed` runs are timed. With `eager`,
    what the step compiles runs as its eager original.

    If something is compiled in a run that is measured, or only some of those run compiled code, the step is
    built and measured anew, after as many runs as that took; a note says so if it does not become steady.
    """
    measure = functools.partial(_measured_once, planned(build, plan), kind, timed, eager, meter, cuda)
    compiler = _Compiler()
    found = measure(compiler, steps, 0)
    change = compiler.last_change(found.runs)
    for _ in range(_MOST_MEASUREMENTS - 1):
        if not 0 < change <= _MOST_WARM_UPS:
            break
        compiler = _Compiler()
        try:
            again = measure(compiler, steps, change)
        except Exception as error:
            # There was not enough data for that many runs: what was measured before is all there is.
            if not isinstance(error, StepError) and not data_ended(error):
                raise
            found = replace(found, runs=found.runs.after(len(compiler.ran)))
            break
        change = compiler.last_change(again.runs)
        found = replace(again, runs=again.runs.after(found.runs.total))
    return replace(found, notes=(*found.notes, _COMPILED_MEANWHILE)) if change else found


def _measured_once(
    build: Callable[[], Step],
    kind: str,
    timed: int,
    eager: bool,
    meter: LoadMeter | None,
    cuda: Cuda,
    compiler: _Compiler,
    steps: Steps,
    least: int,
) -> Measurement:
    """Build and measure a step after at least this many runs; `compiler` is told of all of them."""
    stance = torch.compiler.set_stance("force_eager") if eager else noticed(compiler.called)
    gc.collect()  # what earlier runs left behind in cycles would take real memory beside this one
    observe = _observe_cuda if kind == "cuda" else _observe_cpu
    found = FoundState()
    try:
        with stance, seeded(), no_cycle_collection():
            doing("warming up and counting allocations")
            seen = observe(compiler.watching(build), steps, least, cuda)
            doing("timing it")
            with (meter or LoadMeter()).watching() as watch:
                times, notes = _timed_runs(seen, timed, cuda)
    finally:
        # Function caches that this filled are emptied: a later measurement has to allocate that as well.
        found.put_back()
    runs = RunCounts(seen.warm_ups, 1, len(times))
    return Measurement(
        peak_bytes=seen.peak_bytes,
        persistent_bytes=seen.persistent_bytes,
        seconds=statistics.median(times) if times else seen.seconds,
        runs=runs,
        compiled=compiler.ran[runs.warm_up],
        load=watch.share if times else None,
        notes=notes,
    )


class _Compiler:
    """Watches what is compiled in each run of a step, and whether what is compiled runs at all."""

    def __init__(self) -> None:
        self.ran: list[bool] = []
        """For each run whether compiled code ran."""
        self._compiled: list[bool] = []
        """For each run whether something was compiled."""

    def called(self) -> None:
        """Something compiled is called."""
        if self.ran:
            self.ran[-1] = True

    def watching(self, build: Callable[[], Step]) -> Callable[[], Step]:
        """Return a function that builds the same step, whose runs are watched."""

        def build_watched() -> Step:
            step = build()

            def run() -> Any:
                before = compilations()
                self.ran.append(False)
                try:
                    return step.run()
                finally:
                    self._compiled.append(compilations() > before)

            return replace(step, run=run)

        return build_watched

    def last_change(self, runs: RunCounts) -> int:
        """Return which measured run, from 1 on, was the last that changed what is compiled; 0 if none did."""
        found = 0
        for number in range(runs.warm_up, runs.total):
            before = max(number - 1, runs.warm_up)
            if self._compiled[number] or self.ran[number] != self.ran[before]:
                found = number + 1
        return found


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


def _observe_cpu(build: Callable[[], Step], steps: Steps, least: int, cuda: Cuda) -> _Observed:
    # A build that keeps its model in a global variable frees the one that it made before.
    with profile_allocations(only_own=True) as log:
        step = build()
        warm_ups, leaves_marks = _warm_up(step, steps, least)
        before = StepMarks(step)
        with log.range("step"):
            result = step.run()
    _refuse_idle(step, before, warm_ups, leaves_marks)
    del result
    usage = log.usage("step")
    return _Observed(step, warm_ups, usage.peak_bytes, usage.start_bytes, usage.seconds, leaves_marks)


def _observe_cuda(build: Callable[[], Step], steps: Steps, least: int, cuda: Cuda) -> _Observed:
    outside = cuda.allocated_bytes()
    step = build()
    warm_ups, leaves_marks = _warm_up(step, steps, least)
    before = StepMarks(step)
    cuda.synchronize()
    cuda.restart_peak()
    persistent = cuda.allocated_bytes() - outside
    with _clock(cuda) as seconds:
        result = step.run()
    peak = cuda.peak_bytes() - outside
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


def _warm_up(step: Step, steps: Steps, least: int) -> tuple[int, bool]:
    """Run the step as often as before the run that was captured; return how often, and whether that shows.

    At `least` that often, and until every optimizer has stepped, if they all had then, and nothing is
    compiled any more: a gradient scaler may skip the first steps, and a compiler may compile again what it
    sees a second time.
    """
    stepped: set[int] = set()

    def is_steady() -> bool:
        own = (_parameter_ids(optimizer) for optimizer in step.optimizers)
        return not steps.all_stepped or all(not parameters or parameters & stepped for parameters in own)

    # Known by their parameters: what the step has may be a wrapper around an optimizer, as in Accelerate.
    handle = register_optimizer_step_post_hook(
        lambda optimizer, *_: stepped.update(_parameter_ids(optimizer))
    )
    runs, compiling, begin = 0, True, StepMarks(step)
    fewest = max(steps.runs_before, least)
    try:
        while runs < fewest or (runs < _MOST_WARM_UPS and (compiling or not is_steady())):
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


def _timed_runs(seen: _Observed, most: int, cuda: Cuda) -> tuple[list[float], tuple[str, ...]]:
    """Time some steps without the profiler, which slows every operator down; end well if their data does."""
    taken: list[float] = []
    begin = time.perf_counter()
    while len(taken) < most and (len(taken) < _ENOUGH_RUNS or time.perf_counter() - begin < _ENOUGH_SECONDS):
        before = StepMarks(seen.step)
        measured = f"{len(taken)} of {most} steps were timed" if taken else "no step was timed by itself"
        try:
            with _clock(cuda) as seconds:
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
def _clock(cuda: Cuda) -> Iterator[list[float]]:
    """Put the seconds that the block took into a list, when the device is done with it."""
    seconds: list[float] = []
    cuda.synchronize()
    begin = time.perf_counter()
    yield seconds
    cuda.synchronize()
    seconds.append(time.perf_counter() - begin)
