"""`Sharding`: which modules are units of FSDP, which stay whole after forward, what is gathered ahead.

With a plan for what is checkpointed, it says all that a cluster decides about one model. On disk it is JSON
with a schema number and a content hash, as plans are.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from trainfit.basics.decoding import Malformed, decode
from trainfit.basics.sealed_files import FileKind, canonical, write_whole
from trainfit.basics.units import format_bytes, format_seconds
from trainfit.errors import FileFormatError
from trainfit.plans.plan import Plan
from trainfit.plans.plan_store import check_plan, pretty
from trainfit.traces.ranks import Cluster

FILE = FileKind("sharding", schema=1, remedy="make it again with trainfit shard")
MOST_PREFETCH = 16


@dataclass(frozen=True)
class Sharding:
    """How FSDP2 is set for a model, what of it is recomputed, and what both promise together."""

    target: str
    device: str
    units: tuple[str, ...]
    """Modules that are units, by name, in the order in which forward comes to them. The model itself is one,
    too, and has what is in none of them."""
    kept: tuple[str, ...]
    """Those of them whose parameters stay whole between forward and backward: reshard_after_forward=False."""
    prefetch: int
    """How many units are gathered ahead of the one that computes; 1 is what FSDP2 does by itself."""
    budget_bytes: int
    peak_bytes: int
    memory_bytes: int
    step_seconds: float
    cluster: Cluster | None = None
    plan: Plan | None = None
    """What is checkpointed besides; None if nothing has to be."""

    def __repr__(self) -> str:
        """One line."""
        return (
            f"<Sharding of {self.target} on {self.device}: {len(self.units)} units, {len(self.kept)} kept "
            f"after forward, prefetch {self.prefetch}, runs in {format_bytes(self.memory_bytes)}, "
            f"{format_seconds(self.step_seconds)} per step>"
        )

    def check(self) -> None:
        """Raise `Malformed` where the parts do not fit together."""
        if len(set(self.units)) < len(self.units):
            raise Malformed("a unit is there twice", "units")
        other = next((name for name in self.kept if name not in self.units), None)
        if other is not None or len(set(self.kept)) < len(self.kept):
            raise Malformed("what is kept is a list of units, each once", "kept")
        if not 1 <= self.prefetch <= MOST_PREFETCH:
            raise Malformed(f"expected a number from 1 to {MOST_PREFETCH}", "prefetch")
        if self.plan is not None:
            check_plan(self.plan)


def save_sharding(sharding: Sharding, path: str | Path) -> None:
    """Write it with its plan, whole or not at all."""
    content = dataclasses.asdict(sharding)
    head = FILE.head(canonical(content))
    write_whole(Path(path), (pretty({**head, "sharding": content}) + "\n").encode())


def load_sharding(path: str | Path) -> Sharding:
    """Read what `save_sharding` wrote; anything else is one clear error."""
    content, _ = FILE.read_any(Path(path))
    try:
        found = decode(Sharding, content)
        found.check()
    except Malformed as error:
        raise FileFormatError(f"{path} is not a valid sharding: {error}.") from None
    return found
