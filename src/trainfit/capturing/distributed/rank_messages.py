"""What ranks say to each other, found out by running the step as each of them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from trainfit.errors import CaptureError

_MOST_QUESTIONS = 100


class NeedsRank(BaseException):
    """What another rank would say has to be found out first. No code of the step may catch it."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank


class RankHasSpoken(BaseException):
    """A rank that was run only for what it says has said it."""


class Messages:
    """What ranks said, by the rank that says it, the rank that hears it, and which message it is."""

    def __init__(self) -> None:
        """Begin with nothing said."""
        self._questions = self._counted = 0
        self._said: dict[tuple[int, int, Hashable], Any] = {}

    def ask(self, rank: int) -> None:
        """Count that a rank is run for what it says."""
        self._questions += 1
        if self._questions > _MOST_QUESTIONS:
            raise CaptureError(
                f"the step receives Python objects from rank {rank}, and from others, again and again, and "
                "each time that rank has to be run for them: let each process make them itself."
            )

    def asked_meanwhile(self) -> bool:
        """Whether a rank was asked since this was called last."""
        before, self._counted = self._counted, self._questions
        return self._questions > before

    def say(self, rank: int, to: int, which: Hashable, message: Any) -> bool:
        """Keep a message; return whether it is new."""
        is_new = (rank, to, which) not in self._said
        self._said[rank, to, which] = message
        return is_new

    def hear(self, rank: int, by: int, which: Hashable) -> Any:
        """Return what a rank said to another; `NeedsRank` if that is not known yet."""
        if (rank, by, which) not in self._said:
            raise NeedsRank(rank)
        return self._said[rank, by, which]
