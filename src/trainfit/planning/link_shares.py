"""What options take of the link to the host, while they copy: together no more than there is.

Copies of a region run in a window: while the call after it computes, and back while that call's backward
runs. An option whose copies take half of its window takes half of the link for as long; several may share
it where that adds up to no more than the whole. Copies run one after the other, not side by side: whether
they are done in time is what the replay says. What takes longer than its window has all of the link.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainfit.planning.effects import Effect
from trainfit.traces.trace import Trace

Span = tuple[int, int, float]
"""From which op on, until before which, and what share of the link."""


def link_rows(trace: Trace, effects: Sequence[Sequence[Effect]]) -> list[dict[int, float]]:
    """Return for each moment at which a window begins: which options copy then, and their shares."""
    found: dict[tuple[tuple[int, float], ...], None] = {}
    for spans in zip(*(_spans(trace, own) for own in effects)):
        copying = {number: own for number, own in enumerate(spans) if own}
        for begin in sorted({start for own in copying.values() for start, _, _ in own}):
            shares = {
                number: share
                for number, own in copying.items()
                for start, end, share in own
                if start <= begin < end
            }
            found[tuple(shares.items())] = None
    return [dict(row) for row in found if len(row) > 1]


def _spans(trace: Trace, effects: Sequence[Effect]) -> tuple[list[Span], list[Span]]:
    """Return when the copies of an option run, out and back, for each pass over the model."""
    out: list[Span] = []
    back: list[Span] = []
    for effect in effects:
        host = effect.host
        if host is None or not host.window.overlaps:
            continue
        copying = sum(host.link.seconds(trace.storages[number].bytes) for number in host.storages)
        window = host.window
        out.append((effect.region.end, window.freed, _share(copying, window.out_seconds)))
        back.append((window.fetched, effect.insert, _share(copying, window.back_seconds)))
    return out, back


def _share(copying: float, seconds: float) -> float:
    return min(copying / seconds, 1.0) if seconds else 1.0
