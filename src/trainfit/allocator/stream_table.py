"""The order in which the allocator looks at streams: that of its hash table.

Blocks that other streams used become free stream by stream. Which comes first shows in peaks, and in the ages
of blocks where those count, so the table is followed: Robin Hood hashing with a Fibonacci hash, at most half
full.
"""

from __future__ import annotations

_FIBONACCI = 11400714819323198485
_CUDA_DEVICE = 1 << 56
_MASK = (1 << 64) - 1
_HANDLE_BITS = 8  # a stream's number is this far up in its handle


class StreamTable:
    """A set of streams whose order is that of torch's table after the same insertions and removals."""

    def __init__(self) -> None:
        """Start without slots, as torch does: the first insertion makes four."""
        self.count = 0
        self._slots = 0
        self._lookups = 0  # how far a stream may be from where it belongs
        self._streams: list[int] = []  # -1: empty
        self._distances: list[int] = []

    def in_order(self) -> list[int]:
        """Return the streams as an iteration over the table finds them."""
        return [stream for stream in self._streams if stream >= 0]

    def at_or_after(self, position: int) -> int:
        """Return the first position that is not empty, or -1."""
        for place in range(position, len(self._streams)):
            if self._streams[place] >= 0:
                return place
        return -1

    def stream_at(self, position: int) -> int:
        """Return the stream at a position that is not empty."""
        return self._streams[position]

    def add(self, stream: int) -> None:
        """Insert a stream, unless it is there."""
        if stream in self._streams:
            return
        if self.count + 1 > self._slots * 0.5:
            self._grow()
        place = self._wanted(stream)
        distance = 0
        while self._distances[place] >= distance:
            place += 1
            distance += 1
        if distance == self._lookups:
            self._grow()
            self.add(stream)
        else:
            self._put(place, stream, distance)

    def _put(self, place: int, stream: int, distance: int) -> None:
        """Put a stream there; one that was there moves on, if it is nearer to where it belongs."""
        first = place
        moving = stream
        while self._streams[place] >= 0:
            if self._distances[place] < distance:
                moving, self._streams[place] = self._streams[place], moving
                distance, self._distances[place] = self._distances[place], distance
                distance += 1
            else:
                distance += 1
                if distance == self._lookups:
                    self._streams[first] = moving
                    self._grow()
                    self.add(stream)
                    return
            place += 1
        self._streams[place] = moving
        self._distances[place] = distance
        self.count += 1

    def remove_at(self, position: int) -> None:
        """Take a stream out; those after it that are not where they belong move up."""
        self.count -= 1
        place = position
        while self._distances[place + 1] > 0:
            self._streams[place] = self._streams[place + 1]
            self._distances[place] = self._distances[place + 1] - 1
            place += 1
        self._streams[place] = self._distances[place] = -1

    def _wanted(self, stream: int) -> int:
        hashed = (_FIBONACCI * (_CUDA_DEVICE | stream << _HANDLE_BITS)) & _MASK
        return hashed >> (64 - (self._slots.bit_length() - 1))

    def _grow(self) -> None:
        streams = self.in_order()
        self._slots = max(4, 2 * self._slots)
        self._lookups = max(4, self._slots.bit_length() - 1)
        self._streams = [-1] * (self._slots + self._lookups)  # the last is never filled
        self._distances = list(self._streams)
        self.count = 0
        for stream in streams:
            self.add(stream)
