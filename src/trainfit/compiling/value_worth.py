"""Of a choice, which values are worth most: seconds of computing again for each byte that is kept.

Part of the compiled core.
"""

from __future__ import annotations

from trainfit.compiling.graph_rows import GraphRows


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

    Each comes with the other results of what would run again for it, which can be let go of for nothing.
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
    met: list[int] = []
    for place in range(len(able)):
        number = able[place]
        met.clear()
        lost = _seconds_without(rows, there, number, met)
        size = rows.own_bytes[number]
        group = [number]
        for other in met:
            for user in rows.users[other]:
                if is_able[user] and user != number and rows.picks[user]:
                    size += rows.own_bytes[user]
                    group.append(user)
        found.append((lost / (size if size > 0 and per_byte else 1), place, group))
    found.sort()
    return [group for _, _, group in found]


def _seconds_without(rows: GraphRows, there: list[bool], number: int, met: list[int]) -> float:
    """Return what would run again as well if a value were not kept; without end if that cannot be.

    Adds what that is to `met`.
    """
    total = 0.0
    pending = [number]
    there[number] = False
    while pending:
        here = pending.pop()
        if there[here] or not rows.forward[here]:
            continue
        if not rows.repeatable[here]:
            total = float("inf")
            break
        there[here] = True
        met.append(here)
        total += rows.seconds[here]
        pending.extend(rows.reads[here])
    for other in met:
        there[other] = False
    there[number] = True
    return total
