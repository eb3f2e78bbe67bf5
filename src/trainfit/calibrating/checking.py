"""Whole steps, predicted with what was measured and really run: how far apart the two are is the range.

Microbenchmarks run one call at a time. What a step makes of them (colder caches, clocks under load, what the
host does meanwhile) shows only in steps.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trainfit.basics.doing import doing, unheard
from trainfit.calibrating.instrument import Instrument
from trainfit.calibrating.probing import first_line, is_want_of_memory
from trainfit.capturing import capture
from trainfit.capturing.random_stream import seeded
from trainfit.costs.pricing import price_trace
from trainfit.costs.schedule import schedule
from trainfit.devices.device_table import Device
from trainfit.models.recipe import StepOptions
from trainfit.targets import Target, load
from trainfit.timing.clocks import cpu_clock
from trainfit.traces.simulate import simulate
from trainfit.workspace.measured import Limits

_NO_WORKSPACES = Limits(0, 0.0, 0.0)
_WARM_UPS, _FEWEST, _MOST = 2, 3, 20
_MEMORY_SHARE = 0.7
"""Of the free memory: larger steps are not run."""
Options = dict[str, Any]


@dataclass(frozen=True)
class CheckedStep:
    """A step as predicted and as it ran."""

    target: str
    options: str
    predicted_seconds: float
    measured_seconds: float
    spread: float
    """Half the distance between the quartiles of its runs, relative to their median."""
    runs: int

    @property
    def ratio(self) -> float:
        """Predicted by measured."""
        return self.predicted_seconds / self.measured_seconds


MIXED = "mixed"
"""Stands for the mixed precision that a device has."""
CPU_STEPS: tuple[tuple[str, Options], ...] = (
    ("gpt2-tiny", {"batch": 1}),
    ("gpt2-tiny", {"batch": 4}),
    ("llama-tiny", {"batch": 2}),
    ("vit-tiny", {"batch": 4}),
    ("resnet-18", {"batch": 2, "image_size": 112}),
    ("gpt2-tiny", {"batch": 2, "dtype": MIXED}),
)
GPU_STEPS: tuple[tuple[str, Options], ...] = (
    ("gpt2", {"batch": 1, "seq": 128}),
    ("gpt2", {"batch": 8}),
    ("gpt2", {"batch": 8, "dtype": MIXED}),
    ("vit-b-16", {"batch": 64, "dtype": MIXED}),
    ("resnet-50", {"batch": 64}),
    ("resnet-50", {"batch": 64, "dtype": MIXED}),
)
"""Names of built-in models, and what is asked of their step. The first of each kind waits for the host."""


def check_steps(
    steps: Sequence[tuple[str, Options]], device: Device, instrument: Instrument, seconds: float
) -> tuple[tuple[CheckedStep, ...], tuple[str, ...]]:
    """Predict and run steps for about this many seconds; also say which could not run, and why."""
    found: list[CheckedStep] = []
    left_out: list[str] = []
    for name, asked in steps:
        options = _in_its_precision(asked, instrument)
        while options is not None:
            words = " ".join(f"--{flag.replace('_', '-')} {value}" for flag, value in options.items())
            doing(f"checking against real steps: {name} {words}")
            try:
                found.append(_check(name, options, words, device, instrument, seconds / len(steps)))
                break
            except _NotRun as error:
                # Half the batch may fit.
                batch = options["batch"] // 2 if error.for_memory else 0
                options = {**options, "batch": batch} if batch else None
                if options is None:
                    left_out.append(f"{name} {words} was not run to check the figures: {error}")
    return tuple(found), tuple(left_out)


class _NotRun(Exception):
    """A step did not run; the message says why."""

    def __init__(self, why: str, for_memory: bool) -> None:
        super().__init__(why)
        self.for_memory = for_memory


def _in_its_precision(options: Options, instrument: Instrument) -> Options | None:
    """Return what is asked of a step, with the mixed precision that the device has; None if it has none."""
    if options.get("dtype") != MIXED:
        return options
    rate = instrument.rate_of_steps
    return None if rate == "fp32" else {**options, "dtype": f"{rate}-autocast"}


def _check(
    name: str, options: Options, words: str, device: Device, instrument: Instrument, seconds: float
) -> CheckedStep:
    with unheard():
        target = load(name, StepOptions(**options, device=device.kind))
        trace = capture(
            target.build, device=device, target=name, settings=target.settings, steps=1, limits=_NO_WORKSPACES
        )
        needed, free = simulate(trace).peak_bytes, instrument.free_bytes()
        if needed > _MEMORY_SHARE * free:
            raise _NotRun("it needs more memory than is free.", for_memory=True)
        predicted = schedule(trace, price_trace(trace, device)).step_seconds
        real = load(name, StepOptions(**options, device=instrument.place))
        try:
            times = _run(real, instrument, seconds)
        except RuntimeError as error:
            for_memory = is_want_of_memory(error)
            why = "there was not enough memory." if for_memory else first_line(error)
            raise _NotRun(why, for_memory) from None
        finally:
            gc.collect()  # models and optimizers are full of cycles, and the next step needs their memory
            instrument.let_go()
    middle = statistics.median(times)
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return CheckedStep(name, words, predicted, middle, (high - low) / 2 / middle, len(times))


def _run(target: Target, instrument: Instrument, seconds: float) -> list[float]:
    clock: Callable[[], float] = instrument.wall if instrument.kind == "cuda" else cpu_clock()
    times: list[float] = []
    with seeded():
        run = target.build().run
        for _ in range(_WARM_UPS):
            run()
        end = time.perf_counter() + seconds
        while len(times) < _FEWEST or (len(times) < _MOST and time.perf_counter() < end):
            begin = clock()
            run()
            times.append(clock() - begin)
    return times
