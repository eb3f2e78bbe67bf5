"""The trade-off of one region: bytes kept between forward and backward against seconds of recomputation.

Every vertex of the curve's convex hull is the cheapest choice for some price per byte, so the hull is found
exactly by asking for the cheapest choice at the slope between two known vertices, until no vertex is new.

Where many regions are alike, some take one vertex and some the next, and together they come close to any
point between. A region that is the only one of its kind cannot do that: its points between the vertices are
found one by one, each as the fastest choice within so many bytes.

Sets        groups g of ops, values v that they make (`regions.py`)
Data        seconds[g], bytes[v], the bytes that may be kept
Variables   repeated[g]    whether the group is recomputed (binary)
            kept[v]        whether the value is kept
Constraints saved          a value that autograd saved is kept if its group is not recomputed
            read           so is one that a group reads which is recomputed
            within         the bytes of what is kept are within the limit
Objective   minimise the seconds of what is recomputed
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trainfit.planning.groups import Group
from trainfit.planning.highs import Program, Term
from trainfit.planning.minimum_cut import Choice, cheapest, choice_of

_MOST_POINTS = 40
_NEARLY_FREE = 1e-18
_PRICELESS = 1e3
"""Seconds per byte: so low that time decides, and so high that bytes decide."""
_MOST_VALUES = 60
"""In a region with more, several blocks in a row, the hull has points enough."""
_SECONDS_LIMIT = 2.0
_GAP_SHARE = 1e-4
"""Of the region's seconds."""


def curve_of(groups: Sequence[Group]) -> list[Choice]:
    """Return the vertices of the hull, fewest bytes first; empty if the region cannot be checkpointed."""
    most, least = cheapest(groups, _NEARLY_FREE), cheapest(groups, _PRICELESS)
    if most is None or least is None:
        return []
    points = {(point.bytes, point.seconds): point for point in (least, most)}
    pending = [(least, most)]
    while pending and len(points) < _MOST_POINTS:
        low, high = pending.pop()
        if high.bytes <= low.bytes or low.seconds <= high.seconds:
            continue
        price = (low.seconds - high.seconds) / (high.bytes - low.bytes)
        between = cheapest(groups, price)
        line = low.seconds + price * low.bytes
        # Below the line between the two, by more than rounding.
        if between is None or between.seconds + price * between.bytes >= line * (1 - 1e-9):
            continue
        if (between.bytes, between.seconds) not in points:
            points[between.bytes, between.seconds] = between
            pending += [(low, between), (between, high)]
    return _undominated(points.values())


def with_points_between(groups: Sequence[Group], hull: list[Choice], most: int) -> list[Choice]:
    """Return the hull with at most so many points between its ends, evenly over the bytes; fewest first."""
    most = min(most, 2 * len(groups))
    values = sum(len(group.storages) for group in groups)
    if len(hull) < 2 or most < 1 or values > _MOST_VALUES:
        return hull
    low, high = hull[0].bytes, hull[-1].bytes
    found = {(choice.bytes, choice.seconds): choice for choice in hull}
    limit = high
    for number in reversed(range(1, most + 1)):
        # Below what the last answer took: another would be the same.
        limit = min(low + (high - low) * number // (most + 1), limit - 1)
        if limit <= low:
            break
        choice = fastest_within(groups, limit)
        if choice is not None:
            found[choice.bytes, choice.seconds] = choice
            limit = choice.bytes
    return _undominated(found.values())


def fastest_within(groups: Sequence[Group], limit_bytes: int) -> Choice | None:
    """Return the choice with the least recomputation among those that keep at most so many bytes."""
    program, repeated, _ = region_program(groups, limit_bytes)
    seconds = sum(group.seconds for group in groups)
    answer = program.minimise(seconds_limit=_SECONDS_LIMIT, gap=_GAP_SHARE * seconds)
    if not answer.feasible:
        return None
    chosen = frozenset(number for number, column in enumerate(repeated) if answer.values[column] > 0.5)
    choice = choice_of(groups, chosen)
    return choice if choice.bytes <= limit_bytes else None


def region_program(
    groups: Sequence[Group], limit_bytes: int, copyable: Iterable[int] = ()
) -> tuple[Program, list[int], dict[int, int]]:
    """Write the program down; return it with the columns of `repeated`, and of `copied` by group.

    What a `copyable` group makes may be had in a third way, whose costs are for the caller to add.
    """
    program = Program()
    repeated = [
        program.binary(group.seconds) if group.repeatable and group.storages else program.continuous(0.0, 0.0)
        for group in groups
    ]
    copied = {number: program.binary() for number in copyable}
    kept = {
        (number, place): program.continuous(0.0, 1.0 if group.keepable else 0.0)
        for number, group in enumerate(groups)
        for place in range(len(group.sizes))
    }

    def there(number: int, place: int) -> list[Term]:
        own = [(kept[number, place], -1.0), (repeated[number], -1.0)]
        return [*own, (copied[number], -1.0)] if number in copied else own

    for number, group in enumerate(groups):
        for place, saved in enumerate(group.saved):
            if saved:
                program.at_most("saved", there(number, place), -1.0)
        for value in group.reads:
            program.at_most("read", [(repeated[number], 1.0), *there(*value)], 0.0)
    scale = max(limit_bytes, 1)
    sizes = [(column, groups[number].sizes[place] / scale) for (number, place), column in kept.items()]
    program.at_most("within", sizes, limit_bytes / scale)
    return program, repeated, copied


def _undominated(points: Iterable[Choice]) -> list[Choice]:
    """Return the points that no other beats in both bytes and seconds, fewest bytes first."""
    found: list[Choice] = []
    for point in sorted(points, key=lambda point: (point.bytes, point.seconds)):
        if not found or point.seconds < found[-1].seconds:
            found.append(point)
    return found
