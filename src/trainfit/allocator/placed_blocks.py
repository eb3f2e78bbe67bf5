"""A steady step in memory, as plain data: segments, blocks in them, requests with addresses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlacedRequest:
    """An allocation or a free."""

    op: int
    """Which op it is of; as many as there are ops: after the last one."""
    storage: int
    """-1: the workspace of the op's kernel; those after the trace's own are blocks of libraries."""
    address: int
    bytes: int
    """What was asked for; negative where it is freed."""
    stream: int = 0
    """Whose memory it is of; 0 is the compute queue."""


@dataclass(frozen=True, slots=True)
class PlacedBlock:
    """A part of a segment."""

    address: int
    size: int
    requested: int
    """What was asked for; 0 if it is free."""
    storage: int | None
    """None if it is free."""
    waits: bool = False
    """Whether it is freed, but other streams may still use it."""


@dataclass(frozen=True, slots=True)
class PlacedSegment:
    """Memory that the allocator has of the device in one piece: blocks without gaps."""

    address: int
    size: int
    small: bool
    expandable: bool
    blocks: tuple[PlacedBlock, ...]
    stream: int = 0

    @property
    def place(self) -> tuple[int, int]:
        """Where it is, and how large."""
        return self.address, self.size


@dataclass(frozen=True)
class PlacedStep:
    """A steady step in memory."""

    before: tuple[PlacedSegment, ...]
    """When the step begins."""
    requests: tuple[PlacedRequest, ...]
    grown: dict[int, tuple[PlacedSegment, ...]]
    """The segments after those requests, by number, that made the allocator take or give back memory."""
    after: tuple[PlacedSegment, ...]
    is_cached: bool
    """Whether torch's caching allocator has placed it."""
