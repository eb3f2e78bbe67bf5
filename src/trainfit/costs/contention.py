"""What runs at once takes longer: collectives on one link, and computing beside a collective.

Collectives of different groups run at the same time, one of each group. If two of them want the same link,
the GPU's to its node or its part of the network, each gets a part of it: while both run, the work of one
delays the other. A collective's kernel also occupies multiprocessors, one for each channel, which computing
does not have meanwhile.

Both are worked out once, from the times that ops would have without it; that what is delayed meets others
later is left out.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]
Flags = NDArray[np.bool_]

_NEIGHBOURS = 64
"""So many of the collectives that begin before one are looked at: a queue runs one at a time."""


def link_delays(begin: Seconds, seconds: Seconds, queues: NDArray[np.int64], use: Seconds) -> Seconds:
    """Return by how much each collective is delayed by those of other queues, on one link.

    `use` is the share of the link that each takes while it runs alone. Two that take all of it share it: both
    are delayed by as long as they would overlap.
    """
    delays = np.zeros(len(begin))
    order = np.argsort(begin, kind="stable")
    begins, ends = begin[order], (begin + seconds)[order]
    uses, groups = use[order], queues[order]
    longest = np.maximum.accumulate(ends)
    for number in range(1, len(order)):
        first = max(0, number - _NEIGHBOURS)
        if longest[number - 1] <= begins[number]:
            continue
        earlier = slice(first, number)
        overlap = np.minimum(ends[earlier], ends[number]) - begins[number]
        excess = np.minimum(np.maximum(uses[earlier] + uses[number] - 1.0, 0.0), 1.0)
        lost = np.where(groups[earlier] != groups[number], np.maximum(overlap, 0.0) * excess, 0.0)
        delays[order[number]] += lost.sum()
        np.add.at(delays, order[earlier], lost)
    return delays


def computing_delays(
    begin: Seconds, seconds: Seconds, exchanges: Flags, computes: Flags, share: float, period: float = 0.0
) -> Seconds:
    """Return by how much computing is delayed by collectives beside it, which take a share of the device.

    With a `period`, the step is one of many: the collectives of the next one may begin in this one.
    """
    delays = np.zeros(len(begin))
    around = (-period, 0.0, period) if period else (0.0,)
    begins = np.concatenate([begin[exchanges] + moved for moved in around])
    covered = _covered(begins, begins + np.tile(seconds[exchanges], len(around)))
    if covered is None:
        return delays
    points, totals = covered
    before = np.interp(begin[computes], points, totals)
    after = np.interp((begin + seconds)[computes], points, totals)
    delays[computes] = (after - before) * share / (1.0 - share)
    return delays


def _covered(begins: Seconds, ends: Seconds) -> tuple[Seconds, Seconds] | None:
    """Return points in time, and for how long until then at least one of the intervals has run."""
    some = ends > begins
    begins, ends = begins[some], ends[some]
    if not len(begins):
        return None
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], np.maximum.accumulate(ends[order])
    opens = np.concatenate(([True], begins[1:] > ends[:-1]))
    starts = begins[opens]
    stops = ends[np.concatenate((np.flatnonzero(opens)[1:] - 1, [len(ends) - 1]))]
    points = np.stack((starts, stops), axis=1).reshape(-1)
    lengths = np.stack((np.zeros(len(starts)), stops - starts), axis=1).reshape(-1)
    return points, np.cumsum(lengths)
