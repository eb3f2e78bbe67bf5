"""The settings of FSDP's units as a person reads them: what to set, then each that was tried."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from trainfit.basics.units import format_bytes, format_seconds
from trainfit.report.amounts import Amount, at_most, stage_times, verdict_alone
from trainfit.report.sharding_data import ShardingData
from trainfit.report.tables import MOST_WARNINGS, NumberTable, safe, stacked


def sharding_view(data: ShardingData, amount: Amount = "usual") -> RenderableType:
    """Lay out what was found: the answer, what to set, and each setting that was tried."""
    if amount == "verdict":
        return verdict_alone(_sharding_headline(data), data.warnings)
    return stacked(
        [_sharding_headline(data), *([safe(data.description, "dim")] if data.description else [])],
        [_what_to_set(data)],
        [_settings_tried(data)],
        stage_times(data.seconds, amount),
        warnings=data.warnings,
        most_warnings=at_most(MOST_WARNINGS, amount),
        footer=f"{len(data.tried)} settings planned, {data.captures} of them captured, torch {data.torch}",
    )


def _sharding_headline(data: ShardingData) -> Text:
    mesh = ", ".join(f"{name}={size}" for name, size in data.mesh.items())
    line = Text().append_text(safe(data.target, "bold"))
    line.append(f" on {data.device}, {mesh or data.world_size}: ")
    if not data.feasible:
        needed = f"needs {format_bytes(data.memory_bytes)} of {format_bytes(data.budget_bytes)}"
        return line.append(f"no setting of FSDP's units fits; the smallest {needed} (predicted)", "bold red")
    line.append(f"{format_bytes(data.memory_bytes)} of {format_bytes(data.budget_bytes)} at ")
    line.append(f"{format_seconds(data.step_seconds)} per step (predicted)", "bold green")
    slower = data.step_seconds / data.bound_seconds - 1 if data.bound_seconds else 0.0
    return line.append(f", {slower:.1%} more than the GPU computes")


def _what_to_set(data: ShardingData) -> Text:
    row = next(row for row in data.tried if row.chosen)
    units = {"blocks": "each block", "parts": "the parts of each block", "whole": "the model alone"}
    text = f"Units of FSDP: {units.get(row.units, 'as they are')}"
    if row.unit_count and row.kept:
        last = "all of them" if row.kept == row.unit_count else f"the last {row.kept} of {row.unit_count}"
        text += f"; {last} with reshard_after_forward=False"
    text += f"; {row.prefetch} gathered ahead" if row.prefetch > 1 else ""
    text += (
        f"; {row.regions} region{'s' * (row.regions != 1)} checkpointed."
        if row.regions
        else "; nothing checkpointed."
    )
    return safe(text)


def _settings_tried(data: ShardingData) -> NumberTable:
    table = NumberTable(
        "units, kept", "fits", "step", "runs in", "recompute", "exposed", "communication", "prefetch"
    )
    for row in data.tried:
        usual = f" ({row.usual})" if row.usual else ""
        name = f"{row.units}, {row.kept} of {row.unit_count}{usual}"
        table.add_row(
            safe(name, "bold green" if row.chosen else ""),
            Text("yes", "green") if row.fits else Text("no", "red"),
            format_seconds(row.step_seconds),
            format_bytes(row.memory_bytes),
            format_seconds(row.recompute_seconds),
            format_seconds(row.exposed_communication_seconds),
            format_seconds(row.communication_seconds),
            str(row.prefetch),
        )
    return table
