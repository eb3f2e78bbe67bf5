"""`plan_sharding`, and what it answers: the fastest setting of FSDP's units, with its text and JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainfit.allocator.allocator_options import AllocatorOptions
from trainfit.allocator.named_options import named_options
from trainfit.api.request import Build, Request
from trainfit.api.stopwatch import Stopwatch
from trainfit.basics.doing import Measuring, Progress, heard_by
from trainfit.basics.units import format_bytes
from trainfit.devices.device_table import Device, find_device
from trainfit.errors import BudgetTooSmall, DeviceError, OptionError
from trainfit.models.parallel.unit_grain import Grain
from trainfit.models.recipe import StepOptions
from trainfit.planning.requests import bytes_of_budget
from trainfit.plans.sharding_choice import Sharding
from trainfit.report.json_result import result_json, write_json
from trainfit.report.sharding_data import ShardingData, ShardingRow
from trainfit.sharding.unit_search import BestSetting, search
from trainfit.sharding.unit_trials import OWN, Trial, UnitTrials
from trainfit.traces.ranks import Cluster
from trainfit.traces.settings import describe, settings_json
from trainfit.traces.trace import Trace


@dataclass(frozen=True)
class ShardingResult:
    """What `plan_sharding` answers. All bytes and seconds are predicted."""

    data: ShardingData
    sharding: Sharding = field(repr=False)

    def __repr__(self) -> str:
        """One line; the text has the rest."""
        return f"<ShardingResult: {self.sharding!r}, {len(self.data.tried)} settings tried>"

    def __str__(self) -> str:
        """What the command line prints, as plain text."""
        from trainfit.report.tables import as_text
        from trainfit.report.text_sharding import sharding_view

        return as_text(sharding_view(self.data))

    def check(self) -> None:
        """Raise `BudgetTooSmall` if no setting fits."""
        if not self.data.feasible:
            raise BudgetTooSmall(
                f"no setting of FSDP's units fits {format_bytes(self.data.budget_bytes)}: the smallest that "
                f"was found needs {format_bytes(self.data.memory_bytes)}. Use more ranks, a smaller batch, "
                "or tensor parallelism.",
                self.data.peak_bytes,
            )

    def json(self) -> dict[str, Any]:
        """Return all of it as one JSON object."""
        return result_json(self.data)

    def save_json(self, path: str | Path) -> None:
        """Write that object."""
        write_json(self.json(), str(path))


def plan_sharding(
    target: str | Build,
    *,
    cluster: Cluster,
    device: str | Device = "h100",
    budget: int | str | None = None,
    options: StepOptions | None = None,
    task: str | None = None,
    allocator: str | AllocatorOptions | None = "default",
    seconds_limit: float = 10.0,
    progress: Progress | None = None,
    measuring: Measuring | None = None,
) -> ShardingResult:
    """Find which modules are FSDP units, which stay whole after forward and what is checkpointed, together.

    The step is that of a rank of `cluster`. A function of the user's own shards itself; its units stay what
    they are, and which of them are kept is looked for. Each setting is captured and planned for at most
    `seconds_limit`; the fastest within the budget is returned, with its plan.
    """
    with heard_by(progress, measuring):
        found = device if isinstance(device, Device) else find_device(device)
        if not found.has_speed or found.kind != "cuda":
            raise DeviceError(
                f"which setting is the fastest on {found.name} is not known; name a GPU that `trainfit "
                "devices` lists, as in --device h100."
            )
        if isinstance(target, Trace):
            raise OptionError("a trace has its units already; give the target that it was captured from.")
        watch = Stopwatch()
        bytes_of_budget(budget, found)
        asked = UnitTrials(
            target,
            found,
            options or StepOptions(),
            task,
            cluster,
            budget,
            named_options(allocator),
            seconds_limit,
        )
        searched = search(asked, _grains(asked))
        watch.lap("search")
        return _result(asked, searched, watch.seconds)


def _grains(asked: UnitTrials) -> tuple[Grain | None, ...]:
    """Return which modules may be units: models of ours can be divided otherwise, a user's function not."""
    request = Request(asked.target, asked.device, asked.options, asked.task, cluster=asked.cluster)
    if request.found().kind in ("built-in", "hf"):
        return ("blocks", "parts", "whole")
    return (None,)


def _result(asked: UnitTrials, searched: BestSetting, seconds: dict[str, float]) -> ShardingResult:
    best = searched.best
    plan, trace = best.plan.plan, best.trace
    rows = sorted(asked.found.values(), key=lambda one: (not one.fits, one.seconds))
    sharding = Sharding(
        target=trace.target,
        device=best.device.name,
        units=best.units,
        kept=best.setting.kept,
        prefetch=best.setting.prefetch,
        budget_bytes=plan.budget_bytes,
        peak_bytes=plan.peak_bytes,
        memory_bytes=plan.memory_bytes,
        step_seconds=best.seconds,
        cluster=trace.cluster,
        plan=plan if plan.regions else None,
    )
    data = ShardingData(
        target=trace.target,
        device=best.device.name,
        torch=trace.torch,
        settings=settings_json(trace.settings),
        description=describe(trace.settings),
        world_size=asked.cluster.world_size,
        mesh=dict(asked.cluster.mesh),
        rank=asked.cluster.rank,
        seconds=seconds,
        captures=len(asked.captured),
        budget_bytes=plan.budget_bytes,
        feasible=best.fits,
        peak_bytes=plan.peak_bytes,
        memory_bytes=plan.memory_bytes,
        step_seconds=best.seconds,
        units=best.units,
        kept=best.setting.kept,
        prefetch=best.setting.prefetch,
        bound_seconds=min(searched.bound_seconds, best.seconds),
        tried=tuple(_row(one, best) for one in rows),
        warnings=trace.warnings,
    )
    return ShardingResult(data, sharding)


def _row(one: Trial, best: Trial) -> ShardingRow:
    plan, setting = one.plan.plan, one.setting
    usual = ""
    if setting.grain in (None, "blocks") and setting.prefetch == 1 and one.units:
        usual = {0: "reshard all", len(one.units): "reshard none"}.get(len(setting.kept), "")
    return ShardingRow(
        units=setting.grain or OWN,
        unit_count=len(one.units),
        kept=len(setting.kept),
        prefetch=setting.prefetch,
        fits=one.fits,
        peak_bytes=plan.peak_bytes,
        memory_bytes=plan.memory_bytes,
        step_seconds=one.seconds,
        exposed_communication_seconds=one.exposed_seconds,
        communication_seconds=one.communication_seconds,
        recompute_seconds=max(one.seconds - one.free_seconds, 0.0),
        regions=len(plan.regions),
        chosen=one is best,
        usual=usual,
    )
