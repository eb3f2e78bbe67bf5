"""What a user asks of a planner: which solver, for which budget; refused where it makes no sense."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from trainfit.basics.units import format_bytes, parse_size
from trainfit.devices.device_table import Device
from trainfit.errors import OptionError

Solver = Literal["regions", "modules"]


def bytes_of_budget(budget: int | str | None, device: Device) -> int:
    """Return a budget in bytes: a number, a size or share as text, or what the device has."""
    if budget is None:
        return device.default_budget_bytes
    if isinstance(budget, str):
        return parse_size(budget, device.usable_bytes)
    if type(budget) is not int or budget < 1:
        raise OptionError(f"a budget is a number of bytes above zero, got {budget!r}.")
    return budget


def budget_notes(budget: int | str | None, device: Device) -> tuple[str, ...]:
    """Say that a budget, which is taken literally, is more than the device has."""
    if budget is None or (budget_bytes := bytes_of_budget(budget, device)) <= device.usable_bytes:
        return ()
    return (
        f"the budget of {format_bytes(budget_bytes)} is more than {device.name} has for tensors "
        f"({format_bytes(device.usable_bytes)}): what fits into it may not fit there.",
    )


def check_solver(
    solver: str, ac_units: Sequence[str] | None, fsdp_units: Sequence[str], world_size: int
) -> None:
    """Refuse a solver that is not there, and what only the other one understands."""
    if solver not in get_args(Solver):
        raise OptionError(f"--solver must be one of {', '.join(get_args(Solver))}, got {solver!r}.")
    if isinstance(ac_units, str) or isinstance(fsdp_units, str):
        raise OptionError("AC units and FSDP units are lists of names, not one string.")
    if world_size < 1:
        raise OptionError(f"--world-size must be at least 1, got {world_size}.")
    if solver == "regions" and (ac_units is not None or fsdp_units or world_size != 1):
        raise OptionError(
            "AC units, FSDP units and a world size belong to the solver `modules`; the solver `regions` "
            "finds its regions itself, for one process. Add --solver modules, or leave them out."
        )
