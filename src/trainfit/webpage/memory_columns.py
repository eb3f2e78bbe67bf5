"""Memory over the step as columns: bytes by category at every op, and what each op is.

Bytes are written where they change. A second curve says which of its ops are which of the first one's.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np

from trainfit.costs.schedule import Schedule
from trainfit.traces.simulate import Timeline
from trainfit.traces.trace import CATEGORIES, Trace
from trainfit.webpage.page_parts import Part, Strings, gaps

NANO = 1e9


def memory_part(curves: list[dict[str, Any]], lines: list[dict[str, Any]]) -> Part:
    """Return the memory picture: one or two curves of a step, and lines such as the device's memory."""
    return {"kind": "memory", "curves": curves, "lines": lines}


def line(label: str, size: int, style: str) -> dict[str, Any]:
    """Return a horizontal line; `style` is `device`, `budget` or `measured`."""
    return {"label": label, "bytes": size, "style": style}


def curve(
    label: str, timeline: Timeline, strings: Strings, schedule: Schedule | None = None
) -> dict[str, Any]:
    """Return bytes and ops of one step; with a schedule, when each op is done."""
    trace = timeline.trace
    ops = trace.ops
    names = [strings.number(signature.name) for signature in trace.signatures]
    modules = [strings.number(module.name) for module in trace.modules] + [strings.number("")]
    found: dict[str, Any] = {
        "label": label,
        "ops": len(ops),
        "names": [names[op.signature] for op in ops],
        "modules": [modules[op.module] for op in ops],
        "phases": _runs([op.phase for op in ops]),
        "recomputed": [[at, length] for value, at, length in _runs([op.recompute for op in ops]) if value],
        "categories": _categories(timeline),
        "before": timeline.persistent_bytes,
        "peak": timeline.peak_op,
        "peak_bytes": timeline.peak_bytes,
    }
    if schedule is not None:
        ends = np.round(np.cumsum(schedule.op_seconds) * NANO).astype(np.int64)
        found["nanoseconds"] = gaps(ends.tolist())
    return found


def _categories(timeline: Timeline) -> list[dict[str, Any]]:
    """Return where the bytes of each category change, and by how much; workspaces are temporary."""
    found = []
    for number, name in enumerate(CATEGORIES):
        values = timeline.by_category[number]
        if name == "temporary":
            values = values + timeline.workspace_bytes
        changes = np.diff(values, prepend=0)
        at = np.flatnonzero(changes)
        if len(at):
            found.append({"name": name, "at": gaps(at.tolist()), "by": changes[at].tolist()})
    return found


def _runs(values: list[Any]) -> list[list[Any]]:
    """Return (value, first, length) of every stretch of equal values."""
    found, at = [], 0
    for value, members in groupby(values):
        length = sum(1 for _ in members)
        found.append([value, at, length])
        at += length
    return found


def aligned(planned: Trace, plain: Trace) -> list[list[int]] | None:
    """Return which ops of a planned step are which of the step as it is: (planned op, op, how many).

    A plan only adds ops, which recompute. None if the two are not such a pair.
    """
    runs: list[list[int]] = []
    other = 0
    for number, op in enumerate(planned.ops):
        at_end = other == len(plain.ops)
        if at_end or (op.recompute and not plain.ops[other].recompute):
            if not op.recompute:
                return None
            continue
        if op.signature != plain.ops[other].signature:
            return None
        if runs and runs[-1][0] + runs[-1][2] == number:
            runs[-1][2] += 1
        else:
            runs.append([number, other, 1])
        other += 1
    return runs if other == len(plain.ops) else None
