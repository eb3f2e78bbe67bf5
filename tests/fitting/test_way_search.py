"""The search finds what trying everything finds, and shows nothing that another way beats."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from trainfit.changes.change import StepChange
from trainfit.fitting.guessed_times import StepParts, guessed_seconds
from trainfit.fitting.shallow_steps import Outlook
from trainfit.fitting.way_ranking import not_beaten, rank
from trainfit.fitting.way_search import WaySearch
from trainfit.plans.ways import EXACTNESS, ChangeMade, Way


@dataclass
class Invented:
    """Candidates whose figures follow from random factors, with something that only pairs do."""

    budget_bytes: int
    memory: dict[str, float]
    time: dict[str, float]
    together: dict[frozenset[str], float]
    shallow: bool = False
    """Whether steps are worked out before they are captured."""
    asked: list[tuple[str, ...]] = field(default_factory=list)
    outlooks: dict[tuple[str, ...], Outlook] = field(default_factory=dict)

    def unplanned(self, changes: Sequence[StepChange]) -> Way | None:
        names = [change.name for change in changes]
        self.asked.append(tuple(names))
        memory, seconds = self._figures(names)
        made = tuple(change.made for change in changes)
        return Way("x", "d", made, None, int(memory), int(memory), seconds, 1, None)

    def _figures(self, names: Sequence[str]) -> tuple[float, float]:
        memory, seconds = 1000.0, 1.0
        for name in names:
            memory *= self.memory[name]
            seconds *= self.time[name]
        for pair in itertools.combinations(names, 2):
            seconds *= self.together.get(frozenset(pair), 1.0)
        return memory, seconds

    def planned(
        self, changes: Sequence[StepChange], seconds_limit: float, *, anew: bool = True
    ) -> Way | None:
        way = self.unplanned(changes)
        assert way is not None
        if way.memory_bytes > 2 * self.budget_bytes:
            return None
        missing = max(way.memory_bytes - self.budget_bytes, 0) / way.memory_bytes
        plan: object = "a plan"
        return Way(
            *("x", "d", way.changes, plan, self.budget_bytes, self.budget_bytes),  # type: ignore[arg-type]
            way.step_seconds * (1 + 0.3 * missing),
            *(1, None),
        )

    def least_planned_seconds(self, changes: Sequence[StepChange]) -> float:
        outlook = self.known_outlook(changes)
        assert outlook is not None
        return outlook.step_seconds

    def outlook(self, changes: Sequence[StepChange]) -> Outlook | None:
        if self.is_captured(changes):
            way = self.unplanned(changes)
            assert way is not None
            memory, seconds = float(way.memory_bytes), way.step_seconds
        else:
            memory, seconds = self._figures([change.name for change in changes])
            # Worked out, not captured: the bytes are wrong by a little, the seconds hardly.
            memory *= 1.03
        outlook = Outlook(memory / 1.05, memory, StepParts(seconds, np.array([[seconds], [0.0]])))
        self.outlooks[tuple(change.name for change in changes)] = outlook
        return outlook

    def known_outlook(self, changes: Sequence[StepChange]) -> Outlook | None:
        return self.outlook(changes) if not changes else self.outlooks.get(tuple(c.name for c in changes))

    def is_captured(self, changes: Sequence[StepChange]) -> bool:
        return not self.shallow or tuple(change.name for change in changes) in self.asked

    def fits(self, way: Way) -> bool:
        return way.memory_bytes <= self.budget_bytes


def invented(seed: int) -> tuple[Invented, list[StepChange]]:
    rng = random.Random(seed)
    changes = [
        StepChange(ChangeMade(kind, str(value), "", rng.choice(EXACTNESS)))
        for kind in ("optimizer", "dtype", "loss", "batch")
        for value in range(rng.randint(1, 3))
    ]
    names = [change.name for change in changes]
    pairs = [frozenset(pair) for pair in itertools.combinations(names, 2)]
    return Invented(
        budget_bytes=rng.randint(150, 1100),
        memory={name: rng.uniform(0.4, 1.05) for name in names},
        time={name: rng.uniform(0.7, 1.3) for name in names},
        together={pair: rng.uniform(0.98, 1.1) for pair in rng.sample(pairs, len(pairs) // 3)},
    ), changes


def everything(candidates: Invented, changes: list[StepChange]) -> list[Way]:
    kinds: dict[str, list[StepChange | None]] = {}
    for change in changes:
        kinds.setdefault(change.kind, [None]).append(change)
    found = []
    for chosen in itertools.product(*kinds.values()):
        combination = [change for change in chosen if change is not None]
        for way in (candidates.unplanned(combination), candidates.planned(combination, 1.0)):
            if way is not None and candidates.fits(way):
                found.append(way)
    return found


@pytest.mark.parametrize("shallow", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_nothing_that_was_not_found_is_faster(seed: int, shallow: bool) -> None:
    candidates, changes = invented(seed)
    candidates.shallow = shallow
    base = candidates.unplanned(())
    assert base is not None
    search = WaySearch(candidates, changes, base, 60.0)  # type: ignore[arg-type]
    ways = search.run()
    all_ways = everything(candidates, changes)
    assert search.complete
    assert bool(ways) == bool(all_ways)
    for way in all_ways:
        no_worse = [w for w in ways if rank(w.exactness) <= rank(way.exactness) and w.count <= way.count]
        assert no_worse and min(w.step_seconds for w in no_worse) <= way.step_seconds * 1.0011


@pytest.mark.parametrize("seed", range(20))
def test_no_way_that_is_shown_is_beaten_by_another(seed: int) -> None:
    candidates, changes = invented(seed)
    ways = not_beaten(everything(candidates, changes))
    for one, other in itertools.permutations(ways, 2):
        better = rank(one.exactness) <= rank(other.exactness) and one.count <= other.count
        assert not (better and one.step_seconds <= other.step_seconds)
    assert [way.step_seconds for way in ways] == sorted(way.step_seconds for way in ways)


def test_changes_that_exclude_each_other_are_not_combined() -> None:
    candidates, _ = invented(0)
    changes = [
        StepChange(ChangeMade("optimizer", "0", "", "bit-equal"), excludes=frozenset({"batch"})),
        StepChange(ChangeMade("batch", "0", "", "bit-equal")),
    ]
    candidates.memory = {change.name: 0.5 for change in changes}
    candidates.time = {change.name: 1.0 for change in changes}
    base = candidates.unplanned(())
    assert base is not None
    WaySearch(candidates, changes, base, 60.0).run()  # type: ignore[arg-type]
    assert max(len(names) for names in candidates.asked) == 1


def test_when_time_is_up_that_is_said() -> None:
    candidates, changes = invented(1)
    base = candidates.unplanned(())
    assert base is not None
    search = WaySearch(candidates, changes, base, 0.0)  # type: ignore[arg-type]
    search.run()
    assert not search.complete


def parts_of(*device_and_host: tuple[float, float]) -> StepParts:
    """A step whose phases take what the busier one takes."""
    busy = np.array(device_and_host).T
    return StepParts(float(busy.max(axis=0).sum()), busy)


def test_guesses_follow_the_busier_of_device_and_host() -> None:
    base = parts_of((6.0, 2.0), (2.0, 1.0))
    # Kernels of the first phase take half as long; and a fused optimizer has fewer of them.
    halved, fused = parts_of((3.0, 2.0), (2.0, 1.0)), parts_of((6.0, 2.0), (0.5, 0.1))
    assert guessed_seconds(base, []).likely == 8.0 and guessed_seconds(base, [halved]).likely == 5.0
    assert guessed_seconds(base, [halved, fused]).likely == pytest.approx(3.0 + 0.5)
    # In four batches the host issues everything four times, and then is the busier one.
    four = parts_of((6.0, 8.0), (2.0, 1.0))
    assert guessed_seconds(base, [halved, four]).likely == pytest.approx(8.0 + 1.0)


def test_what_helps_only_together_is_guessed_to_help() -> None:
    base = parts_of((4.0, 4.0))
    less_device, less_host = parts_of((2.0, 4.0)), parts_of((4.0, 2.0))
    alone = [guessed_seconds(base, [one]).likely for one in (less_device, less_host)]
    assert alone == [4.0, 4.0]
    assert guessed_seconds(base, [less_device, less_host]).likely == pytest.approx(2.0)


def test_what_is_saved_of_slow_kernels_is_less_of_fast_ones() -> None:
    """A dtype makes everything ten times as fast; of what chunks of a loss save, a tenth is left."""
    base, fast, chunks = parts_of((10.0, 0.1)), parts_of((1.0, 0.1)), parts_of((9.0, 0.1))
    both = guessed_seconds(base, [fast, chunks])
    assert both.likely == pytest.approx(0.9)
    assert both.least == pytest.approx(0.81), "added up, nothing would be left"


@pytest.mark.parametrize("seed", range(10))
def test_what_is_worked_out_to_be_slower_is_not_captured(seed: int) -> None:
    counts = []
    for shallow in (False, True):
        candidates, changes = invented(seed)
        candidates.shallow = shallow
        base = candidates.unplanned(())
        assert base is not None
        WaySearch(candidates, changes, base, 60.0).run()  # type: ignore[arg-type]
        counts.append(len(set(candidates.asked)))
    assert counts[1] <= counts[0]


def test_without_time_the_plan_alone_is_tried_all_the_same() -> None:
    candidates, changes = invented(1)
    candidates.budget_bytes = 800
    base = candidates.unplanned(())
    assert base is not None
    search = WaySearch(candidates, changes, base, 1e-9)  # type: ignore[arg-type]
    ways = search.run()
    assert not search.complete
    assert any(not way.changes and way.plan for way in ways)


def test_changes_that_take_long_alone_leave_time_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by a second for each capture: the plan is there before all changes were seen."""
    candidates, changes = invented(1)
    candidates.budget_bytes = 800
    candidates.memory = dict.fromkeys(candidates.memory, 0.99)
    base = candidates.unplanned(())
    assert base is not None
    limit = float(len(changes))
    begun = len(candidates.asked)
    monkeypatch.setattr("trainfit.fitting.way_search.time.monotonic", lambda: 0.5 * len(candidates.asked))
    search = WaySearch(candidates, changes, base, limit)  # type: ignore[arg-type]
    assert any(way.plan is not None for way in search.run())
    singles = {names for names in candidates.asked[begun:] if len(names) == 1}
    assert len(singles) < len(changes)


def test_as_long_as_nothing_fits_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan of the whole batch fits, and time is up after a few captures: another combination does."""
    candidates, changes = invented(1)
    candidates.memory = dict.fromkeys(candidates.memory, 0.7)
    candidates.budget_bytes = 400
    base = candidates.unplanned(())
    assert base is not None
    monkeypatch.setattr("trainfit.fitting.way_search.time.monotonic", lambda: float(len(candidates.asked)))
    search = WaySearch(candidates, changes, base, float(len(changes)) / 2)  # type: ignore[arg-type]
    assert candidates.planned((), 1.0) is None
    assert search.run()
    # Once something fits, time counts again.
    assert len(candidates.asked) < 4 * len(changes)
