"""Which combinations of changes are looked at, and in which order.

Every change alone is captured first. What several do together is guessed from that: bytes are added up, times
multiplied, and what is missing to the budget is priced as the recomputation that frees it. Combinations are
then captured, and planned where they have to be: first those that keep results as they are, and each time the
most promising first, until no guess is better than what was found, or time is up. A guess decides only about
the order: every figure that is shown is of a capture.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from trainfit.basics.doing import doing
from trainfit.changes.change import PLAN, StepChange
from trainfit.fitting.way_candidates import Candidates
from trainfit.fitting.way_ranking import is_as_good_as, not_beaten, rank
from trainfit.plans.ways import BIT_EQUAL, EXACTNESS, Exactness, Way

_OPTIMISM = 0.97
"""A guess may be wrong by so much before a combination is left out."""
_PLAN_SECONDS = 10.0
_LEAST_PLAN_SECONDS = 2.0
_FREED_SHARE = 0.35
"""Of a step, at most: what computing everything again adds to it."""

Combination = tuple[StepChange, ...]


@dataclass
class WaySearch:
    """Searches among the combinations of changes of one step."""

    candidates: Candidates
    changes: Sequence[StepChange]
    base: Way
    seconds_limit: float
    found: list[Way] = field(default_factory=list)
    not_fitting: list[Way] = field(default_factory=list)
    looked_at: int = 1
    complete: bool = True
    _alone: dict[str, Way] = field(default_factory=dict)

    def run(self) -> list[Way]:
        """Return the ways that fit and are not beaten, the fastest first."""
        deadline = time.monotonic() + self.seconds_limit
        if self.candidates.fits(self.base):
            self.found.append(self.base)
        self._look_at_single_changes(deadline)
        pending = sorted(self._combinations(), key=self._guess)
        for exactness in EXACTNESS:
            # Each kind of result has its share of the time; what one leaves, the next have.
            share = (deadline - time.monotonic()) / (len(EXACTNESS) - rank(exactness))
            alike = [combination for combination in pending if _exactness(combination) == exactness]
            self._look_at_all(alike, time.monotonic() + share)
        return not_beaten(self.found)

    def _look_at_all(self, pending: list[Combination], deadline: float) -> None:
        for number, combination in enumerate(pending):
            if self._cannot_be_better(combination):
                continue
            if time.monotonic() > deadline:
                self.complete = False
                return
            doing(f"looking at combination {number + 1} of {len(pending)}: {_names(combination)}")
            self._look_at(combination, deadline)

    def _look_at_single_changes(self, deadline: float) -> None:
        for number, change in enumerate(self.changes):
            if time.monotonic() > deadline:
                self.complete = False
                return
            doing(f"looking at change {number + 1} of {len(self.changes)}: {change.name}")
            way = self.candidates.unplanned((change,))
            if way is None:
                continue
            self.looked_at += 1
            self._alone[change.name] = way
            (self.found if self.candidates.fits(way) else self.not_fitting).append(way)

    def _combinations(self) -> Iterator[Combination]:
        """Yield every choice of at most one change of each kind that helps at all when it is alone."""
        kinds: dict[str, list[StepChange | None]] = {}
        for change in self.changes:
            if change.name in self._alone and self._helps(change):
                kinds.setdefault(change.kind, [None]).append(change)
        for chosen in itertools.product(*kinds.values()):
            combination = tuple(change for change in chosen if change is not None)
            present = {called for change in combination for called in (change.kind, change.name)}
            if not any(change.excludes & present for change in combination):
                yield combination

    def _helps(self, change: StepChange) -> bool:
        alone = self._alone[change.name]
        return alone.memory_bytes < self.base.memory_bytes or alone.step_seconds < self.base.step_seconds

    def _guessed(self, combination: Combination) -> tuple[float, float]:
        """Return the memory and the time that a combination may need, without a plan."""
        memory, seconds = float(self.base.memory_bytes), self.base.step_seconds
        for change in combination:
            alone = self._alone[change.name]
            memory += alone.memory_bytes - self.base.memory_bytes
            seconds *= alone.step_seconds / self.base.step_seconds
        return max(memory, 0.0), seconds

    def _guess(self, combination: Combination) -> float:
        """Return the time that a combination may take with a plan that makes it fit."""
        memory, seconds = self._guessed(combination)
        missing = max(memory - self.candidates.budget_bytes, 0.0) / max(memory, 1.0)
        return seconds * (1 + _FREED_SHARE * missing)

    def _cannot_be_better(self, combination: Combination) -> bool:
        _, seconds = self._guessed(combination)
        figures = _exactness(combination), len(combination), _OPTIMISM * seconds
        return any(is_as_good_as(way, *figures) for way in self.found)

    def _look_at(self, combination: Combination, deadline: float) -> None:
        unplanned = self._alone.get(combination[0].name) if len(combination) == 1 else None
        if not combination:
            unplanned = self.base
        elif unplanned is None:
            self.looked_at += 1
            unplanned = self.candidates.unplanned(combination)
        if unplanned is None:
            return
        if self.candidates.fits(unplanned):
            self.found.append(unplanned)
            return
        self.not_fitting.append(unplanned)
        if any(PLAN in change.excludes for change in combination):
            return
        figures = unplanned.exactness, unplanned.count + 1, unplanned.step_seconds
        if any(is_as_good_as(way, *figures) for way in self.found):
            return
        left = max(deadline - time.monotonic(), _LEAST_PLAN_SECONDS)
        planned = self.candidates.planned(combination, min(left, _PLAN_SECONDS))
        if planned is not None:
            self.found.append(planned)


def _exactness(combination: Combination) -> Exactness:
    return max((change.made.exactness for change in combination), key=rank, default=BIT_EQUAL)


def _names(combination: Combination) -> str:
    return ", ".join(change.name for change in combination) or "a plan alone"
