"""Which combinations of changes are looked at, and in which order.

Settings around the step come first, and a plan alone: they need no further capture. So does a mesh, if one is
given: whoever gives it asks about it, and it must not be missing when time is up. Then every change alone
is captured, unless what it copies over the link takes longer than a way that was found. What several do
together is guessed from that (`guessed_times.py`): bytes are added up, and what is missing to the budget is
priced as a plan that frees it. Combinations are then captured, and planned where they have to be: first those
that keep results as they are, and each time what may fit without a plan before the rest, and the fastest
first, until no guess is better than what was found, or time is up. Every figure shown is of a capture.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from trainfit.basics.doing import doing
from trainfit.changes.change import PLAN, StepChange
from trainfit.fitting.guessed_times import guessed_seconds
from trainfit.fitting.way_candidates import Candidates
from trainfit.fitting.way_ranking import is_as_good_as, not_beaten, rank
from trainfit.plans.ways import BIT_EQUAL, EXACTNESS, Exactness, Way

_OPTIMISM, _OPTIMISM_OF_ONE = 0.97, 0.998
"""A guess may be wrong by so much before a combination is left out: if several changes make a difference to
the step's time, and if at most one does."""
_A_DIFFERENCE = 0.01
"""Of the step's time."""
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
    least_seconds: Mapping[str, float] = field(default_factory=dict)
    """What a step takes at least with a change, by its name, whatever else is changed."""
    found: list[Way] = field(default_factory=list)
    not_fitting: list[Way] = field(default_factory=list)
    looked_at: int = 1
    complete: bool = True
    _alone: dict[str, Way] = field(default_factory=dict)
    _freed_share: float = _FREED_SHARE
    """By how much of the step's time the last plan made it longer, for a whole step's memory."""

    def run(self) -> list[Way]:
        """Return the ways that fit and are not beaten, the fastest first."""
        deadline = time.monotonic() + self.seconds_limit
        if self.candidates.fits(self.base):
            self.found.append(self.base)
        first = [change for change in self.changes if _comes_first(change)]
        self._look_at_single_changes(first, deadline)
        few = self._combinations()
        self._look_at_all(sorted(few, key=lambda some: (len(some), self._promise(some))), deadline)
        self._look_at_single_changes([c for c in self.changes if not _comes_first(c)], deadline)
        seen = {_names(combination) for combination in few}
        others = [combination for combination in self._combinations() if _names(combination) not in seen]
        for exactness in EXACTNESS:
            # Each kind of result has its share of the time; what one leaves, the next have.
            share = (deadline - time.monotonic()) / (len(EXACTNESS) - rank(exactness))
            alike = [combination for combination in others if _exactness(combination) == exactness]
            self._look_at_all(sorted(alike, key=self._promise), time.monotonic() + share)
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

    def _look_at_single_changes(self, changes: Sequence[StepChange], deadline: float) -> None:
        for number, change in enumerate(changes):
            if self._is_beaten(change.made.exactness, 1, self._least_seconds((change,))):
                continue
            if time.monotonic() > deadline:
                self.complete = False
                return
            doing(f"looking at change {number + 1} of {len(changes)}: {change.name}")
            way = self.candidates.unplanned((change,))
            if way is None:
                continue
            self.looked_at += 1
            self._alone[change.name] = way
            (self.found if self.candidates.fits(way) else self.not_fitting).append(way)

    def _combinations(self) -> list[Combination]:
        """Return every choice of at most one change of each kind that helps at all when it is alone."""
        kinds: dict[str, list[StepChange | None]] = {}
        for change in self.changes:
            if change.name in self._alone and self._helps(change):
                kinds.setdefault(change.kind, [None]).append(change)
        return list(_that_go_together(itertools.product(*kinds.values())))

    def _helps(self, change: StepChange) -> bool:
        alone = self._alone[change.name]
        return alone.memory_bytes < self.base.memory_bytes or alone.step_seconds < self.base.step_seconds

    def _guessed_seconds(self, combination: Combination) -> float:
        """Return the time that a combination may take without a plan."""
        alone = [self.candidates.parts((change,)) for change in combination]
        guessed = guessed_seconds(self.candidates.parts(()), alone)
        return max(guessed, self._least_seconds(combination))

    def _least_seconds(self, combination: Combination) -> float:
        return max((self.least_seconds.get(change.name, 0.0) for change in combination), default=0.0)

    def _missing_share(self, memory_bytes: float) -> float:
        return max(memory_bytes - self.candidates.budget_bytes, 0.0) / max(memory_bytes, 1.0)

    def _promise(self, combination: Combination) -> tuple[bool, float]:
        """Return what combinations are sorted by: whether a plan may be needed, and the time that may take.

        What fits without a plan is judged sooner, and leaves less that has to be planned.
        """
        base = self.base.memory_bytes
        memory = base + sum(self._alone[change.name].memory_bytes - base for change in combination)
        missing = self._missing_share(memory)
        return missing > 0, self._guessed_seconds(combination) * (1 + self._freed_share * missing)

    def _cannot_be_better(self, combination: Combination) -> bool:
        base = self.base.step_seconds
        alone = [self._alone[change.name].step_seconds for change in combination]
        several = sum(abs(seconds - base) > _A_DIFFERENCE * base for seconds in alone) > 1
        seconds = (_OPTIMISM if several else _OPTIMISM_OF_ONE) * self._guessed_seconds(combination)
        return self._is_beaten(_exactness(combination), len(combination), seconds)

    def _is_beaten(self, exactness: Exactness, count: int, step_seconds: float) -> bool:
        return any(is_as_good_as(way, exactness, count, step_seconds) for way in self.found)

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
        if self._is_beaten(unplanned.exactness, unplanned.count + 1, unplanned.step_seconds):
            return
        left = max(deadline - time.monotonic(), _LEAST_PLAN_SECONDS)
        planned = self.candidates.planned(combination, min(left, _PLAN_SECONDS))
        if planned is not None:
            self.found.append(planned)
            added = planned.step_seconds / unplanned.step_seconds - 1
            missing = self._missing_share(unplanned.memory_bytes)
            self._freed_share = added / missing if missing else _FREED_SHARE


def _comes_first(change: StepChange) -> bool:
    """Whether a change is looked at before others: it needs no capture, or is asked for by giving a mesh."""
    return change.is_setting or change.cluster is not None


def _that_go_together(choices: Iterable[tuple[StepChange | None, ...]]) -> Iterator[Combination]:
    for chosen in choices:
        combination = tuple(change for change in chosen if change is not None)
        present = {called for change in combination for called in (change.kind, change.name)}
        if not any(change.excludes & present for change in combination):
            yield combination


def _exactness(combination: Combination) -> Exactness:
    return max((change.made.exactness for change in combination), key=rank, default=BIT_EQUAL)


def _names(combination: Combination) -> str:
    return ", ".join(change.name for change in combination) or "a plan alone"
