"""`MemTracker` of `torch.distributed._tools.mem_tracker`: memory by category, and for each module call.

    with MemTracker() as tracker:          what runs inside, on real or on fake tensors, in any loop
        step()
    tracker = MemTracker.of(build, device="a100-sxm-40gb")     one capture of a step, for any GPU

All figures are read off one trace. `device` names what everything counts as being on; no GPU is needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import torch
from torch import nn
from torch.utils._pytree import tree_flatten
from torch.utils.weak import WeakIdKeyDictionary

from trainfit.capturing.observed_calls import Instant
from trainfit.capturing.observing import Observation
from trainfit.compat.captured_step import CapturedStep
from trainfit.compat.mem_states import (
    TOTAL,
    Snapshot,
    _MemRefType,
    _ModMemStats,
    _ModState,
    breakdown,
    print_snapshot,
    print_snapshot_table,
    print_states,
    print_states_table,
)
from trainfit.compat.seen_calls import Seen, SeenCall, seen_by
from trainfit.compat.target_device import named_device
from trainfit.devices.device_table import Device
from trainfit.errors import OptionError
from trainfit.memory.history import MemoryHistory
from trainfit.steps.step import Step
from trainfit.traces.trace import Trace

__all__ = ["MemTracker", "_MemRefType", "_ModMemStats", "_ModState"]

_ORDER = (
    _ModState.PEAK_FW, _ModState.PRE_FW, _ModState.POST_FW, _ModState.PEAK_BW, _ModState.PRE_BW,
    _ModState.PRE_FW_AC, _ModState.POST_FW_AC, _ModState.POST_BW,
)  # fmt: skip
"""Of states at the same moment."""


class MemTracker:
    """Follows the memory of what runs while it is entered."""

    def __init__(self, device: str | Device | None = None) -> None:
        """Prepare; `device` names what everything counts as being on, else each tensor's own counts."""
        self._observation = self._observation_on(named_device(device))
        self._depth = 0
        self._entered = Instant(0, 0)
        self._first_call = 0
        self._seen: Seen | None = None
        self._looked_at: object = None
        """What the ledger was like when it was looked at last."""
        self._is_captured = False
        self._stats: dict[int, _ModMemStats] | None = None

    def _observation_on(self, device: Device | None) -> Observation:
        return Observation(device)

    @classmethod
    def of(cls, captured: CapturedStep | Callable[[], Step], device: str | Device | None = None) -> Self:
        """Return the tracker of one captured step, or of the step that a function builds."""
        step = captured if isinstance(captured, CapturedStep) else CapturedStep(captured, device)
        tracker = cls(step.target)
        tracker._seen, tracker._is_captured = step.seen(), True
        return tracker

    # Following ------------------------------------------------------------------------------------------

    def track_external(self, *external: nn.Module | torch.optim.Optimizer | torch.Tensor) -> None:
        """Count what was made outside: tensors, modules, optimizers, also in containers."""
        self._refuse_captured()
        for thing in tree_flatten(external)[0]:
            if isinstance(thing, nn.Module | torch.optim.Optimizer | torch.Tensor):
                self._observation.include(thing)
            elif thing is not None:
                raise TypeError(
                    f"tensors, modules and optimizers can be tracked, not {type(thing).__name__} objects."
                )

    def __enter__(self) -> Self:
        """Begin to follow, or go on; the peak is that of the time since."""
        self._refuse_captured()
        if self._depth == 0:
            self._entered = self._observation.now()
        self._depth += 1
        self._observation.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop following."""
        self._depth -= 1
        self._observation.__exit__(*error)

    def _refuse_captured(self) -> None:
        if self._is_captured:
            raise OptionError("this tracker is that of a captured step; make another to follow code.")

    def reset_mod_stats(self) -> None:
        """Forget the module calls so far."""
        self._first_call, self._stats = len(self._look().calls), None

    # Reading --------------------------------------------------------------------------------------------

    def _look(self) -> Seen:
        """Return everything that was seen so far."""
        ledger = self._observation.ledger
        state = (self._observation.now(), ledger.live_bytes, len(ledger.created))
        if self._seen is None or (state != self._looked_at and not self._is_captured):
            self._seen, self._stats, self._looked_at = seen_by(self._observation), None, state
        return self._seen

    def trace(self, device: torch.device | None = None) -> Trace:
        """Return everything so far as trainfit's own trace, of one device if there are several."""
        seen = self._look()
        return seen.trace if device is None else seen.traces[device]

    def get_tracker_snapshot(self, type: str = "current") -> Snapshot:
        """Return bytes by category for each device: at this moment, or at the `peak`."""
        now, histories = self._look().now, self._histories()
        if type == "current":
            found = {device: at(history, now, self._shown) for device, history in histories.items()}
        elif type == "peak":
            found = {
                device: largest(history, self._entered, history.during.shape[1], self._shown)
                for device, history in histories.items()
            }
        else:
            raise ValueError(f"a snapshot is of the type current or peak, not {type!r}.")
        return {device: sizes for device, sizes in found.items() if sizes[TOTAL]}

    def _histories(self) -> dict[torch.device, MemoryHistory]:
        return self._look().histories

    def _shown(self, by_category: dict[str, int]) -> dict[str, int]:
        return breakdown(by_category)

    @property
    def memory_tracking(self) -> Any:
        """What is known of each module that was called, by module: a dictionary that holds none of them."""
        found = WeakIdKeyDictionary()
        for number, stats in self._module_stats().items():
            module = self._look().modules[number].reference()
            if module is not None:
                found[module] = stats
        return found

    def display_snapshot(self, type: str = "current", units: str = "B", tabulate: bool = False) -> None:
        """Print a snapshot of all devices, in `B`, `KiB`, `MiB` or `GiB`."""
        snapshot = self.get_tracker_snapshot(type)
        print_snapshot_table(snapshot, units) if tabulate else print_snapshot(snapshot, units)

    def display_modulewise_snapshots(self, depth: int = 2, units: str = "B", tabulate: bool = False) -> None:
        """Print the snapshots of all modules down to a depth, in the order of their names."""
        for stats in in_order_of_names(self._module_stats().values()):
            if stats.mod_fqn.count(".") < depth:
                print(f"Module:  {stats.mod_fqn}")
                show = print_states_table if tabulate else print_states
                show(stats.snapshots, units)

    def _module_stats(self) -> dict[int, _ModMemStats]:
        seen = self._look()
        if self._stats is None:
            self._stats = module_stats_of(seen, self._first_call)
        return self._stats


def module_stats_of(seen: Seen, first_call: int = 0) -> dict[int, _ModMemStats]:
    """Return what is known of each module that was called, from one of the calls on."""
    found: dict[int, _ModMemStats] = {}
    taken: dict[int, list[tuple[Instant, _ModState, Snapshot]]] = {}
    for call in seen.calls[first_call:]:
        stats = found.get(call.module)
        if stats is None:
            module = seen.modules[call.module]
            stats = found[call.module] = _ModMemStats(module.name)
            stats.parameter_mem = seen.bytes_of(module.parameters)
            stats.buffer_mem = seen.bytes_of(module.buffers)
        taken.setdefault(call.module, []).extend(_states(seen, call))
        if not call.recompute:
            stats.input_mem, stats.output_mem = seen.bytes_of(call.given), seen.bytes_of(call.returned)
    for number, states in taken.items():
        stats = found[number]
        for _, state, snapshot in sorted(states, key=lambda one: (one[0].time, _ORDER.index(one[1]))):
            stats.snapshots.setdefault(state, []).append(snapshot)
            if state in (_ModState.PEAK_FW, _ModState.PEAK_BW):
                stats.local_peak = {device: sizes[TOTAL] for device, sizes in snapshot.items()}
    return found


def _states(seen: Seen, call: SeenCall) -> Iterator[tuple[Instant, _ModState, Snapshot]]:
    """Yield the snapshots of a call, with the moment by which they are put in order."""

    def snapshot(moment: Instant) -> Snapshot:
        return {device: at(history, moment) for device, history in seen.histories.items()}

    def most(since: Instant, until: Instant) -> Snapshot:
        return {device: largest(history, since, until.time) for device, history in seen.histories.items()}

    entered, left = call.entered, call.left
    if call.recompute:
        yield entered, _ModState.PRE_FW_AC, snapshot(entered)
        yield entered, _ModState.POST_FW_AC, snapshot(left)
        return
    yield entered, _ModState.PEAK_FW, most(entered, left)
    yield entered, _ModState.PRE_FW, snapshot(entered)
    yield left, _ModState.POST_FW, snapshot(left)
    begin, end = call.backward_began, call.backward_ended
    if begin is not None and end is not None:
        yield begin, _ModState.PEAK_BW, most(begin, end)
        yield begin, _ModState.PRE_BW, snapshot(begin)
        yield end, _ModState.POST_BW, snapshot(end)


Shown = Callable[[dict[str, int]], dict[str, int]]
"""Bytes by the categories of a snapshot, of those by the rows of a history."""


def at(history: MemoryHistory, instant: Instant, shown: Shown = breakdown) -> dict[str, int]:
    """Return what is alive at a moment."""
    return shown(history.at(instant.time, instant.freed))


def largest(history: MemoryHistory, since: Instant, until: int, shown: Shown = breakdown) -> dict[str, int]:
    """Return what is alive when most is, from a moment on until an op, which does not count."""
    begin = at(history, since, shown)
    op = history.largest(since.time, until)
    at_op = begin if op is None else shown(history.at_op(op))
    return at_op if at_op[TOTAL] > begin[TOTAL] else begin


def in_order_of_names(stats: Iterable[Any]) -> list[Any]:
    """Sort what is known of modules by their names."""
    return sorted(stats, key=lambda one: _numbers_last(one.mod_fqn))


def _numbers_last(name: str) -> list[tuple[int, int | str]]:
    """Sort names so that layer 10 comes after layer 9."""
    parts = re.split("([0-9]+)", name)
    return [(0, int(part)) if part.isdigit() else (1, part.lower()) for part in parts]
