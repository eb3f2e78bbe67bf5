"""What a compiler that fuses makes of nodes in an order: which are computed inside of others, and the memory.

Part of the compiled core; the rules are those of `partition_memory.py`.
"""

from __future__ import annotations

from trainfit.compiling.graph_rows import NEVER, NOTHING, POINTWISE, VIEW, GraphRows

MOST_FUSED_READS = 4
"""A pointwise result that several kernels read and that reads more tensors is written to memory."""


class FusedRun:
    """Which nodes of a graph are computed inside of others, and where what is read inside is read last."""

    def __init__(self, count: int) -> None:
        """Begin with none."""
        self.any = False
        self.fused = [False] * count
        self.last = [-1] * count
        """For each node that is read inside of kernels, and each view of one, the last of their places."""


def kept_last(rows: GraphRows, running: list[int], kept: list[int]) -> list[int]:
    """Return forward with fused results that are only kept behind the others, up to the next own kernel.

    A compiler writes them when nothing else reads what they are computed from.
    """
    users, kinds = rows.users, rows.kinds
    runs = [False] * rows.count
    for number in running:
        runs[number] = True
    is_kept = [False] * rows.count
    for number in kept:
        is_kept[number] = True
    found: list[int] = []
    waiting: list[int] = []
    for number in running:
        if kinds[number] == NOTHING:
            found.extend(waiting)
            waiting = []
        alone = is_kept[number] and kinds[number] == POINTWISE
        if alone:
            for user in users[number]:
                if runs[user]:
                    alone = False
        if alone:
            waiting.append(number)
        else:
            found.append(number)
    found.extend(waiting)
    return found


def fused_run(rows: GraphRows, order: list[int], stays: list[bool]) -> FusedRun:
    """Find the pointwise nodes that are computed inside of the kernels that read them."""
    users, kinds = rows.users, rows.kinds
    found = FusedRun(rows.count)
    fused, last = found.fused, found.last
    place = [-1] * rows.count
    kernels = [0] * (len(order) + 1)
    """How many kernels of their own run before a place."""
    for at in range(len(order)):
        place[order[at]] = at
        kernels[at + 1] = kernels[at] + (1 if kinds[order[at]] == NOTHING else 0)
    first = [-1] * rows.count
    """For each node that may be read inside of kernels: the first place of such kernels."""
    for number in reversed(order):
        if kinds[number] not in (POINTWISE, VIEW) or stays[number]:
            continue
        begin, end = NEVER, -1
        for user in users[number]:
            at = place[user]
            if at < 0:
                continue
            if kinds[user] == NOTHING:
                end = -1
                break
            if fused[user] or kinds[user] == VIEW:
                if first[user] < 0:
                    end = -1
                    break
                begin, end = min(begin, first[user]), max(end, last[user])
            else:
                begin, end = min(begin, at), max(end, at)
        if end < 0 or kernels[begin] != kernels[end]:
            continue
        if kinds[number] == POINTWISE:
            if begin != end and len(rows.reads[number]) > MOST_FUSED_READS:
                continue
            fused[number] = found.any = True
        first[number], last[number] = begin, end
    return found


def fused_peak(
    rows: GraphRows,
    order: list[int],
    run: FusedRun,
    there: list[bool],
    staying: list[bool],
    begin: int,
) -> int:
    """Return the most bytes alive where some nodes are computed inside of others.

    `begin` bytes are `there` before, and `staying` never go.
    """
    sizes, steps = rows.sizes, len(order)
    if not steps:
        return begin
    last = [-1] * len(sizes)
    born = [False] * len(sizes)
    change = [0] * (steps + 1)
    inside = [0] * steps
    fresh: dict[int, dict[int, int]] = {}
    """For each step the sizes of what is made there, and how often, where it can be written over others."""
    for at in range(steps):
        number = order[at]
        # What a fused node reads is read where it is computed.
        read_at = run.last[number] if run.last[number] >= 0 else at
        for storage in rows.touches[number]:
            if read_at > last[storage]:
                last[storage] = read_at
        inside[at] = rows.workspaces[number]
        if run.fused[number]:
            continue
        for storage in rows.makes[number]:
            if there[storage]:
                inside[at] += sizes[storage]
                continue
            born[storage] = True
            change[at] += sizes[storage]
            if run.any and rows.kinds[number] != NOTHING:
                counts = fresh.setdefault(at, {})
                counts[sizes[storage]] = counts.get(sizes[storage], 0) + 1
    for storage in range(len(sizes)):
        at = last[storage]
        if at < 0 or staying[storage] or not (there[storage] or born[storage]):
            continue
        size = sizes[storage]
        change[at + 1] -= size
        # A fused kernel puts its result where another value of the same size was that it is the last to
        # read.
        if at in fresh and fresh[at].get(size, 0) > 0:
            fresh[at][size] -= 1
            inside[at] -= size
    memory, most = begin, begin
    for at in range(steps):
        memory += change[at]
        most = max(most, memory + inside[at])
    return most
