"""The fastest choice of regions that an allocator runs within a budget, looked for by trying many.

What an allocator needs follows from how blocks of all sizes happen to lie between each other, and no program
says that beforehand: a choice that keeps less may need more. So choices are tried. Those that treat alike
regions alike come first (`uniform_choices.py`). Then two of them are put together, one that runs for the
layers on one side of a cut and a faster one for those on the other; the cut is moved for as long as it runs.
What that finds is put together with others in turn. Of all that would be faster than the best so far, what
frees most bytes is tried first. The number of trials is limited, not their time: the same step gives the
same plan.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from trainfit.planning.trials import Trials
from trainfit.planning.uniform_choices import Combination, UniformChoices

_LEAST_GAIN = 5e-4
"""Of the step's time: what is less is not worth a trial."""
_MOST_STARTS = 12
"""How many of the choices that run are put together with faster ones."""


@dataclass(frozen=True)
class _Pair:
    """A choice that runs, and a faster one for the layers after the cut, or before it."""

    runs: Combination
    faster: Combination
    faster_first: bool
    cuts: tuple[float, ...]
    """Where regions begin, in the order in which more and more of the faster one is taken."""

    @property
    def sides(self) -> tuple[Combination, Combination]:
        """What is before the cut and what is after it."""
        return (self.faster, self.runs) if self.faster_first else (self.runs, self.faster)


@dataclass
class TrialSearch:
    """One search: what ran so far, and what is still to try."""

    choices: UniformChoices
    trials: Trials
    budget_bytes: int
    step_seconds: float
    most_trials: int
    deadline: float = math.inf
    running: list[Combination] = field(default_factory=list)
    """The fastest first."""
    _failing: list[Combination] = field(default_factory=list)
    _seen: set[tuple[int, ...]] = field(default_factory=set)
    _heap: list[tuple[float, int, _Pair, int, float]] = field(default_factory=list)
    _first_trial: int = 0
    _pushed: int = 0

    def search(self, known: Iterable[Combination] = ()) -> list[Combination]:
        """Return what was found to run, the fastest first; `known` are choices to begin with."""
        self._first_trial = self.trials.count
        self._try_all(known)
        uniform = self.choices.by_price
        self._try_all(uniform)
        self._try_variations(uniform)
        for combination in self.running[:_MOST_STARTS]:
            self._push_pairs(combination)
        while self._heap and not self._is_over():
            _, _, pair, number, best = heapq.heappop(self._heap)
            if best > self._best_seconds:
                self._push(pair)  # something faster has been found since
            elif self._runs(self._mixed(pair, number)):
                self._push_pairs(self._as_far_as_it_runs(pair, number))
        return self.running

    @property
    def _best_seconds(self) -> float:
        return self.running[0].seconds if self.running else math.inf

    def _is_over(self) -> bool:
        tried = self.trials.count - self._first_trial
        return tried >= self.most_trials or time.monotonic() > self.deadline

    def _try_all(self, combinations: Iterable[Combination]) -> None:
        for combination in combinations:
            if combination.key not in self._seen and not self._is_over():
                self._runs(combination)

    def _try_variations(self, uniform: Sequence[Combination]) -> None:
        """Try what is like the choices that do not run, up to the first that does not fit at all.

        A variation costs more than what it is made of: what is slower than the best so far needs none.
        """
        for combination in uniform:
            if combination.seconds >= self._best_seconds:
                continue
            if any(combination.key == one.key for one in self.running):
                continue
            count = self.trials.count
            self._try_all(self.choices.variations(combination))
            if self.trials.count == count:
                break

    def _runs(self, combination: Combination) -> bool:
        self._seen.add(combination.key)
        runs = self.trials.run(combination.effects, self.budget_bytes)
        found = self.running if runs else self._failing
        found.append(combination)
        found.sort(key=lambda one: (one.seconds, -one.freed_bytes))
        return runs

    def _push_pairs(self, combination: Combination) -> None:
        """Put a choice that runs together with all that are faster."""
        for faster in (*self.running, *self._failing):
            if faster.seconds < combination.seconds:
                cuts = sorted({*combination.starts, *faster.starts})
                self._push(_Pair(combination, faster, False, (math.inf, *reversed(cuts))))
                self._push(_Pair(combination, faster, True, (-1, *cuts[1:], math.inf)))

    def _push(self, pair: _Pair) -> None:
        """Remember to try the first cut at which a pair is faster than the best so far."""
        enough = self._best_seconds - _LEAST_GAIN * self.step_seconds
        low, high = 0, len(pair.cuts) - 1
        if self._seconds(pair, high) > enough:
            return
        while high - low > 1:
            middle = (low + high) // 2
            if self._seconds(pair, middle) <= enough:
                high = middle
            else:
                low = middle
        mixed = self._mixed(pair, high)
        if mixed.key in self._seen:
            return
        self._pushed += 1
        heapq.heappush(self._heap, (-mixed.freed_bytes, self._pushed, pair, high, self._best_seconds))

    def _as_far_as_it_runs(self, pair: _Pair, number: int) -> Combination:
        """Move the cut of a pair on from one with which it runs; return the furthest found."""
        low, high = number, len(pair.cuts)
        while high - low > 1 and not self._is_over():
            middle = (low + high) // 2
            if self._runs(self._mixed(pair, middle)):
                low = middle
            else:
                high = middle
        return self._mixed(pair, low)

    def _mixed(self, pair: _Pair, number: int) -> Combination:
        before, after = pair.sides
        cut = pair.cuts[number]
        return self.choices.combination((*before.until(cut), *after.since(cut)))

    def _seconds(self, pair: _Pair, number: int) -> float:
        """Return what a mixture adds to the step, without making it."""
        before, after = pair.sides
        cut = pair.cuts[number]
        seconds, host_seconds = before.summed_until(cut) + after.summed_since(cut)
        return self.choices.problem.added_seconds(float(seconds), float(host_seconds))
