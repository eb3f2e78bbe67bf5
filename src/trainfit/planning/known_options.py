"""Options that are used again for steps which differ in nothing but what comes after backward.

Regions, their curves and what each point changes are about forward and backward. A step with another
optimizer that computes both as before, op by op and storage by storage, has the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from trainfit.costs.schedule import Schedule
from trainfit.planning.host_copies import HostLink
from trainfit.planning.master import Option
from trainfit.planning.options import options_of
from trainfit.traces.trace import Trace

Options = tuple[list[Option], list[list[int]]]
_MOST_KNOWN = 4
"""How many steps are remembered, the last ones: each has its trace, and all curves."""


@dataclass
class KnownOptions:
    """The options of the steps that were planned, for those that are planned next."""

    known: list[tuple[Schedule, HostLink | None, Options]] = field(default_factory=list)

    def options(self, step: Schedule, peak_bytes: int, link: HostLink | None) -> Options:
        """Return the options of a step: those of one before that is like it, or its own."""
        for other, its_link, options in self.known:
            if its_link == link and _are_alike(step, other):
                return options
        options = options_of(step, peak_bytes, link=link)
        self.known = [*self.known[1 - _MOST_KNOWN :], (step, link, options)]
        return options


def _are_alike(step: Schedule, other: Schedule) -> bool:
    """Whether everything that options depend on is the same: what happens until backward ends."""
    one, two = step.trace, other.trace
    end = _end_of_backward(one)
    return (
        end == _end_of_backward(two)
        and step.costs.host == other.costs.host
        and one.device == two.device
        and one.ops[:end] == two.ops[:end]
        and one.calls == two.calls
        and one.modules == two.modules
        and _called(one, end) == _called(two, end)
        and np.array_equal(step.marginal_seconds[:end], other.marginal_seconds[:end])
        and np.array_equal(step.occupied_seconds[:end], other.occupied_seconds[:end])
        and _are_planned_alike(one, two, end)
    )


def _end_of_backward(trace: Trace) -> int:
    return next((number for number, op in enumerate(trace.ops) if op.phase == "optimizer"), len(trace.ops))


def _called(trace: Trace, end: int) -> list[object]:
    return [trace.signatures[number] for number in sorted({op.signature for op in trace.ops[:end]})]


def _are_planned_alike(one: Trace, two: Trace, end: int) -> bool:
    """Whether the storages that forward uses are the same, and none is saved beyond backward."""
    used = {
        storage
        for op in one.ops[:end]
        if op.phase == "forward"
        for storage in (*op.reads, *op.writes, *op.creates)
    }
    return all(
        one.storages[number] == two.storages[number]
        and all(hold.end is not None and hold.end <= end for hold in one.storages[number].held_by("autograd"))
        for number in used
    )
