"""`Decision`: what a plan can do with the results of an op, and what each of them means, in one table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What a decision means for the results of an op, from forward to backward."""

    restored: bool
    """Whether they are there in backward without running the op again."""
    runs_again: bool
    """Whether the op runs again in backward."""
    on_host: bool
    """Whether they are in the host's memory in between, and not in the device's."""


class Decision(StrEnum):
    """What happens to the results of one op of a region."""

    SAVE = "save"
    RECOMPUTE = "recompute"
    SKIP = "skip"
    OFFLOAD = "offload"

    @property
    def behaviour(self) -> Behaviour:
        """What it means."""
        return _BEHAVIOUR[self]


_BEHAVIOUR = {
    # Kept from forward to backward and not recomputed.
    Decision.SAVE: Behaviour(restored=True, runs_again=False, on_host=False),
    # Run again in backward, before its results are needed.
    Decision.RECOMPUTE: Behaviour(restored=False, runs_again=True, on_host=False),
    # Neither kept nor recomputed, because nothing in backward needs its results.
    Decision.SKIP: Behaviour(restored=False, runs_again=False, on_host=False),
    # Copied to the host's memory after the region's forward, and back before its backward.
    Decision.OFFLOAD: Behaviour(restored=True, runs_again=False, on_host=True),
}
