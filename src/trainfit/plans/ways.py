"""`Way`: what is done differently in a step so that it fits, and what that promises. Plain data.

A way is a combination of changes to the step, and a plan if that is needed, too. What `trainfit.apply` cannot
make is for the user to write: each change has the line of code that does it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainfit.basics.units import format_bytes
from trainfit.plans.plan import Plan

Exactness = Literal["bit-equal", "same in exact arithmetic", "different numerics"]
BIT_EQUAL: Exactness = "bit-equal"
SAME_ARITHMETIC: Exactness = "same in exact arithmetic"
OTHER_NUMERICS: Exactness = "different numerics"
EXACTNESS: tuple[Exactness, ...] = (BIT_EQUAL, SAME_ARITHMETIC, OTHER_NUMERICS)
"""What becomes of the results of a step, from the least change to the largest."""


@dataclass(frozen=True, slots=True)
class ChangeMade:
    """One thing that is done differently."""

    kind: str
    """What is changed: `optimizer`, `parameters`, `state`, `dtype`, `batch`, `loss`, `sharding`,
    `allocator`."""
    value: str
    """How, in a few words; unique within the kind."""
    code: str
    """The line of code that makes the change in the user's own program."""
    exactness: Exactness
    by_apply: bool = False
    """Whether `trainfit.apply` makes it."""

    @property
    def name(self) -> str:
        """As results write it."""
        return f"{self.kind}: {self.value}"


@dataclass(frozen=True)
class Way:
    """One way to run a step on a device. Bytes and seconds are predicted."""

    target: str
    device: str
    changes: tuple[ChangeMade, ...]
    plan: Plan | None
    """What is recomputed; None if nothing has to be."""
    peak_bytes: int
    memory_bytes: int
    """The least memory with which it runs."""
    step_seconds: float
    """For all samples of the step, in however many batches."""
    samples: int | None
    tokens: int | None

    @property
    def exactness(self) -> Exactness:
        """What becomes of the results; a plan changes nothing about them."""
        return max((change.exactness for change in self.changes), key=EXACTNESS.index, default=BIT_EQUAL)

    @property
    def count(self) -> int:
        """How many things are done differently, the plan among them."""
        return len(self.changes) + (self.plan is not None)

    @property
    def words(self) -> str:
        """What is done, in a line."""
        parts = [change.name for change in self.changes]
        if self.plan is not None:
            moved = self.plan.host_bytes
            on_host = f", {format_bytes(moved)} in the host's memory" if moved else ""
            count = len(self.plan.regions)
            parts.append(f"plan: {count} region{'s' * (count != 1)}{on_host}")
        return ", ".join(parts) or "as it is"

    @property
    def code(self) -> tuple[str, ...]:
        """The lines of code that do it; what `apply` does comes last, in one line."""
        own = [change.code for change in self.changes if not change.by_apply]
        applied = [change.code for change in self.changes if change.by_apply]
        if self.plan is not None:
            applied.append(APPLIED)
        return (*own, *((max(applied, key=len),) if applied else ()))

    @property
    def samples_per_second(self) -> float | None:
        """Throughput."""
        return self.samples / self.step_seconds if self.samples and self.step_seconds else None

    @property
    def tokens_per_second(self) -> float | None:
        """Throughput."""
        return self.tokens / self.step_seconds if self.tokens and self.step_seconds else None


APPLIED = 'trainfit.apply(model, trainfit.load_way("way.json"))'
APPLIED_WITH_OPTIMIZER = 'trainfit.apply(model, trainfit.load_way("way.json"), optimizer=optimizer)'
"""The lines that carry a way out."""
