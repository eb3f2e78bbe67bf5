"""Of a choice, which values are worth most: seconds of computing again for each byte that is kept.

Part of the compiled core.
"""

from __future__ import annotations

from trainfit.compiling.graph_rows import GraphRows

MOST_TOGETHER = 8
"""How many values are let go of together at most."""


def worth_keeping(rows: GraphRows, repeated: list[int]) -> list[int]:
    """Return what runs again and could be kept, most seconds per byte first; `repeated` is in order."""
    reads, users, own_bytes = rows.reads, rows.users, rows.own_bytes
    again = [False] * rows.count
    for number in repeated:
        again[number] = True
    seconds = [0.0] * rows.count
    found: list[tuple[float, int]] = []
    for number in repeated:
        # What only this node needs would not run either.
        total = rows.seconds[number]
        for read in reads[number]:
            if not again[read]:
                continue
            alone = True
            for user in users[read]:
                if user != number and again[user]:
                    alone = False
                    break
            if alone:
                total += seconds[read]
        seconds[number] = total
        if rows.keepable[number] and rows.forward[number]:
            size = own_bytes[number]
            found.append((-total / (size if size > 0 else 1), number))
    found.sort()
    return [number for _, number in found]


def least_worth_keeping(
    rows: GraphRows, able: list[int], kept: list[int], repeated: list[int], per_byte: bool
) -> list[list[int]]:
    """Return some of what is kept, fewest seconds (per byte) first; what cannot be had again last.

    Each comes with others that cost less once what runs again for it does.
    """
    there = [False] * rows.count
    for number in kept:
        there[number] = True
    for number in repeated:
        there[number] = True
    is_able = [False] * rows.count
    for number in able:
        is_able[number] = True
    found: list[tuple[float, int, list[int]]] = []
    for place in range(len(able)):
        group, worth = _group_of(rows, able[place], there, is_able, per_byte)
        found.append((worth, place, group))
    found.sort()
    return [group for _, _, group in found]


def _group_of(
    rows: GraphRows, number: int, there: list[bool], is_able: list[bool], per_byte: bool
) -> tuple[list[int], float]:
    """Return a value with those that are worth less once what runs again for it does, and its worth."""
    met: list[int] = []
    group = [number]
    lost = _seconds_without(rows, there, number, met)
    size = max(rows.own_bytes[number], 1)
    met_before = [False] * rows.count
    pending = met.copy()
    while pending and len(group) < MOST_TOGETHER:
        for user in rows.users[pending.pop()]:
            if met_before[user] or not rows.forward[user]:
                continue
            met_before[user] = True
            if not is_able[user]:
                # What does not run again either, but would for a value behind it.
                if not there[user]:
                    pending.append(user)
                continue
            if user == number:
                continue
            before = len(met)
            more = _seconds_without(rows, there, user, met)
            if more == 0.0 or (per_byte and more * size < lost * rows.own_bytes[user]):
                group.append(user)
                lost += more
                size += rows.own_bytes[user]
                pending.extend(met[before:])
            else:
                _forget(there, met, before)
                there[user] = True
    _forget(there, met, 0)
    for other in group:
        there[other] = True
    return group, lost / (size if per_byte else 1)


def _forget(there: list[bool], met: list[int], first: int) -> None:
    while len(met) > first:
        there[met.pop()] = False


def _seconds_without(rows: GraphRows, there: list[bool], number: int, met: list[int]) -> float:
    """Return what would run again as well if a value were not kept; without end if that cannot be.

    Adds what that is to `met`, and marks it as being there.
    """
    total = 0.0
    there[number] = False
    pending = [number]
    while pending:
        here = pending.pop()
        if there[here] or not rows.forward[here]:
            continue
        if not rows.repeatable[here]:
            return float("inf")
        there[here] = True
        met.append(here)
        total += rows.seconds[here]
        pending.extend(rows.reads[here])
    return total
