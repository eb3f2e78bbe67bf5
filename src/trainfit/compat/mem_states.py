"""The states and categories of `torch.distributed._tools.mem_tracker`, and how its snapshots are printed."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

import torch

from trainfit.compat.printed_tables import tabulated

Snapshot = dict[torch.device, dict[str, int]]
"""Bytes by category, and their `Total`, for each device."""
TOTAL = "Total"
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class _RefType(str, Enum):  # noqa: UP042  (a `StrEnum` prints otherwise than theirs)
    """Kinds of memory."""


class _State(str, Enum):  # noqa: UP042
    """Moments in the life of a module call."""


class _MemRefType(_RefType):
    """What a tensor is: a category of memory."""

    PARAM = "Parameter"
    BUFFER = "Buffer"
    GRAD = "Gradient"
    ACT = "Activation"
    TEMP = "Temp"
    OPT = "Optstate"
    OTH = "Other"


class _ModState(_State):
    """When a module's snapshot was taken; `AC` is while a checkpointed module is recomputed."""

    PRE_FW = "Pre-Forward"
    POST_FW = "Post-Forward"
    PEAK_FW = "Peak-Forward"
    PRE_BW = "Pre-Backward"
    PRE_FW_AC = "Pre-Forward-AC"
    POST_FW_AC = "Post-Forward-AC"
    POST_BW = "Post-Backward"
    PEAK_BW = "Peak-Backward"


class _ModMemStats:
    """What is known of one module: what it owns, gets and returns, and snapshots of its calls."""

    def __init__(self, mod_fqn: str) -> None:
        """Start without calls."""
        self.mod_fqn = mod_fqn
        self.parameter_mem = 0
        self.buffer_mem = 0
        self.input_mem = 0
        self.output_mem = 0
        self.local_peak: dict[torch.device, int] = {}
        self.snapshots: dict[_ModState, list[Snapshot]] = {}


_CATEGORY_OF = {
    "parameter": _MemRefType.PARAM,
    "buffer": _MemRefType.BUFFER,
    "gradient": _MemRefType.GRAD,
    "activation": _MemRefType.ACT,
    "temporary": _MemRefType.TEMP,
    "optimizer_state": _MemRefType.OPT,
    "input": _MemRefType.OTH,
    "communication": _MemRefType.TEMP,
}


def breakdown(by_category: dict[str, int]) -> dict[str, int]:
    """Return bytes by their categories, with the total last."""
    found: dict[str, int] = dict.fromkeys(_MemRefType, 0)
    for category, size in by_category.items():
        found[_CATEGORY_OF[category]] += size
    return {**found, TOTAL: sum(by_category.values())}


def _shown(size: int, units: str) -> str:
    if units not in _UNITS:
        raise ValueError(f"units are one of {', '.join(_UNITS)}, not {units!r}.")
    return f"{size if units == 'B' else round(size / _UNITS[units], 2)} {units}"


def _label(category: str) -> str:
    return str(category.value) if isinstance(category, Enum) else category


def _devices(snapshot: Snapshot, units: str) -> Iterable[tuple[torch.device, dict[str, int]]]:
    """Leave out devices that have nothing, or so little that it would be shown as nothing."""
    least = _UNITS.get(units, 1) * 0.005
    return [(device, sizes) for device, sizes in snapshot.items() if sizes[TOTAL] > least]


def print_snapshot(snapshot: Snapshot, units: str) -> None:
    """Print a snapshot: a device, and a line for each category."""
    _shown(0, units)
    if not snapshot:
        print("No memory tracked.")
    for device, sizes in _devices(snapshot, units):
        print(f"Device: {device}")
        for category, size in sizes.items():
            print(f"\t{_label(category)}: {_shown(size, units)}")


def print_snapshot_table(snapshot: Snapshot, units: str) -> None:
    """Print a snapshot as a table: a row for each device."""
    _shown(0, units)
    if not snapshot:
        print("No memory tracked.")
        return
    rows = [
        {"Device": str(device), **{_label(name): _shown(size, units) for name, size in sizes.items()}}
        for device, sizes in _devices(snapshot, units)
    ]
    print(tabulated()(rows, headers="keys", tablefmt="rst"))


def print_states(snapshots: dict[_ModState, list[Snapshot]], units: str) -> None:
    """Print the snapshots of a module: a state, and each of its calls."""
    for state, calls in snapshots.items():
        print(state.value)
        for number, snapshot in enumerate(calls, 1):
            print(f"# {number}:")
            print_snapshot(snapshot, units)
    print()


def print_states_table(snapshots: dict[_ModState, list[Snapshot]], units: str) -> None:
    """Print the snapshots of a module as a table: a row for each state, call and device."""
    rows: list[dict[str, str]] = []
    for state, calls in snapshots.items():
        for number, snapshot in enumerate(calls, 1):
            for place, (device, sizes) in enumerate(_devices(snapshot, units)):
                first = {"State & Call": f"{state.value} # {number}" if place == 0 else ""}
                figures = {_label(name): _shown(size, units) for name, size in sizes.items()}
                rows.append({**first, "Device": str(device), **figures})
    print(tabulated()(rows, headers="keys", tablefmt="rst"))
