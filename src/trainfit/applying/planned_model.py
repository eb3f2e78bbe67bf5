"""What the regions of one model share: which step it is, and whether the user was told of a difference."""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainfit.plan_origin import device_kind, other_device, other_sizes
from trainfit.plans import Plan


@dataclass(frozen=True)
class Promise:
    """What a plan's figures are about, as far as a run of the model shows it."""

    device: str
    device_kind: str | None
    """What torch calls such a device; None if nobody knows."""
    batch: int | None
    first: tuple[str, int] | None
    """The module and the call of the first region, whose sizes show the batch: later ones may depend on what
    a router says. None if all sizes depend on data."""

    @classmethod
    def of(cls, plan: Plan) -> Promise:
        """Read a plan."""
        regions = () if plan.reserve_bytes else plan.regions[:1]
        first = next(((region.module, region.call) for region in regions), None)
        return cls(plan.device, device_kind(plan), plan.settings.batch, first)


class PlannedModel:
    """What the regions of one model share: when the count of calls begins anew, and what it warned of."""

    def __init__(self, promise: Promise | None = None) -> None:
        """Begin; without a promise nobody wants to know whether it is about this model."""
        self._lock = threading.Lock()
        self._promise = promise
        self._knows_device = promise is None
        self._knows_sizes = False
        self.epoch = 0
        self.roots_running = 0
        self.warned = False

    def __getstate__(self) -> dict[str, Any]:
        """Copies begin anew, and do not say again what was said of the original."""
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Undo `__getstate__`."""
        self.__init__()  # type: ignore[misc]

    def root_begins(self) -> None:
        """Count a call of the root; the first begins a step."""
        with self._lock:
            if self.roots_running == 0:
                self.epoch += 1
            self.roots_running += 1

    def root_ends(self) -> None:
        """Undo `root_begins`."""
        with self._lock:
            self.roots_running -= 1

    def backward_seen(self) -> None:
        """Backward has begun: the next forward is another step's, if no root says so itself."""
        with self._lock:
            if self.roots_running == 0:
                self.epoch += 1

    def warn(self, name: str, difference: str) -> None:
        """Say once that the model does something else than its plan has."""
        if not self.warned:
            self.warned = True
            warnings.warn(
                f"{name} does not do what its plan says: {difference}. What the plan does not cover is kept "
                "in memory; results are not affected. Capture the model as it is now and plan again.",
                stacklevel=2,
            )

    def region_begins(self, module: nn.Module) -> None:
        """Say, when the first region runs, that it runs on another kind of device than the plan is for.

        Not when the plan is applied: models are moved to their device before or after that.
        """
        if self._knows_device or self._promise is None:
            return
        weight: torch.Tensor | None = next(module.parameters(), None)
        if weight is None or weight.is_meta:
            return
        self._knows_device = True
        if self._promise.device_kind not in (None, weight.device.type):
            warnings.warn(other_device(self._promise.device, weight.device.type), stacklevel=2)

    def shows_batch(self, name: str, call: int) -> bool:
        """Whether the sizes of this region's tensors say if the batch is larger than the plan's.

        Only when it runs first: later passes of a step may have other sizes, and share their decisions.
        """
        if self._promise is None or self._knows_sizes or self._promise.first != (name, call):
            return False
        self._knows_sizes = True
        return True

    def warn_of_size(self, name: str, difference: str) -> None:
        """Say once that a region works on more than the plan was made for."""
        if self._promise is not None:
            warnings.warn(other_sizes(name, difference, self._promise.batch), stacklevel=2)
            self._promise = None  # a region has many tensors
