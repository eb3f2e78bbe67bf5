"""Edits: the changes to a trace that a region with its decisions makes, one by one. Plain data.

A region's `Effect` is a tuple of them. The replay writes the trace that results from them (`rewrite.py`,
`planned_columns.py`), the master problem counts the bytes that they change (`byte_changes.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

SEGMENT_END = 1 << 60
"""A position after every op of the segment; elsewhere, after what is inserted there."""


@dataclass(frozen=True, slots=True, order=True)
class Moment:
    """Before the op at `time` of the original trace, or, at the insertion, a position in the segment.

    The segment comes before the op at its insertion, and after whatever is freed there.
    """

    time: int
    position: int = -1
    """-1: outside of the segment."""


class InsertedPart(IntEnum):
    """What is inserted, in the order in which it comes at one place."""

    COPY_OUT = 0
    COPY_BACK = 1
    SEGMENT = 2


@dataclass(frozen=True, slots=True)
class HoldUntil:
    """A storage is held until some moment: an input of the region, or what it keeps."""

    storage: int
    until: Moment


@dataclass(frozen=True, slots=True)
class FreeAt:
    """A storage is freed at another moment than before, if this is the only region; None: after the step."""

    storage: int
    at: Moment | None


@dataclass(frozen=True, slots=True)
class MakeAgain:
    """A storage is made a second time, by an op that is inserted, and freed at some moment."""

    storage: int
    at: Moment
    until: Moment


@dataclass(frozen=True, slots=True)
class HoldBytes:
    """The executor itself holds so many bytes for a while."""

    bytes: int
    since: Moment
    until: Moment


@dataclass(frozen=True, slots=True)
class InsertOps:
    """Ops run, on a queue, before an op of the original trace."""

    at: int
    part: InsertedPart
    queue: str
    rows: tuple[int, ...]
    """Of a segment: ops of the original forward that run again, in order, and those that move, which come
    later in the original. Of copies: the storages."""


@dataclass(frozen=True)
class Move:
    """What is in the segment instead of at its place in backward, by positions in the segment."""

    ops: dict[int, int] = field(default_factory=dict)
    starts: dict[int, int] = field(default_factory=dict)
    """Storages that are made there."""
    ends: dict[int, int] = field(default_factory=dict)
    """Storages that are freed there."""
    filled: dict[tuple[int, int], int] = field(default_factory=dict)
    """Storages that get memory there, with the time at which they would have got it."""


NO_MOVE = Move()

Edit = HoldUntil | FreeAt | MakeAgain | HoldBytes | InsertOps | Move
