"""Which communication a step waits for, unit by unit, and behind what the rest of it hides.

A unit is a module that FSDP gathers and reduces as one; where nothing is sharded, a numbered layer. What the
compute queue waits for is found in its gaps: an op begins later than the one before it ended, because a
collective that it waits for, through other streams if need be, was not done. What runs beside computing is
hidden by the units whose kernels run meanwhile.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np

from trainfit.costs.op_times import OpTimes, op_times
from trainfit.costs.schedule import Schedule
from trainfit.traces.trace import COMPUTE, Trace

_GAP = 1e-9
_DEEPEST = 8
"""Through how many other queues a wait is followed back to a collective."""


@dataclass(frozen=True)
class UnitCommunication:
    """The collectives of one unit in a step."""

    unit: str
    """The module's name; `Global` for what belongs to none."""
    collectives: int
    bytes: int
    """What is exchanged: of each collective the larger of what the rank puts in and gets out."""
    seconds: float
    """How long they take, beside whatever they run."""
    exposed_seconds: float
    """How long computing waits for them, as far as the step is longer for it."""
    hidden_behind: str
    """The unit and the phase whose computing hides the most of them; empty if none does."""
    hidden_seconds: float
    """How much that one hides."""


def unit_communication(times: Schedule) -> tuple[UnitCommunication, ...]:
    """Return the communication of every unit, what is waited for longest first."""
    trace = times.trace
    exchanging = [n for n, op in enumerate(trace.ops) if _exchanges(trace, n)]
    if not exchanging:
        return ()
    units, placed = _units(trace), op_times(times)
    waits = _waits(times, placed)
    # Where the host is late anyway, the step would not be shorter by all that computing waits.
    share = min(1.0, times.exposed_communication_seconds / (sum(waits.values()) or 1.0))
    waits = {number: seconds * share for number, seconds in waits.items()}
    behind = _hidden(times, placed, exchanging, units)
    found: dict[str, list[int]] = defaultdict(list)
    for number in exchanging:
        found[_name(units, trace.ops[number].module)].append(number)
    rows = [_row(times, name, numbers, waits, behind[name]) for name, numbers in found.items()]
    return tuple(sorted(rows, key=lambda row: (-row.exposed_seconds, -row.seconds)))


def _row(
    times: Schedule, name: str, numbers: list[int], waits: dict[int, float], behind: Counter[str]
) -> UnitCommunication:
    best, hidden = behind.most_common(1)[0] if behind else ("", 0.0)
    collectives = [times.trace.signatures[times.trace.ops[n].signature].collective for n in numbers]
    return UnitCommunication(
        unit=name,
        collectives=len(numbers),
        bytes=sum(one.bytes for one in collectives if one is not None),
        seconds=float(times.device_seconds[numbers].sum()),
        exposed_seconds=sum(waits.get(number, 0.0) for number in numbers),
        hidden_behind=best,
        hidden_seconds=float(hidden),
    )


def _waits(times: Schedule, placed: OpTimes) -> dict[int, float]:
    """Return for how long the compute queue stands still for each collective."""
    trace, found = times.trace, defaultdict[int, float](float)
    if times.costs.host.runs_kernels:
        return {n: float(times.device_seconds[n]) for n in range(len(trace.ops)) if _exchanges(trace, n)}
    computing = [n for n, op in enumerate(trace.ops) if op.queue == COMPUTE]
    if not computing:
        return {}
    ends = (placed.end, float(times.step_seconds))
    # The last op of the step before stands in for the one before the first.
    done = float(placed.end[computing[-1]]) - ends[1]
    for number in computing:
        gap = float(placed.begin[number]) - done
        done = float(placed.end[number])
        if gap <= _GAP or not trace.ops[number].waits_for:
            continue
        # What the host is late with is not waited for on another queue.
        cause = _cause(times, placed, number)
        if cause is not None:
            found[cause] += min(gap, float(times.device_seconds[cause]))
    return found


def _cause(times: Schedule, placed: OpTimes, number: int) -> int | None:
    """Return the collective whose end decides when an op begins; None if it is something else."""
    trace, size = times.trace, len(times.trace.ops)
    step = times.step_seconds
    for _ in range(_DEEPEST):
        waits = trace.ops[number % size].waits_for
        if not waits:
            return None
        ends = {n: float(placed.end[n % size]) - (step if n < 0 else 0.0) for n in waits}
        number = max(ends, key=lambda n: ends[n])
        if _exchanges(trace, number % size):
            return number % size
    return None


def _hidden(
    times: Schedule, placed: OpTimes, exchanging: list[int], units: list[str]
) -> dict[str, Counter[str]]:
    """Return for each unit how long its collectives run beside the computing of which unit and phase."""
    trace, found = times.trace, defaultdict[str, Counter[str]](Counter)
    if times.costs.host.runs_kernels:
        return found
    computing = [n for n, op in enumerate(trace.ops) if op.queue == COMPUTE and not _exchanges(trace, n)]
    begins, ends = placed.begin[computing], placed.end[computing]
    labels = [f"{_name(units, trace.ops[n].module)} ({trace.ops[n].phase})" for n in computing]
    for number in exchanging:
        begin, end = float(placed.begin[number]), float(placed.end[number])
        first = int(np.searchsorted(ends, begin, side="right"))
        last = int(np.searchsorted(begins, end, side="left"))
        overlaps = np.minimum(ends[first:last], end) - np.maximum(begins[first:last], begin)
        counter = found[_name(units, trace.ops[number].module)]
        for label, overlap in zip(labels[first:last], overlaps.tolist()):
            if overlap > 0:
                counter[label] += overlap
    return found


def _units(trace: Trace) -> list[str]:
    """Return for each module the name of the unit that it is in: of FSDP, or a numbered layer."""
    sharded = any(module.unit for module in trace.modules)
    found: list[str] = []
    for module in trace.modules:
        is_unit = module.unit if sharded else module.name.rpartition(".")[2].isdecimal()
        inside = found[module.parent] if module.parent >= 0 else module.name
        found.append(module.name if is_unit else inside)
    return found


def _name(units: list[str], module: int) -> str:
    return units[module] if module >= 0 else "Global"


def _exchanges(trace: Trace, number: int) -> bool:
    collective = trace.signatures[trace.ops[number].signature].collective
    return collective is not None and collective.group_size > 1
