"""How much of this machine's processors other work takes while something is measured here.

The system counts the seconds that its processors were busy, and those that this process and its children ran.
What is left was other work: times that were taken meanwhile are too long.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

BUSY = 0.1
"""With more than this share of the processors taken by others, what is measured is not trusted for long."""
_LEAST_SECONDS = 0.3
"""Times are counted in hundredths of a second: a shorter look says little."""
_PROC = Path("/proc")
_IDLE = (3, 4)
"""Where /proc/stat has the time in which a processor had nothing to do, or waited for a disk."""
_WITHOUT_GUESTS = 8
"""The columns after these are part of the first two."""


@dataclass(frozen=True)
class ProcessorTimes:
    """Seconds since the machine was started, summed over its processors; own ones since the process was."""

    total: float
    busy: float
    own: float
    """Of this process and its children."""


Reader = Callable[[], ProcessorTimes | None]


def processor_times() -> ProcessorTimes | None:
    """Read the system's counters; None where it has none."""
    try:
        first = (_PROC / "stat").read_text(encoding="ascii").splitlines()[0].split()
        ticks = [int(column) for column in first[1 : 1 + _WITHOUT_GUESTS]]
        idle = sum(ticks[column] for column in _IDLE)
    except (OSError, ValueError, IndexError):
        return None
    per_second = os.sysconf("SC_CLK_TCK")
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    return ProcessorTimes(
        sum(ticks) / per_second, (sum(ticks) - idle) / per_second, own + _descendants_ticks() / per_second
    )


def _descendants_ticks() -> int:
    """Return what children have run that are still there: workers of a data loader, or of a compiler."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            try:
                # The name in brackets may contain anything.
                columns = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                ticks[int(entry.name)] = sum(map(int, columns[11:15]))
                children.setdefault(int(columns[1]), []).append(int(entry.name))
            except (OSError, ValueError, IndexError):
                continue  # It has ended meanwhile.
    found, pending = 0, list(children.get(os.getpid(), ()))
    while pending:
        child = pending.pop()
        found += ticks[child]
        pending += children.get(child, ())
    return found


class Watch:
    """What `LoadMeter.watching` has seen when its block is done."""

    share: float | None = None
    """Of all processors, what other work took; None if the system does not say."""


class LoadMeter:
    """Looks at the load of others, while something is measured and before."""

    def __init__(self, read: Reader = processor_times, sleep: Callable[[float], None] = time.sleep) -> None:
        """Take the counters from `read`; tests have machines of their own."""
        self._read = read
        self._sleep = sleep
        self._is_quiet: bool | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[Watch]:
        """Say afterwards how much other work there was in the block; a short one is looked at longer."""
        watch, before, begin = Watch(), self._read(), time.perf_counter()
        yield watch
        missing = _LEAST_SECONDS - (time.perf_counter() - begin)
        if before is None:
            return
        if missing > 0:
            self._sleep(missing)
        watch.share = _others(before, self._read())

    def is_quiet(self) -> bool:
        """Whether other work leaves the machine alone now; looked at once, for a moment."""
        if self._is_quiet is None:
            with self.watching() as watch:
                pass
            self._is_quiet = watch.share is not None and watch.share <= BUSY
        return self._is_quiet

    def should_repeat(self, share: float | None) -> bool:
        """Whether to measure again what was measured under this load: it was busy then, and is quiet now."""
        return is_busy(share) and self.is_quiet()


def _others(before: ProcessorTimes, after: ProcessorTimes | None) -> float | None:
    if after is None or after.total <= before.total:
        return None
    others = (after.busy - before.busy) - (after.own - before.own)
    return min(max(others / (after.total - before.total), 0.0), 1.0)


def is_busy(share: float | None) -> bool:
    """Whether other work took so much that what was measured meanwhile is doubtful."""
    return share is not None and share > BUSY


def busiest(shares: Iterable[float | None]) -> float | None:
    """Return the largest share that is known."""
    return max((share for share in shares if share is not None), default=None)


def busy_warning(share: float | None, what: str, advice: str) -> tuple[str, ...]:
    """Warn if the machine was busy while `what`; nothing if it was not."""
    if share is None or not is_busy(share):
        return ()
    return (f"other work took {share:.0%} of this machine's processors while {what}: {advice}",)
