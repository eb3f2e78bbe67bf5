"""What ranks say to each other, found out by running the step as each of them."""

from __future__ import annotations

from typing import Any


class NeedsRank(BaseException):
    """What another rank would say has to be found out first. No code of the step may catch it."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank


class RankHasSpoken(BaseException):
    """A rank that was run only for what it says has said it."""


class Messages:
    """What stages of a pipeline said, by the rank that says it and the rank that hears it."""

    def __init__(self) -> None:
        """Begin with nothing said."""
        self._said: dict[tuple[int, int], Any] = {}

    def say(self, rank: int, to: int, message: Any) -> None:
        """Keep a message."""
        self._said[rank, to] = message

    def hear(self, rank: int, by: int) -> Any:
        """Return what a rank said to another; `NeedsRank` if that is not known yet."""
        if (rank, by) not in self._said:
            raise NeedsRank(rank)
        return self._said[rank, by]
