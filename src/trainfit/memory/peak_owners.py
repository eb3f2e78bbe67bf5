"""Whose the bytes at the peak are: every storage that is alive there, by module and category.

What a module owns (parameters, buffers) is its own, and what it gathers from other ranks; a gradient is that
of the module whose backward makes it; everything else belongs to the module whose op made it. What was there
before the step and is no module's, such as the state of an optimizer and the inputs, is outside of modules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from trainfit.memory.module_stats import gradient_modules
from trainfit.traces.simulate import Timeline
from trainfit.traces.trace import Trace

OUTSIDE = -1
"""Instead of a module's number: what belongs to none."""


def peak_owners(timeline: Timeline) -> dict[tuple[int, str], int]:
    """Return the bytes at the peak by module, without those below it, and category; together the peak."""
    found: Counter[tuple[int, str]] = Counter()
    for part in peak_parts(timeline):
        found[part.module, part.category] += part.bytes
    return {key: size for key, size in found.items() if size}


@dataclass(frozen=True)
class PeakPart:
    """Bytes of the peak: a storage, or the workspace of the op that runs there."""

    module: int
    """Whose it is; `OUTSIDE` if nobody's."""
    category: str
    bytes: int
    producer: int
    """The op that made it; -1 if it was there before the step."""


def peak_parts(timeline: Timeline) -> Iterator[PeakPart]:
    """Yield all that is alive at the peak."""
    trace, peak = timeline.trace, timeline.peak_op
    owners = _owners(trace)
    for number, storage in enumerate(trace.storages):
        if storage.alive_at(peak):
            owner = owners.get(number, OUTSIDE)
            if owner == OUTSIDE and storage.producer >= 0:
                owner = trace.ops[storage.producer].module
            yield PeakPart(owner, storage.category, trace.occupied_at(number, peak), storage.producer)
    if peak >= 0 and timeline.workspace_bytes[peak]:
        yield PeakPart(trace.ops[peak].module, "temporary", int(timeline.workspace_bytes[peak]), peak)


def _owners(trace: Trace) -> dict[int, int]:
    """Return the module of each storage that belongs to one, whoever made it."""
    found = dict(gradient_modules(trace))
    for number, module in enumerate(trace.modules):
        found.update(dict.fromkeys((*module.gathered, *module.buffers, *module.parameters), number))
    return found
