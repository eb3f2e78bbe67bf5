"""The fastest plan that an allocator runs within a budget: the solver's, or one that was found by trials.

The solver knows the bytes that are asked for at once. Where its answer for the whole budget runs, nothing is
better. Otherwise it is asked for less, by what the allocator adds, and its answers are where trials begin
(`trial_search.py`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from trainfit.allocator.allocator_options import AllocatorOptions
from trainfit.planning import certify
from trainfit.planning.certify import Certified, Unplanned
from trainfit.planning.master import MasterProblem, Solution
from trainfit.planning.planned_columns import PlannedColumns
from trainfit.planning.trial_search import TrialSearch
from trainfit.planning.trials import Trials
from trainfit.planning.uniform_choices import Combination, UniformChoices

_FIRST_GAP_SHARE = 5e-3
"""Of the step's time: good enough to see whether the allocator runs it."""
FINE_GAP_SHARE = 1e-4
"""Closer than this to the bound there is nothing to look for."""
_FIRST_SECONDS = 15.0
_LEAST_SECONDS, _MOST_SECONDS = 1.0, 6.0
"""For all of the solver's answers after the first; between these, so many times as long as the first took."""
_TIMES_THE_FIRST = 8.0
_ROOM_SHARE = 0.005
"""Of the budget: between one that is enough for the model and one that is too much, less is not worth looking
for."""
_FEW_TRIALS = 30
_MOST_CERTIFICATES = 4
_MOST_CANDIDATES = 16
"""How many that run in just the budget are asked for the least memory that they need."""
_MOST_LEAST = 10
"""How many choices are looked at to find the one that needs the least memory."""

Solver = Callable[[int, float], Solution]
"""Solves the master problem for a budget, within so many seconds, as well as it can."""


@dataclass
class BudgetSearch:
    """Searches for one step and one setting of the allocator; what ran once is remembered."""

    problem: MasterProblem
    step: Unplanned
    choices: UniformChoices
    columns: PlannedColumns
    most_trials: int
    most_answers: int = 4
    """How many budgets the solver is asked for."""
    gap_share: float = 1e-3
    """Of the step's time: good enough for a plan to begin trials with."""
    fine_gap_share: float = FINE_GAP_SHARE
    _remembered: list[tuple[float, Combination]] = field(default_factory=list)
    """What was the fastest for other budgets, and the step's seconds: it may be for the next one, too."""
    _answers: dict[tuple[int, float], Solution] = field(default_factory=dict)
    """The solver's, by budget and gap; it knows nothing of allocators."""
    _first_took: dict[int, float] = field(default_factory=dict)
    """Seconds, by budget: what the machine and the step make of them is a measure for the next answers."""

    def with_allocator(self, allocator: AllocatorOptions | None) -> BudgetSearch:
        """Return a search with another setting of the allocator; what the solver answered is remembered."""
        return replace(self, step=replace(self.step, allocator=allocator), _remembered=[])

    def rough(self, allocator: AllocatorOptions) -> BudgetSearch:
        """Return a search with another setting of the allocator that takes less time, and finds less."""
        search = self.with_allocator(allocator)
        return replace(search, most_trials=_FEW_TRIALS, most_answers=3, gap_share=_FIRST_GAP_SHARE)

    def search(self, budget_bytes: int, deadline: float, solver: Solver) -> Certified | None:
        """Return the fastest plan that was found to run within the budget; None if there is none."""
        modelled = certify.peak_within(self.step.trace, budget_bytes)
        first = self.first(modelled, max(deadline - time.monotonic(), 1.0))
        if first.optimal and not first.feasible:
            return None
        trials = Trials(self.step, self.step.allocator, self.columns)
        answers, bound = [self._combination(first)] if first.feasible else [], first.bound
        if not answers:
            pass  # the solver ran out of time: trials need none of its answers
        elif trials.run(answers[0].effects, budget_bytes):
            if not self._is_close(first.seconds, bound):
                best = solver(modelled, max(deadline - time.monotonic(), 1.0))
                if best.feasible:
                    answers, bound = [self._combination(best), *answers], max(best.bound, bound)
            if trials.run(answers[0].effects, budget_bytes):
                answers.sort(key=lambda one: one.seconds)
                found = self._fastest_that_fits(trials, answers, budget_bytes, bound)
                if found is not None:
                    return found
        else:
            answers += self._smaller(trials, answers[0], budget_bytes, modelled)
            running = sorted(
                (one for one in answers if trials.run(one.effects, budget_bytes)), key=lambda one: one.seconds
            )
            if running and self._is_close(running[0].seconds, bound):
                found = self._fastest_that_fits(trials, running, budget_bytes, bound)
                if found is not None and self.is_close(found):
                    return found
        search = TrialSearch(
            self.choices, trials, budget_bytes, self.step.step_seconds, self.most_trials, deadline
        )
        running = search.search([*(known for _, known in self._remembered), *answers])
        return self._fastest_that_fits(trials, running, budget_bytes, bound)

    def _is_close(self, seconds: float, bound: float) -> bool:
        """Whether there is nothing to look for between what is added and the least that may be."""
        return seconds - bound <= self.fine_gap_share * self.step.step_seconds

    def is_close(self, found: Certified) -> bool:
        """Whether there is nothing to look for between a plan and its bound."""
        return found.fits and self._is_close(found.step_seconds, found.plan.bound_seconds)

    def least(self, smallest_peak: Solution, budget_bytes: int) -> Certified:
        """Return what runs in the least memory, of the choices that free most and the one with this peak."""
        trials = Trials(self.step, self.step.allocator, self.columns)
        most_freed = sorted(self.choices.by_price, key=lambda one: -trials.least_peak_bytes(one.effects))
        tried = [self._combination(smallest_peak), *reversed(most_freed[-_MOST_LEAST:])]
        combination = min(tried, key=lambda one: trials.needed_bytes(one.effects))
        plan = self.certified(combination, budget_bytes, 0.0)
        if plan.fits:
            self._remembered.append((plan.step_seconds, combination))
        return plan

    def _smaller(
        self, trials: Trials, first: Combination, budget_bytes: int, modelled: int
    ) -> list[Combination]:
        """Return the solver's answers for less than the budget, by what the allocator adds."""
        patience = max(_TIMES_THE_FIRST * self._first_took[modelled], _LEAST_SECONDS)
        deadline = time.monotonic() + min(patience, _MOST_SECONDS)
        found: list[Combination] = []
        enough, exceeds = 0, modelled
        # The answer may ask for less than it was allowed.
        asked = min(modelled, trials.least_peak_bytes(first.effects))
        asked -= max(trials.needed_bytes(first.effects) - budget_bytes, 1)
        while len(found) < self.most_answers - 1 and time.monotonic() < deadline:
            answer = self._answer(asked, deadline - time.monotonic(), self.gap_share)
            if not answer.feasible:
                break
            found.append(self._combination(answer))
            if trials.run(found[-1].effects, budget_bytes):
                enough = asked
            else:
                exceeds = asked
            if enough:
                asked = (enough + exceeds) // 2
            else:
                asked = min(asked, trials.least_peak_bytes(found[-1].effects))
                asked -= max(trials.needed_bytes(found[-1].effects) - budget_bytes, 1)
            if exceeds - enough < _ROOM_SHARE * budget_bytes:
                break
        return found

    def _fastest_that_fits(
        self, trials: Trials, combinations: Sequence[Combination], budget_bytes: int, bound: float
    ) -> Certified | None:
        """Certify combinations until none that is left is faster: trials are of few steps and know no queues.

        Some run in just the budget and not in a little more; those that do not are asked for no certificate.
        What ran within another budget and is faster is certified, too: more memory never costs time.
        """
        found: Certified | None = None
        fitting = (
            one
            for number, one in enumerate(combinations[:_MOST_CANDIDATES])
            # The first is certified anyway, in most cases as the only one.
            if number == 0 or trials.needed_bytes(one.effects) <= budget_bytes
        )
        for combination in itertools.islice(fitting, _MOST_CERTIFICATES):
            # Copies to the host may have to wait for each other: then a step takes longer than summed up.
            least_seconds = self.step.step_seconds + combination.seconds
            if found is not None and found.step_seconds <= least_seconds * (1 + self.fine_gap_share):
                break
            plan = self.certified(combination, budget_bytes, bound)
            if plan.fits and (found is None or plan.step_seconds < found.step_seconds):
                self._remembered.append((plan.step_seconds, combination))
                found = plan
        for seconds, combination in sorted(self._remembered, key=lambda known: known[0]):
            if found is not None and seconds >= found.step_seconds:
                break
            plan = self.certified(combination, budget_bytes, bound)
            if plan.fits:
                return plan
        return found

    def first(self, budget_bytes: int, seconds_limit: float) -> Solution:
        """Solve the master problem roughly: is there a plan at all, and what is the bound?"""
        begin = time.monotonic()
        answer = self._answer(budget_bytes, min(_FIRST_SECONDS, seconds_limit), _FIRST_GAP_SHARE)
        self._first_took.setdefault(budget_bytes, time.monotonic() - begin)
        return answer

    def _answer(self, budget_bytes: int, seconds_limit: float, gap_share: float) -> Solution:
        key = (budget_bytes, gap_share)
        if key not in self._answers:
            gap = gap_share * self.step.step_seconds
            self._answers[key] = self.problem.solve(
                budget_bytes, seconds_limit=seconds_limit, gap_seconds=gap
            )
        return self._answers[key]

    def _combination(self, solution: Solution) -> Combination:
        return self.choices.combination([self.problem.options[number] for number in solution.options])

    def certified(self, combination: Combination, budget_bytes: int, bound: float) -> Certified:
        """Replay a combination on the trace, and promise what comes out."""
        return certify.certified(
            self.step,
            combination.effects,
            budget_bytes,
            bound,
            summed_seconds=combination.seconds,
            method="regions",
        )
