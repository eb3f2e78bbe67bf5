"""Time operators in rounds: each is called once per round, in the order of the step.

Called in a loop of its own, an operator would find its code and the branch predictors warm, which they are
not in a step, and a slow second of the machine would hit some operators only. In rounds every call finds
its code as cold as in the step, its inputs where its `Locality` says, and noise hits all alike.
"""

from __future__ import annotations

import contextlib
import gc
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from trainfit.basics.doing import Measuring
from trainfit.timing.caller import REFUSED
from trainfit.timing.clocks import Timed, timed_on

_FEWEST_ROUNDS = 3
_ENOUGH_ROUNDS = 7
_MOST_ROUNDS = 40
_CALLS_BETWEEN_BASELINES = 16
_UNNOTICED_FAULTS = 4


@dataclass(frozen=True, slots=True)
class Timing:
    """The median of an operator's calls, without the call from Python, and how far the calls are apart."""

    seconds: float
    spread: float
    """Half the distance between the quartiles, relative to the median."""


@dataclass(frozen=True, slots=True)
class _Sample:
    """One timed call, and how many pages of memory it got from the system."""

    seconds: float
    faults: int


class Called(Protocol):
    """What can be called in rounds: an operator with its arguments (`Caller`), or anything like it."""

    @property
    def warm_code(self) -> bool:
        """Whether it runs once before each timed call, so that its code is at hand."""
        ...

    @property
    def records(self) -> bool:
        """Whether autograd records it."""
        ...

    @property
    def function(self) -> Any:
        """What is called; its text is its name."""
        ...

    def prepare(self) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of the next call."""
        ...

    def finish(self, result: Any) -> None:
        """Tidy up after a call."""
        ...


class Rounds:
    """Operators that are called in turn, and the times of their calls so far."""

    def __init__(
        self, callers: Sequence[Called], company: Sequence[Called], device: str, timed: Timed | None = None
    ) -> None:
        """Begin with no times; `device` is `cpu` or `cuda`. The `company` is called, but not reported."""
        self._callers = [*callers, *company]
        self._reported = len(callers)
        self._timed = timed or timed_on(device)
        self._samples: list[list[_Sample] | None] = [[] for _ in self._callers]
        self._baseline: list[float] = []
        self._calls = 0
        self._tiny = torch.zeros(1, device=device)

    def run(
        self,
        budget_seconds: float,
        progress: Measuring | None = None,
        after_round: Callable[[], object] | None = None,
    ) -> None:
        """Run a round to warm up, and then rounds until there are enough or the budget is spent."""
        rounds, spent = 0, 0.0
        self.run_round(timed=False, progress=progress, planned=_FEWEST_ROUNDS + 1)
        while any(samples is not None for samples in self._samples[: self._reported]):
            begin = time.perf_counter()
            planned = int(budget_seconds * rounds / spent) if spent else _FEWEST_ROUNDS
            self.run_round(progress=progress, planned=min(max(planned, rounds + 1), _MOST_ROUNDS) + 1)
            spent += time.perf_counter() - begin
            rounds += 1
            if after_round is not None:
                after_round()
            enough = _ENOUGH_ROUNDS if spent < 3 * budget_seconds else _FEWEST_ROUNDS
            if rounds >= _MOST_ROUNDS or (rounds >= enough and spent > budget_seconds):
                return

    def run_round(self, *, timed: bool = True, progress: Measuring | None = None, planned: int = 1) -> None:
        """Call every operator once; the first that fails on its inputs is never called again."""
        with _undisturbed():
            for number, caller in enumerate(self._callers):
                samples = self._samples[number]
                if samples is not None:
                    try:
                        sample = self._call(caller)
                    except REFUSED:
                        self._samples[number] = None
                    else:
                        if timed:
                            samples.append(sample)
                if timed and number % _CALLS_BETWEEN_BASELINES == 0:
                    self._time_baseline()
                self._calls += 1
                if progress is not None:
                    progress(
                        self._calls, max(planned * len(self._callers), self._calls), str(caller.function)
                    )

    def timings(self) -> list[Timing | None]:
        """Return what was measured for each caller; None for what cannot be run, or too few times."""
        call = statistics.median(self._baseline) if self._baseline else 0.0
        return [
            _summary(samples, call) if samples is not None and len(samples) >= _FEWEST_ROUNDS else None
            for samples in self._samples[: self._reported]
        ]

    def _call(self, caller: Called) -> _Sample:
        if caller.warm_code:
            self._call_once(caller)
        return self._call_once(caller)

    def _call_once(self, caller: Called) -> _Sample:
        arguments = caller.prepare()
        with torch.set_grad_enabled(caller.records):
            faults = _page_faults()
            seconds, result = self._timed(caller.function, *arguments)
            faults = _page_faults() - faults
        caller.finish(result)
        return _Sample(seconds, faults)

    def _time_baseline(self) -> None:
        """Time a call that does nothing: what it takes from Python to the kernel, and the clock itself."""
        nothing = torch.ops.aten.is_same_size.default
        self._baseline.append(self._timed(nothing, [self._tiny, self._tiny], {})[0])


def _summary(samples: list[_Sample], call_seconds: float) -> Timing:
    """Return the median of the calls, without those to which the allocator gave fresh pages by chance."""
    samples = sorted(samples, key=lambda sample: sample.faults)
    usual = samples[0].faults + _UNNOTICED_FAULTS
    times = [s.seconds for n, s in enumerate(samples) if n < _FEWEST_ROUNDS or s.faults <= usual]
    median = statistics.median(times)
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return Timing(max(median - call_seconds, 0.0), (high - low) / 2 / median if median else 0.0)


def _page_faults() -> int:
    """Return how often this process has touched memory that the system first had to provide."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Keep Python's collector of cycles from running between two readings of the clock."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
