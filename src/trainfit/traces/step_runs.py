"""Which run of a step a trace is of, what was seen of the others, and what memory they leave behind."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Growth:
    """Memory that a step leaves behind, more with every run: one kind of storage, and who holds it."""

    bytes_per_step: int
    category: str
    producer: str
    """The operator that made it."""
    module: str
    line: str
    """The line of the user's code that made it, `file.py:12`; empty where that is not known."""
    holder: str
    """Who still holds it: the `program`, or `autograd`, whose graph something in the program holds."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Which run of the step is the recorded one, and what was seen of the others.

    Runs are counted from 1, as a training loop counts them; memory is without workspaces.
    """

    recorded: int = 2
    """The run that the trace is of: the one with the largest peak of those that were looked at."""
    first: int = 2
    """The first run that counts: before it the step was warming up."""
    peaks: tuple[int, ...] = ()
    """The most bytes alive at once in each run, from the first run of all."""
    kinds: int = 1
    """How many different courses the runs that count took; 1 if all of them did the same."""
    changing: tuple[str, ...] = ()
    """What changes from run to run in Python and may decide what a run does, such as a counter."""
    complete: bool = True
    """Whether as many runs were looked at as should be: not cut short by time or by the end of the data."""
    all_stepped: bool = True
    """Whether every optimizer had stepped before the first run that counts."""
    grows: tuple[Growth, ...] = ()
    """What the runs leave behind, if memory still grew at the end."""

    @property
    def looked_at(self) -> int:
        """How many runs were looked at, those of the warm-up included."""
        return max(len(self.peaks), self.recorded)

    @property
    def runs_before(self) -> int:
        """How often the step runs before the run that is recorded, and measured."""
        return self.recorded - 1

    @property
    def differ(self) -> bool:
        """Whether runs differ from each other after the warm-up."""
        return self.kinds > 1

    @property
    def growth_bytes(self) -> int:
        """By how much memory grows from run to run."""
        return sum(growth.bytes_per_step for growth in self.grows)


USUAL_STEPS = Steps()
"""One run to warm up, and the second is recorded."""
