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
from trainfit.plan_comparison import planned
from trainfit.plans import Plan
from trainfit.profiler import no_cycle_collection, profile_allocations
from trainfit.step import Step
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
    with stance, seeded(), no_cycle_collection():
        seen = observe(build, steps)
        with (meter or LoadMeter()).watching() as watch:
            times, notes = _timed_runs(seen.step, timed)
    return Measurement(
        peak_bytes=seen.peak_bytes,
        persistent_bytes=seen.persistent_bytes,
        seconds=statistics.median(times) if times else seen.seconds,
        runs=Runs(seen.warm_ups, 1, len(times)),
        compiled=bool(compiled),
        load=watch.share if times else None,
        notes=notes,
    )


@dataclass(frozen=True)
class _Observed:
    """A steady step, and what it allocated."""

    step: Step
    warm_ups: int
    peak_bytes: int
    persistent_bytes: int
    seconds: float


def _observe_cpu(build: Callable[[], Step], steps: Steps) -> _Observed:
    with profile_allocations() as log:
        step = build()
        warm_ups = _warm_up(step, steps)
        with log.range("step"):
            result = step.run()
    del result
    usage = log.usage("step")
    return _Observed(step, warm_ups, usage.peak_bytes, usage.start_bytes, usage.seconds)


def _observe_cuda(build: Callable[[], Step], steps: Steps) -> _Observed:
    outside = torch.cuda.memory_allocated()
    step = build()
    warm_ups = _warm_up(step, steps)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    persistent = torch.cuda.memory_allocated() - outside
    with _clock() as seconds:
        result = step.run()
    peak = torch.cuda.max_memory_allocated() - outside
    del result
    return _Observed(step, warm_ups, peak, persistent, seconds[0])


def _warm_up(step: Step, steps: Steps) -> int:
    """Run the step as often as before the run that was captured; return how often.

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
    runs, compiling = 0, True
    try:
        while runs < steps.runs_before or (runs < _MOST_WARM_UPS and (compiling or not is_steady())):
            before = compilations()
            step.run()
            runs += 1
            compiling = compilations() > before
    finally:
        handle.remove()
    gc.collect()
    return runs


def _parameter_ids(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _timed_runs(step: Step, most: int) -> tuple[list[float], tuple[str, ...]]:
    """Time some steps without the profiler, which slows every operator down; end well if their data does."""
    taken: list[float] = []
    begin = time.perf_counter()
    while len(taken) < most and (len(taken) < _ENOUGH_RUNS or time.perf_counter() - begin < _ENOUGH_SECONDS):
        try:
            with _clock() as seconds:
                step.run()
        except Exception as error:
            if not data_ended(error):
                raise
            measured = f"{len(taken)} of {most} steps were timed" if taken else "no step was timed by itself"
            return taken, (f"the step's data ended while it was timed: {measured}",)
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
