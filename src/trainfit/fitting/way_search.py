"""Which combinations of changes are looked at, and in which order.

A mesh, if one is given, comes first: whoever gives it asks about it, and it must not be missing when time is
up. Then every change alone is looked at. What several do together is guessed from that (`guessed_times.py`):
bytes are added up, and what is missing to the budget is priced as a plan that frees it. The step of a model
with many layers is worked out from few of them before it is captured (`shallow_steps.py`). Combinations are
then captured, and planned where they have to be, in rounds: in each, the most promising one of those that
keep results bit by bit, of those that keep them but for rounding, and of the others; the plan alone in the
second. So it goes on until no guess is better than what was found, or time is up, which is later as long as
nothing fits. What copies over the link, which nothing overlaps with, comes last, if it can still be better.
Every figure shown is of a capture of the whole step.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from trainfit.basics.doing import doing
from trainfit.changes.change import PLAN, StepChange
from trainfit.fitting.guessed_times import GuessedSeconds, guessed_seconds
from trainfit.fitting.shallow_steps import Outlook
from trainfit.fitting.way_candidates import Candidates
from trainfit.fitting.way_ranking import is_as_good_as, not_beaten, rank
from trainfit.plans.ways import BIT_EQUAL, EXACTNESS, Exactness, Way

_OPTIMISM, _OPTIMISM_OF_ONE = 0.97, 0.998
"""A guess may be wrong by so much before a combination is left out: if several changes make a difference to
the step's time, and if at most one does, or the combination was worked out."""
_A_DIFFERENCE = 0.01
"""Of the step's time."""
_CLEARLY_TOO_LARGE = 1.01
"""Times the budget: the peak that a step without a plan is worked out to have may be wrong by less."""
_MAY_TAKE = 1.3
"""Times what took longest so far: so long the next of its kind may take."""
_PLAN_SECONDS = 10.0
_LEAST_PLAN_SECONDS = 2.0
_FREED_SHARE = 0.1
"""Of a step: what a plan may add that frees all of its memory, as long as none was made."""

_PATIENCE = 4.0
"""Times the limit: so long it goes on if nothing fits by then. That nothing does is no answer as long as
something may."""
_NO_PLAN = 10.0
"""Times the seconds of a step that needs as much as one for which no plan was found: it comes later."""

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
    _alone: dict[str, Outlook] = field(default_factory=dict)
    _freed_share: float = _FREED_SHARE
    """By how much of the step's time the last plan made it longer, for a whole step's memory."""
    _no_plan_bytes: float = math.inf
    """The least that a step needs for which no plan was found."""
    _tried_plan_alone: bool = False
    _deadline: float = math.inf
    _longest_outlook: float = 0.0
    _longest_capture: float = 0.0
    _longest_plan: float = 0.0
    """Seconds: what would not be done before the deadline is not begun."""

    @property
    def _end(self) -> float:
        """When the search ends: later as long as nothing fits."""
        return self._deadline if self.found else self._deadline + (_PATIENCE - 1) * self.seconds_limit

    def run(self) -> list[Way]:
        """Return the ways that fit and are not beaten, the fastest first."""
        self._deadline = time.monotonic() + self.seconds_limit
        if self.candidates.fits(self.base):
            self.found.append(self.base)
        settings, quick, slow = _in_groups(self.changes)
        self._look_at_single_changes(settings)
        seen: set[str] = set()
        groups: list[Sequence[StepChange]] = [quick, slow]
        if any(change.cluster for change in settings):
            groups.insert(0, ())  # what is asked for by giving a mesh
        while groups:
            changes, *groups = groups
            later = self._look_at_single_changes(changes)
            groups = [later, *groups] if later else groups
            new = [some for some in self._combinations() if _names(some) not in seen]
            self._look_at_all(new)
            seen |= {_names(combination) for combination in new}
        if not self.found and not self._tried_plan_alone:
            self._look_at(())  # whoever has little time wants to know this much
        return not_beaten(self.found)

    def _look_at_all(self, combinations: Sequence[Combination]) -> None:
        """Look at combinations in rounds, one of each kind of results in each."""
        alike = [[some for some in combinations if _exactness(some) == e] for e in EXACTNESS]
        turns = [self._in_turn(waiting) for waiting in alike if waiting]
        while turns:
            heads = [(combination, turn) for turn in turns if (combination := next(turn, None)) is not None]
            turns = [turn for _, turn in heads]
            # Who can make one change only wants to know of the plan alone before others are combined.
            for combination, _ in sorted(heads, key=lambda head: (head[0] != (), self._promise(head[0]))):
                if time.monotonic() > self._end:
                    self.complete = False
                    return
                doing(f"looking at {_names(combination)}")
                self._look_at(combination)

    def _in_turn(self, waiting: list[Combination]) -> Iterator[Combination]:
        """Yield the most promising combination that may be better, then the plan alone, then the others."""
        number = 0
        while waiting := [combination for combination in waiting if self._may_be_better(combination)]:
            alone = number == 1 and () in waiting
            combination: Combination = () if alone else min(waiting, key=self._promise)
            waiting.remove(combination)
            number += 1
            yield combination

    def _look_at_single_changes(self, changes: Sequence[StepChange]) -> Sequence[StepChange]:
        """Look at each change alone, and return those for which half of the time would not do.

        What has been seen by then is combined, and planned, before the others are looked at.
        """
        now = time.monotonic()
        half = now + max(self._deadline - now, 0.0) / 2
        for number, change in enumerate(changes):
            least = max(self._least_seconds((change,)), self._in_fewer_passes(change))
            if self._is_beaten(change.made.exactness, 1, least):
                continue
            if time.monotonic() > self._end:
                self.complete = False
                return ()
            if number and time.monotonic() > half:
                return changes[number:]
            doing(f"looking at change {number + 1} of {len(changes)}: {change.name}")
            outlook = self._outlook((change,))
            if outlook is None:
                continue
            self._alone[change.name] = outlook
            if self.candidates.is_captured((change,)):
                self._judge((change,))
        return ()

    def _in_fewer_passes(self, change: StepChange) -> float:
        """Return what the step takes with its batch in fewer parts: in more it is the same work in pieces."""
        fewer = (other for other in self.changes if 1 < other.repeats < change.repeats)
        seen = (self._alone[other.name].step_seconds for other in fewer if other.name in self._alone)
        return _OPTIMISM * max(seen, default=0.0)

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

    def _guessed_seconds(self, combination: Combination) -> GuessedSeconds:
        """Return the time that a combination may take without a plan."""
        known = self.candidates.known_outlook(combination)
        if known is not None:
            return GuessedSeconds(known.step_seconds, known.step_seconds)
        base = self.candidates.known_outlook(())
        assert base is not None, "the step as it is comes first"
        guessed = guessed_seconds(base.parts, [self._alone[change.name].parts for change in combination])
        least = self._least_seconds(combination)
        return GuessedSeconds(max(guessed.likely, least), max(guessed.least, least))

    def _least_seconds(self, combination: Combination) -> float:
        return max((self.least_seconds.get(change.name, 0.0) for change in combination), default=0.0)

    def _guessed_bytes(self, combination: Combination) -> float:
        base = self.base.memory_bytes
        return base + sum(self._alone[change.name].memory_bytes - base for change in combination)

    def _missing_share(self, memory_bytes: float) -> float:
        return max(memory_bytes - self.candidates.budget_bytes, 0.0) / max(memory_bytes, 1.0)

    def _promise(self, combination: Combination) -> float:
        """Return the time that a combination likely takes, with a plan if it needs one."""
        needed = self._guessed_bytes(combination)
        dearer = _NO_PLAN if needed >= self._no_plan_bytes else 1.0
        likely = self._guessed_seconds(combination).likely
        return dearer * likely * (1 + self._freed_share * self._missing_share(needed))

    def _may_be_better(self, combination: Combination) -> bool:
        base = self.base.step_seconds
        alone = [self._alone[change.name].step_seconds for change in combination]
        several = sum(abs(seconds - base) > _A_DIFFERENCE * base for seconds in alone) > 1
        several = several and self.candidates.known_outlook(combination) is None
        seconds = (_OPTIMISM if several else _OPTIMISM_OF_ONE) * self._guessed_seconds(combination).least
        return not self._is_beaten(_exactness(combination), len(combination), seconds)

    def _is_beaten(self, exactness: Exactness, count: int, step_seconds: float) -> bool:
        return any(is_as_good_as(way, exactness, count, step_seconds) for way in self.found)

    def _look_at(self, combination: Combination) -> None:
        """Work the combination out, then capture it, then plan it, as far as it may be better."""
        outlook = self._outlook(combination)
        if outlook is None or self._is_worked_out_to_be_of_no_use(combination, outlook):
            return
        unplanned = self._judge(combination)
        if unplanned is None or self.candidates.fits(unplanned):
            return
        if any(PLAN in change.excludes for change in combination):
            return
        least_seconds = self.candidates.least_planned_seconds(combination)
        if not self._is_beaten(unplanned.exactness, unplanned.count + 1, least_seconds):
            self._plan(combination, unplanned)

    def _outlook(self, combination: Combination) -> Outlook | None:
        """Work a combination out; None if it cannot be made, or not in time."""
        begin = time.monotonic()
        known = self.candidates.known_outlook(combination)
        if known is None and begin + _MAY_TAKE * self._longest_outlook > self._end:
            self.complete = False
            return None
        outlook = known or self.candidates.outlook(combination)
        self._longest_outlook = max(self._longest_outlook, time.monotonic() - begin)
        return outlook

    def _is_worked_out_to_be_of_no_use(self, combination: Combination, outlook: Outlook) -> bool:
        if self.candidates.is_captured(combination):
            return False
        exactness, count = _exactness(combination), len(combination)
        if self._is_beaten(exactness, count, _OPTIMISM_OF_ONE * outlook.step_seconds):
            return True
        if outlook.peak_bytes < _CLEARLY_TOO_LARGE * self.candidates.budget_bytes:
            return False  # it may fit without a plan, and be one thing less to do
        if outlook.least_bytes > _CLEARLY_TOO_LARGE * self.candidates.budget_bytes:
            return True
        planned = _OPTIMISM_OF_ONE * self.candidates.least_planned_seconds(combination)
        return self._is_beaten(exactness, count + 1, planned)

    def _judge(self, combination: Combination) -> Way | None:
        """Capture a combination if it is not yet, and keep it; None if it cannot be, or not in time."""
        if not combination:
            return self.base
        begin, captured = time.monotonic(), self.candidates.is_captured(combination)
        if not captured and begin + _MAY_TAKE * self._longest_capture > self._end:
            self.complete = False
            return None
        way = self.candidates.unplanned(combination)
        if not captured:
            self._longest_capture = max(self._longest_capture, time.monotonic() - begin)
        kept = self.found + self.not_fitting
        if way is not None and not any(way is other for other in kept):
            self.looked_at += 1
            (self.found if self.candidates.fits(way) else self.not_fitting).append(way)
        return way

    def _plan(self, combination: Combination, unplanned: Way) -> None:
        begin = time.monotonic()
        self._tried_plan_alone = self._tried_plan_alone or not combination
        # Whether there is a plan at all is said however little time there is.
        in_time = not self._longest_plan or begin + _MAY_TAKE * self._longest_plan <= self._end
        left = max(self._end - begin, _LEAST_PLAN_SECONDS)
        planned = self.candidates.planned(combination, min(left, _PLAN_SECONDS), anew=in_time)
        self._longest_plan = max(self._longest_plan, time.monotonic() - begin)
        if planned is None:
            self.complete = self.complete and in_time
            if in_time:
                self._no_plan_bytes = min(self._no_plan_bytes, unplanned.memory_bytes)
            return
        self.found.append(planned)
        added = planned.step_seconds / unplanned.step_seconds - 1
        missing = self._missing_share(unplanned.memory_bytes)
        self._freed_share = added / missing if missing else self._freed_share


def _in_groups(changes: Iterable[StepChange]) -> tuple[list[StepChange], ...]:
    """Return what needs no capture, or is asked for by giving a mesh; what else is quick; what copies."""
    groups: tuple[list[StepChange], ...] = ([], [], [])
    for change in changes:
        first = change.is_setting or change.cluster is not None
        groups[0 if first else 2 if change.least_copied_bytes else 1].append(change)
    return groups


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
