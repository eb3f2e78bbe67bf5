"""What is known of a step before it is changed: its trace, and which options its target takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from trainfit.devices.device_table import Device
from trainfit.targets.target import Kind
from trainfit.traces.ranks import Cluster
from trainfit.traces.settings import Settings
from trainfit.traces.trace import Trace


@dataclass(frozen=True)
class UnchangedStep:
    """A captured step and where it comes from."""

    trace: Trace
    device: Device
    target_kind: Kind
    takes: Callable[[dict[str, object]], bool]
    """Whether the target can be built with such options beside those that it was given."""
    cluster: Cluster | None = None
    """The devices that it may be divided among, if there are several."""

    @property
    def settings(self) -> Settings:
        """What the step says about itself."""
        return self.trace.settings

    @property
    def is_recipe(self) -> bool:
        """Whether the step is our own around a model, and takes a dtype as `--dtype` does."""
        return self.target_kind in ("built-in", "hf")

    @cached_property
    def optimizers(self) -> tuple[str, ...]:
        """The classes of its optimizers."""
        return tuple(name for name in (self.settings.optimizer_class or "").split("+") if name)

    @cached_property
    def passes(self) -> int:
        """How many times backward begins in a step: more than once where gradients are accumulated."""
        phases = [op.phase for op in self.trace.ops if not op.recompute]
        return sum(now == "backward" != before for before, now in zip(("", *phases), phases))

    @cached_property
    def rewrites_gradients(self) -> bool:
        """Whether gradients are written to after backward, as clipping and scaling do."""
        gradients = {n for n, storage in enumerate(self.trace.storages) if storage.category == "gradient"}
        return any(op.phase == "optimizer" and gradients.intersection(op.writes) for op in self.trace.ops)
