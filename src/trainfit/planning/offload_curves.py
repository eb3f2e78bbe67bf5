"""The trade-off of one region whose results may be copied to the host: kept, recomputed or offloaded.

Its inputs, which are needed whatever is recomputed, are kept or offloaded (`region_inputs.py`).

What a copy costs depends on all copies of the region together: up to a point they run beside the computation
and cost nothing. So points are found one by one, each as the fastest choice within so many bytes.

Sets        groups g of ops, values v that they make (`regions.py`)
Data        seconds[g], bytes[v], copy[g] seconds to copy what the group makes, out and back the seconds that
            copies run beside, the bytes that may be kept
Variables   repeated[g]    whether the group is recomputed (binary)
            offloaded[g]   whether what it makes is copied to the host (binary)
            kept[v]        whether the value is kept on the device
            waits          how long the step waits for copies, in forward and in backward
Constraints saved          a value that autograd saved is kept or copied if its group is not recomputed
            read           so is one that a group reads which is recomputed
            copied         the seconds of all copies, less those that they run beside, are at most waits
            within         the bytes of what is kept are within the limit
Objective   minimise the seconds of what is recomputed, and waits
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trainfit.planning.curves import region_program
from trainfit.planning.groups import Group
from trainfit.planning.host_copies import CopyWindow, Offloading
from trainfit.planning.minimum_cut import Choice, choice_of

_POINTS = 5
_MOST_VALUES = 200
"""In a region with more, what is kept at the points of its hull is copied, and no others are looked for."""
_SECONDS_LIMIT = 2.0
_GAP_SHARE = 1e-4
"""Of the region's seconds."""


def can_be_offloaded(group: Group) -> bool:
    """Whether copying what a group makes to the host frees all of it: nobody else holds a part anyway."""
    return group.keepable and bool(group.sizes) and all(size > 0 for size in group.sizes)


def offloading_points(
    groups: Sequence[Group],
    hull: Sequence[Choice],
    offloading: Offloading,
    window: CopyWindow,
    *,
    solved: bool = True,
) -> list[Choice]:
    """Return choices with copies to the host that no point of the hull beats.

    Not `solved`: what is kept at the points of the hull is copied, and no others are looked for.
    """
    found = [
        with_copies(groups, point, copied, offloading, window)
        for point in hull
        for copied in (_copyable(groups, point), _inputs(groups))
    ]
    if solved and sum(len(group.sizes) for group in groups) <= _MOST_VALUES:
        most = max((point.bytes for point in hull), default=0)
        limits = [most * number // _POINTS for number in range(_POINTS)]
        points = (_fastest_within(groups, limit, offloading, window) for limit in limits)
        found += [point for point in points if point is not None]
    kept: list[Choice] = []
    for point in sorted(
        {*found, *hull}, key=lambda point: (point.bytes, point.seconds, len(point.offloaded))
    ):
        if not kept or point.seconds < kept[-1].seconds:
            kept.append(point)
    return [point for point in kept if point.offloaded]


def _copyable(groups: Sequence[Group], point: Choice) -> frozenset[int]:
    return frozenset(number for number in point.kept if can_be_offloaded(groups[number]))


def _inputs(groups: Sequence[Group]) -> frozenset[int]:
    """Return the groups that stand for inputs (`region_inputs.py`)."""
    return frozenset(number for number, group in enumerate(groups) if not group.ops)


def with_copies(
    groups: Sequence[Group],
    point: Choice,
    offloaded: frozenset[int],
    offloading: Offloading,
    window: CopyWindow,
) -> Choice:
    """Return a choice that recomputes what another one does, and copies these groups to the host."""
    choice = choice_of(groups, point.repeated, offloaded)
    sizes = [size for number in choice.offloaded for size in groups[number].sizes]
    return replace(choice, seconds=choice.seconds + offloading.exposed_seconds(window, sizes))


def _fastest_within(
    groups: Sequence[Group], limit_bytes: int, offloading: Offloading, window: CopyWindow
) -> Choice | None:
    """Return the fastest choice among those that keep at most so many bytes on the device."""
    link = offloading.link
    copyable = [number for number, group in enumerate(groups) if can_be_offloaded(group)]
    program, repeated, copied = region_program(groups, limit_bytes, copyable)
    copying = [(column, sum(map(link.seconds, groups[n].sizes))) for n, column in copied.items()]
    for beside in (window.out_seconds, window.back_seconds):
        waits = program.continuous(0.0, float("inf"), 1.0)
        scale = max(sum(seconds for _, seconds in copying), 1e-12)
        terms = [(column, seconds / scale) for column, seconds in copying]
        program.at_most("copied", [*terms, (waits, -1.0 / scale)], beside / scale)
    whole = sum(group.seconds for group in groups)
    answer = program.minimise(seconds_limit=_SECONDS_LIMIT, gap=_GAP_SHARE * whole)
    if not answer.feasible:
        return None
    again = frozenset(number for number, column in enumerate(repeated) if answer.values[column] > 0.5)
    offloaded = frozenset(number for number, column in copied.items() if answer.values[column] > 0.5)
    point = choice_of(groups, again)
    choice = with_copies(groups, point, offloaded - again, offloading, window)
    return choice if choice.bytes <= limit_bytes else None
