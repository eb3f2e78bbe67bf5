"""What a memory tracker has seen of each module, read off its snapshots; torch's tracker and ours look alike.

Snapshots are found by the names of their states and categories, because each tracker has its own enums. A
module that is called several times in a step has a snapshot per call: its activations are the sum, and its
backward is the one that belongs to the last call, which begins first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from trainfit.errors import OptionError

Sizes = Mapping[str, int]
"""Bytes of one device by category."""


@dataclass(frozen=True)
class Backward:
    """What is alive when the backward of a module begins, and when it needs the most."""

    start: Sizes
    peak: Sizes


@dataclass(frozen=True)
class ModuleReading:
    """One module as the tracker saw it."""

    module: nn.Module
    tracked_name: str
    """What the trackers call it: of a module that is in two places, either."""
    name: str
    """Where it is first found in the model."""
    stats: Any
    calls: int
    """In one step."""
    snapshots: Mapping[str, list[Sizes]]

    def forward(self, state: str) -> list[Sizes]:
        """Return the snapshots of a state of forward in the last step, one per call."""
        return self.snapshots[state][-self.calls :]

    @property
    def activation_bytes(self) -> int:
        """What forward of all its calls leaves alive, without its outputs."""
        both = zip(self.forward("POST_FW"), self.forward("PRE_FW"))
        grown = (after.get("ACT", 0) - before.get("ACT", 0) - self.stats.output_mem for after, before in both)
        return sum(max(size, 0) for size in grown)

    @property
    def own_backward(self) -> Backward | None:
        """The backward of the last call; None if the tracker has not seen one."""
        starts, peaks = self.snapshots.get("PRE_BW", []), self.snapshots.get("PEAK_BW", [])
        calls = min(self.calls, len(starts), len(peaks))
        return Backward(starts[-calls], peaks[-calls]) if calls else None


class TrackerReadings:
    """Everything that a memory tracker knows about the modules of one model, on one device."""

    def __init__(self, model: nn.Module, memory_tracking: Any, device: torch.device) -> None:
        self._tracking = memory_tracking
        self._device = torch.device(device)
        self.root = memory_tracking.get(model)
        if self.root is None:
            raise OptionError(
                f"the memory tracker has not seen the {type(model).__name__} that it is asked about: run the "
                "step inside of the tracker, with this same object, and ask before `reset_mod_stats`."
            )
        self._root_calls = len(self._snapshots(self.root)["PRE_FW"])
        self.modules = [
            self._reading(path, module) for path, module in model.named_modules() if self._stats(module)
        ]

    def _stats(self, module: nn.Module) -> Any:
        return self._tracking.get(module)

    def _reading(self, path: str, module: nn.Module) -> ModuleReading:
        stats = self._stats(module)
        snapshots = self._snapshots(stats)
        # The model is called once per step: what is called more often is called several times in each.
        calls = max(len(snapshots["PRE_FW"]) // self._root_calls, 1)
        name = f"{self.root.mod_fqn}.{path}" if path else self.root.mod_fqn
        return ModuleReading(module, stats.mod_fqn, name, stats, calls, snapshots)

    def _snapshots(self, stats: Any) -> dict[str, list[Sizes]]:
        found = {
            state.name: [self._on_device(snapshot) for snapshot in snapshots]
            for state, snapshots in stats.snapshots.items()
        }
        if stats is self.root and not any(sizes for snapshots in found.values() for sizes in snapshots):
            seen = {str(at) for snapshots in stats.snapshots.values() for one in snapshots for at in one}
            raise KeyError(f"nothing was tracked on {self._device}, only on {', '.join(sorted(seen))}")
        return found

    def _on_device(self, snapshot: Mapping[torch.device, Mapping[Any, int]]) -> Sizes:
        """Return the sizes of the device; `cuda` is the GPU if there is one only."""
        alike = [at for at in snapshot if at.type == self._device.type]
        at = self._device if self._device in snapshot or len(alike) != 1 else alike[0]
        if self._device.index not in (None, at.index):
            return {}
        return {getattr(kind, "name", kind): size for kind, size in snapshot.get(at, {}).items()}

    @cached_property
    def _by_module(self) -> dict[nn.Module, ModuleReading]:
        return {reading.module: reading for reading in self.modules}

    def backward(self, reading: ModuleReading) -> Backward | None:
        """Return the backward of a module, which may follow from the modules inside of it.

        A module that returns something other than tensors, lists and dicts of them (a dataclass, say) has
        none of its own in torch's tracker: it begins with the first that begins inside, and needs the most
        when one of them does.
        """
        if (own := reading.own_backward) is not None:
            return own
        readings = (self._by_module.get(module) for module in reading.module.modules())
        inner = [found for inside in readings if inside and (found := inside.own_backward)]
        if not inner:
            return None
        first = min(inner, key=lambda one: (one.start.get("GRAD", 0), -one.start.get("ACT", 0)))
        return Backward(first.start, max((one.peak for one in inner), key=_total))

    def topmost_inside(self, module: nn.Module) -> Iterator[ModuleReading]:
        """Yield the modules inside of one, without those inside of them; lists of modules are not called."""
        for child in module.children():
            if (reading := self._by_module.get(child)) is not None:
                yield reading
            else:
                yield from self.topmost_inside(child)


def _total(sizes: Sizes) -> int:
    return sizes["Total"] if "Total" in sizes else sum(sizes.values())
