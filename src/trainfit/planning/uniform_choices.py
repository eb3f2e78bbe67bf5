"""Choices that treat alike regions alike: what an allocator cuts up least, because the same sizes come again.

For one price per byte every region takes the point of its curve that is worth most, and so do the regions
that are like it. Every price gives a choice, from "nothing is worth it" to "everything is". Points that lie
above the curve are variations of these: with one of the kept values, or all small ones, recomputed as well.
They cost more seconds for the same bytes, and may need less memory all the same.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from trainfit.costs.schedule import Schedule, Seconds
from trainfit.planning.effects import Effect, effect_of
from trainfit.planning.groups import Group
from trainfit.planning.master import MasterProblem, Option, freed_bytes
from trainfit.planning.minimum_cut import Choice, choice_of
from trainfit.planning.options import option_of
from trainfit.planning.regions import RegionGraph
from trainfit.traces.simulate import Timeline

_PRICES = 32
_LENGTHS = (1.0, 0.3, 0.15, 0.08, 0.04)
"""The longest regions of a choice, as shares of the longest of all."""
_SAME = 1e-6
"""A share of what it is worth: less is no reason to prefer a region to those within it."""


@dataclass(frozen=True)
class Combination:
    """Options that can be chosen together, in the order of forward."""

    options: tuple[Option, ...]
    seconds: float
    """What they add to the step, as the master problem sees it."""
    freed_bytes: int
    """What they free between forward and backward, summed up."""

    @cached_property
    def key(self) -> tuple[int, ...]:
        """What tells it from others: the identities of its options, of which there is one for each point."""
        return tuple(id(option) for option in self.options)

    @cached_property
    def device_seconds(self) -> float:
        """What they add to the step if the device never waits for the host."""
        return sum(option.seconds for option in self.options)

    @cached_property
    def starts(self) -> list[int]:
        """Where its regions begin."""
        return [option.effects[0].region.start for option in self.options]

    @cached_property
    def _ends(self) -> list[int]:
        return [option.effects[0].region.end for option in self.options]

    @cached_property
    def _sums(self) -> Seconds:
        """The device's and the host's seconds of the first options: none, one, two, ..."""
        own = [(0.0, 0.0), *((option.seconds, option.host_seconds) for option in self.options)]
        summed: Seconds = np.cumsum(np.array(own), axis=0)
        return summed

    def until(self, cut: float) -> tuple[Option, ...]:
        """Return the options whose regions end before a cut."""
        return self.options[: bisect_right(self._ends, cut)]

    def since(self, cut: float) -> tuple[Option, ...]:
        """Return the options whose regions begin after a cut."""
        return self.options[bisect_left(self.starts, cut) :]

    def summed_until(self, cut: float) -> Seconds:
        """Return the device's and the host's seconds of those whose regions end before a cut."""
        summed: Seconds = self._sums[bisect_right(self._ends, cut)]
        return summed

    def summed_since(self, cut: float) -> Seconds:
        """Return the device's and the host's seconds of those whose regions begin after a cut."""
        summed: Seconds = self._sums[-1] - self._sums[bisect_left(self.starts, cut)]
        return summed

    @cached_property
    def effects(self) -> list[Effect]:
        """What they change in the trace."""
        return [effect for option in self.options for effect in option.effects]


@dataclass
class UniformChoices:
    """The combinations of one step, made as they are asked for and kept."""

    problem: MasterProblem
    timeline: Timeline
    times: Schedule
    _occupied: Seconds = field(init=False)
    _made: dict[tuple[int, Choice], Option] = field(default_factory=dict)
    """Options that are not of the problem, by region and point."""
    _freed: dict[int, int] = field(default_factory=dict)
    """What options free, by identity."""

    def __post_init__(self) -> None:
        """Remember what the options of the problem free."""
        self._occupied = self.times.occupied_seconds
        self._freed = {id(o): size for o, size in zip(self.problem.options, self.problem.freed)}

    def combination(self, options: Sequence[Option]) -> Combination:
        """Return options as a combination."""
        ordered = tuple(sorted(options, key=_start))
        return Combination(
            ordered, self.problem.added_by(ordered), sum(self._freed[id(option)] for option in ordered)
        )

    @cached_property
    def by_price(self) -> list[Combination]:
        """The choices of all prices, for regions of up to several lengths; each once, the slowest first.

        A long region frees most, and needs most while it is computed again; its worth does not say that.
        """
        options = self.problem.options
        device = np.array([option.seconds for option in options])
        host = np.array([option.host_seconds for option in options])
        found = self._by_price(device) if self.problem.spare_seconds > 0 else {}
        if not found or any(one.seconds > one.device_seconds for one in found.values()):
            # The device waits for the host: then a region costs what the host needs for it.
            found |= self._by_price(np.maximum(device, host))
        return sorted(found.values(), key=lambda combination: (-combination.seconds, combination.freed_bytes))

    def _by_price(self, seconds: Seconds) -> dict[tuple[int, ...], Combination]:
        """Return the choices of all prices, if this is what each option costs."""
        options = self.problem.options
        freed = np.array(self.problem.freed, dtype=np.float64)
        useful = (freed > 0) & (seconds > 0)
        if not useful.any():
            return {}
        rates = seconds[useful] / freed[useful]
        prices = np.geomspace(2 * float(rates.max()), 0.5 * float(rates.min()), _PRICES)
        lengths = np.array([len(option.effects[0].region.ops) for option in options])
        found = {}
        for share in _LENGTHS:
            short = lengths <= share * lengths.max()
            for price in prices.tolist():
                chosen = self._worth_most(np.where(short, price * freed - seconds, -np.inf))
                found[tuple(chosen)] = self.combination([options[number] for number in chosen])
        return found

    def _worth_most(self, worth: np.ndarray[tuple[int], np.dtype[np.float64]]) -> list[int]:
        """Return options that are worth most together: of a region, or of those within it."""
        chosen: list[int] = []
        # Regions around the present one: end, what was chosen before, their own best, and what is inside.
        around: list[tuple[int, int, int]] = []
        values: list[float] = []

        def close() -> None:
            _, before, best = around.pop()
            inside = values.pop()
            own = float(worth[best])
            if own > max(inside * (1 + _SAME), 0.0):
                chosen[before:] = [best]
            values[-1] += max(own, inside, 0.0)

        values.append(0.0)
        for start, end, numbers in self._regions:
            while around and around[-1][0] <= start:
                close()
            best = max(numbers, key=lambda number: float(worth[number]))
            around.append((end, len(chosen), best))
            values.append(0.0)
        while around:
            close()
        return chosen

    @cached_property
    def _regions(self) -> list[tuple[int, int, list[int]]]:
        """The regions, those around others first: where they begin and end, and their options."""
        of_region: dict[int, list[int]] = {}
        for number, option in enumerate(self.problem.options):
            of_region.setdefault(option.region, []).append(number)
        spans = [self.problem.options[numbers[0]].effects[0].region for numbers in of_region.values()]
        return [(span.start, span.end, numbers) for span, numbers in zip(spans, of_region.values())]

    def variations(self, combination: Combination) -> Iterator[Combination]:
        """Yield what is like a combination, but recomputes one of its kept values more, or all small ones."""
        points = {option.effects[0].choice: option for option in combination.options}
        for point, example in points.items():
            if point.copies:
                continue  # what is on the host cuts nothing up
            groups = example.effects[0].region.groups
            for dropped in _drops(groups, point):
                again = _repeated_without(groups, point, dropped)
                if again is None:
                    continue
                yield self.combination(
                    [
                        self._varied(option, again) if option.effects[0].choice == point else option
                        for option in combination.options
                    ]
                )

    def _varied(self, option: Option, repeated: frozenset[int]) -> Option:
        """Return the option of the same region that recomputes these groups."""
        regions: list[RegionGraph] = [effect.region for effect in option.effects]
        choice = choice_of(regions[0].groups, repeated)
        key = (option.region, choice)
        if key not in self._made:
            chosen = [choice, *(choice_of(region.groups, repeated) for region in regions[1:])]
            effects = tuple(effect_of(self.times.trace, *each) for each in zip(regions, chosen))
            self._made[key] = made = option_of(self.times, self._occupied, option.region, effects)
            self._freed[id(made)] = freed_bytes(self.timeline, made)
        return self._made[key]


def _start(option: Option) -> int:
    return option.effects[0].region.start


def _drops(groups: Sequence[Group], point: Choice) -> Iterator[frozenset[int]]:
    """Yield kept groups to recompute: each for itself, and all that are smaller than another."""
    kept = sorted(number for number in point.kept if groups[number].bytes)
    yield from (frozenset((number,)) for number in kept)
    for size in sorted({groups[number].bytes for number in kept})[1:]:
        smaller = frozenset(number for number in kept if groups[number].bytes < size)
        if len(smaller) > 1:
            yield smaller


def _repeated_without(
    groups: Sequence[Group], point: Choice, dropped: frozenset[int]
) -> frozenset[int] | None:
    """Return what is recomputed if some kept groups are, too; None if that cannot be."""
    found, kept = set(point.repeated), point.kept - dropped
    pending = list(dropped)
    while pending:
        number = pending.pop()
        if number in found or number in kept:
            continue
        if not groups[number].repeatable:
            return None
        found.add(number)
        pending += groups[number].inputs
    return frozenset(found)
