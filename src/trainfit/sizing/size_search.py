"""The largest size that fits, found with few questions: memory over size is nearly a line.

`largest_fitting` asks what sizes need, and goes where the line through the two nearest answers meets the
budget. `confirmed` does that with answers that are worked out, and then asks for the truth at the size found
and at the next one; where the truth disagrees, it is what counts, and the search goes on between what is
known to fit and what is known not to.

What an allocator needs does not always grow with size: it cuts memory up by luck, and a size may fit although
a smaller one does not. `larger` looks for such sizes up to the one whose peak alone is too much, `rounder`
for round ones, where a look takes long.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

_FAR = 4
"""How many times as large the upper end may be before the middle is that of orders of magnitude."""
_MOST_SECANTS = 2
"""After so many steps along the line that did not halve what is left, the middle is asked."""
_MOST_LARGER = 32
"""How many sizes are looked at in one pass above the one that was found."""
_MOST_PASSES = 3
_LITTLE = 4
"""Round sizes are looked at up to the size that was found and this part of it."""
_MOST_ROUNDS = 4
"""How often what is worked out may be wrong before only the truth is asked."""


@dataclass(frozen=True)
class Needed:
    """What a size needs."""

    fits: bool
    bytes: float = math.nan
    """The least memory; not a number where nobody knows."""


Ask = Callable[[int], Needed]
Guess = Callable[[int], Needed | None]


@dataclass
class Bracket:
    """Sizes between the largest that is known to fit and the smallest above it that is known not to."""

    first: int
    last: int
    answers: dict[int, Needed] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Nothing is known: no size may fit, or all of them."""
        self.low, self.high = self.first - 1, self.last + 1

    def learn(self, size: int, needed: Needed) -> None:
        """Take an answer into account, if it says something new."""
        self.answers[size] = needed
        if self.low < size < self.high:
            if needed.fits:
                self.low = size
            else:
                self.high = size

    @property
    def has_refused(self) -> bool:
        """Whether the upper end is a size that does not fit for another reason than its memory."""
        end = self.answers.get(self.high)
        return end is not None and math.isnan(end.bytes)

    @property
    def decided(self) -> bool:
        """Whether nothing is left between."""
        return self.high - self.low <= 1

    def __contains__(self, size: int) -> bool:
        """Whether it is not known of a size."""
        return self.low < size < self.high


def confirmed(
    ask: Ask,
    guess: Guess,
    budget_bytes: int,
    bracket: Bracket,
    hints: dict[int, Needed] | None = None,
    peak: Guess | None = None,
) -> int | None:
    """Return the largest size that fits, and whose next does not, by the truth; None if the first does not.

    `ask` tells the truth, and takes long; `guess` works it out, or says None where it cannot. `hints` are
    guesses that there are already; `peak` works out what a size has alive at once: up to there, larger
    sizes than the one that is found are looked at. Without it these are only the round ones.
    """
    hints = hints or {}
    for _ in range(_MOST_ROUNDS):
        if bracket.decided:
            break
        inside = Bracket(bracket.low + 1, bracket.high - 1)
        found = largest_fitting(guess, budget_bytes, inside, hints | bracket.answers)
        if found is None:
            break
        last = bracket.high - 1
        if peak is not None:
            found = larger(guess, peak, budget_bytes, found, last)
        else:
            found = rounder(guess, found, last)
        for size in (found, found + 1):
            if size in bracket:
                bracket.learn(size, ask(size))
        if bracket.has_refused:
            # It is not the memory that ends it, and no line says where.
            hints = {}
            break
    if not bracket.decided:
        largest_fitting(ask, budget_bytes, bracket, hints | bracket.answers)
    return bracket.low if bracket.low >= bracket.first else None


def larger(guess: Guess, peak: Guess, budget_bytes: int, found: int, last: int) -> int:
    """Return the largest size that fits of those whose peak is within the budget; `found` if there is none.

    Where there are many sizes, some of them are looked at, and then those around the largest that fits.
    """
    most = largest_fitting(peak, budget_bytes, Bracket(found + 1, last))
    best, end = found, found if most is None else most
    for _ in range(_MOST_PASSES):
        every = max(-(-(end - best) // _MOST_LARGER), 1)
        above, fitting = end + 1, best
        for size in range(end, best, -every):
            guessed = guess(size)
            if guessed is not None and guessed.fits:
                fitting = size
                break
            above = size
        if fitting == best:
            break
        best, end = fitting, above - 1
    return best


def rounder(guess: Guess, found: int, last: int) -> int:
    """Return a size that is a little larger than one that fits, rounder, and fits as well; else that one.

    Round is what many powers of two divide: storages are whole blocks then, and lie well beside each other.
    """
    powers = (1 << exponent for exponent in range(1, max(found, 1).bit_length()))
    most = min(last, found + found // _LITTLE)
    for size in sorted({-(-(found + 1) // power) * power for power in powers}, reverse=True):
        guessed = guess(size) if size <= most else None
        if guessed is not None and guessed.fits:
            return size
    return found


def largest_fitting(
    ask: Guess, budget_bytes: int, bracket: Bracket, known: dict[int, Needed] | None = None
) -> int | None:
    """Narrow the bracket until nothing is left; return the largest size that fits.

    It is one less than the first if none does. None if somebody who is asked does not know. `known` are
    further answers that say where the line is.
    """
    answers = dict(known or {})
    slow = 0
    while not bracket.decided:
        size = _next(bracket, answers, budget_bytes, middle=slow >= _MOST_SECANTS)
        left = bracket.high - bracket.low
        needed = ask(size)
        if needed is None:
            return None
        answers[size] = needed
        bracket.learn(size, needed)
        halved = bracket.high - bracket.low <= left / 2
        slow = 0 if halved or slow >= _MOST_SECANTS else slow + 1
    return bracket.low


def _next(bracket: Bracket, answers: dict[int, Needed], budget_bytes: int, *, middle: bool) -> int:
    """Return the size to ask about: where the line says, or twice the largest that fits, or the middle."""
    low, high = bracket.low, bracket.high
    bounded = high in answers
    if middle:
        return _middle(low, high, bounded)
    figures = {size: one.bytes for size, one in answers.items() if not math.isnan(one.bytes)}
    on_line = _where_the_line_ends(figures, low, high if bounded else None, budget_bytes)
    if on_line is None:
        return _middle(low, high, bounded)
    return min(max(on_line, low + 1), high - 1)


def _middle(low: int, high: int, bounded: bool) -> int:
    """Return a size between: the next of those that people try, as long as nothing is known above."""
    if not bounded:
        return min(max(2 * low, low + 1), high - 1)
    if high > _FAR * max(low, 1):
        return min(max(math.isqrt(max(low, 1) * high), low + 1), high - 1)
    return (low + high) // 2


def _where_the_line_ends(
    figures: dict[int, float], low: int, high: int | None, budget_bytes: int
) -> int | None:
    """Return the last size within the budget on the line through the two answers nearest to the bracket."""
    near = sorted(figures, key=lambda size: min(abs(size - low), abs(size - (high or low))))[:2]
    if len(near) < 2:
        return None
    one, other = sorted(near)
    slope = (figures[other] - figures[one]) / (other - one)
    if not math.isfinite(slope) or slope <= 0:
        return None
    reach = one + (budget_bytes - figures[one]) / slope
    return math.floor(reach) if abs(reach) < 1e18 else None
