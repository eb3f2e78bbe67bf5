"""What the regions of one model share: which call of its module each is, and what the user was told."""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainfit.applying.offloaded_results import HostMemory
from trainfit.applying.sharding_check import other_sharding
from trainfit.applying.torch_changes import noticed_reads
from trainfit.plans.plan import ModulePart, Plan
from trainfit.plans.plan_origin import device_kind, other_device, other_sizes
from trainfit.traces.ranks import Cluster


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
    cluster: Cluster | None = None
    parts: tuple[ModulePart, ...] = ()
    """What the rank has of each module."""

    @classmethod
    def of(cls, plan: Plan) -> Promise:
        """Read a plan."""
        regions = () if plan.reserve_bytes else plan.regions[:1]
        first = next(((region.module, region.call) for region in regions), None)
        batch = plan.settings.batch
        return cls(plan.device, device_kind(plan), batch, first, plan.cluster, plan.parts)


class PlannedModel:
    """Counts the calls of a model's modules in each step, and warns once where it is not what was planned."""

    def __init__(self, promise: Promise | None = None, root: nn.Module | None = None, name: str = "") -> None:
        """Begin a step; without a promise there is nothing to compare a run of the root with."""
        self._lock = threading.Lock()
        self._promise = promise
        # Weak: the root has this object in an attribute.
        self._root = None if root is None else weakref.ref(root)
        self._root_name = name
        self._knows_device = promise is None
        self._knows_sizes = False
        self._calls: Counter[str] = Counter()
        """How often each module was called in this step."""
        self._roots_running = 0
        self._held: contextlib.ExitStack | None = None
        self._warned = False
        self._said: set[str] = set()
        self.host_memory = HostMemory()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies begin anew, and do not say again what was said of the original."""
        return PlannedModel, ()

    @contextlib.contextmanager
    def root_runs(self) -> Iterator[None]:
        """Run the root; a call that is not inside of another begins a step."""
        self.step_ends()
        with self._lock:
            self._roots_running += 1
        try:
            yield
        finally:
            with self._lock:
                self._roots_running -= 1
                held = None if self._roots_running else self._held
                self._held = self._held if self._roots_running else None
            if held is not None:
                held.close()

    def noticing_reads(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which a region's reads without an operator are noticed.

        Where the root runs, the change to torch is made once for all of its regions, and undone with its end.
        """
        with self._lock:
            if not self._roots_running:
                return noticed_reads.used()
            if self._held is None:
                self._held = contextlib.ExitStack()
                self._held.enter_context(noticed_reads.used())
        return contextlib.nullcontext()

    def step_ends(self) -> None:
        """Count calls anew: backward has begun, or the root, unless that is running."""
        with self._lock:
            if self._roots_running:
                return
            self._calls.clear()
        self.host_memory.forget()

    def backward_begins(self, _: torch.Tensor) -> None:
        """Count calls anew: called with the gradient of a stage's result."""
        self.step_ends()

    def count_call(self, name: str) -> int:
        """Return which call of the module in this step it is."""
        with self._lock:
            self._calls[name] += 1
            return self._calls[name] - 1

    def warn(self, name: str, module: nn.Module, difference: str) -> None:
        """Say once that the model does something else than its plan has.

        Not in evaluation mode: dropout and the like are missing there, which is as it should be.
        """
        if module.training and not self._warned:
            self._warned = True
            warnings.warn(
                f"{name} does not do what its plan says: {difference}. What the plan does not cover is kept "
                "in memory; results are not affected. Capture the model as it is now and plan again.",
                stacklevel=2,
            )

    def say_once(self, text: str) -> None:
        """Warn of something that concerns the whole model."""
        if text not in self._said:
            self._said.add(text)
            warnings.warn(text, stacklevel=2)

    def region_begins(self, module: nn.Module) -> None:
        """Warn when the first region runs on another kind of device than the plan is for, or another rank.

        Not when the plan is applied: models are moved to their device, and sharded, before or after that.
        """
        if self._knows_device or self._promise is None:
            return
        weight: torch.Tensor | None = next(module.parameters(), None)
        if weight is None or weight.is_meta:
            return
        self._knows_device = True
        if self._promise.device_kind not in (None, weight.device.type):
            warnings.warn(other_device(self._promise.device, weight.device.type), stacklevel=2)
        root = None if self._root is None else self._root()
        if root is not None:
            text = other_sharding(root, self._root_name, self._promise.cluster, self._promise.parts)
            if text:
                warnings.warn(text, stacklevel=2)

    def waits_for_sizes(self, name: str, call: int) -> bool:
        """Return whether the sizes of this call are to be compared with the plan's."""
        return self._promise is not None and not self._knows_sizes and self._promise.first == (name, call)

    def sizes_seen(self, name: str, call: int, larger: str | None) -> None:
        """Say that a region works on more than the plan was made for: what is `larger`, in words.

        Only of the plan's first region when it runs first: its sizes show the batch. Later passes of a step
        may have other sizes, and share their decisions.
        """
        if self._promise is None or not self.waits_for_sizes(name, call):
            return
        self._knows_sizes = True
        if larger is not None:
            warnings.warn(other_sizes(name, larger, self._promise.batch), stacklevel=2)
