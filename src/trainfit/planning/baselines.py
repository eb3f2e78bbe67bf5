"""What people do without a solver, replayed on the same trace: what a plan is compared with.

- `keep everything`: no checkpointing.
- `full`: every block under `torch.utils.checkpoint`, as transformers does when asked to checkpoint.
- `every second block`: the same for half of the blocks.
- `greedy`: blocks one after the other, by bytes freed per second added, until the step fits.

They are priced like regions that are left to torch: no op is followed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from trainfit.allocator.device_memory import StepMemory
from trainfit.costs.schedule import schedule
from trainfit.planning.certify import Unplanned, reserve_bytes
from trainfit.planning.effects import Effect, effect_of
from trainfit.planning.full_recompute import full_recompute
from trainfit.planning.model_calls import block_families
from trainfit.planning.planned_columns import PlannedColumns
from trainfit.planning.regions import RegionGraph, region_graph
from trainfit.planning.replay import replayed
from trainfit.planning.trials import Trials
from trainfit.traces.simulate import Timeline
from trainfit.traces.trace import Trace


@dataclass(frozen=True)
class Baseline:
    """One of the usual ways, certified like a plan."""

    name: str
    regions: int
    peak_bytes: int
    memory_bytes: int
    """The least memory with which it runs."""
    step_seconds: float


def baselines(step: Unplanned, budget_bytes: int) -> tuple[Baseline, ...]:
    """Replay each of the usual ways; those that need blocks are left out if the model has none."""
    trace = step.trace
    seconds = schedule(trace, step.costs).marginal_seconds.tolist()
    blocks = list(blocks_of(trace, seconds))
    full = [effect_of(trace, block, full_recompute(block), by_torch=True) for block in blocks]
    nothing = _replayed("keep everything", step, [])
    if not full:
        return (nothing,)
    everything = _replayed("full", step, full)
    every_second = _replayed("every second block", step, full[::2])
    return nothing, everything, every_second, _greedy(step, full, budget_bytes, nothing, everything)


def blocks_of(trace: Trace, seconds: list[float]) -> Iterator[RegionGraph]:
    """Yield the calls of the model's blocks: numbered siblings of one class that keep the most together."""
    families = [
        [graph for call in calls if (graph := region_graph(trace, call, seconds)) and graph.freeable_bytes]
        for calls in block_families(trace)
    ]
    yield from max(families, key=lambda members: sum(m.freeable_bytes for m in members), default=[])


def _greedy(
    step: Unplanned, full: list[Effect], budget_bytes: int, nothing: Baseline, everything: Baseline
) -> Baseline:
    """Return the first blocks that fit, the best first, or all of them; more blocks mostly need less."""

    def worth(effect: Effect) -> float:
        return effect.region.freeable_bytes / max(effect.choice.seconds, 1e-12)

    ordered = sorted(full, key=worth, reverse=True)
    too_few, enough = 0, len(ordered)
    if nothing.memory_bytes <= budget_bytes:
        return replace(nothing, name="greedy")
    if everything.memory_bytes > budget_bytes:
        return replace(everything, name="greedy")
    trials = Trials(step, step.allocator, PlannedColumns(step.trace, step.costs.device))
    while enough - too_few > 1:
        number = (too_few + enough) // 2
        if trials.run(ordered[:number], budget_bytes):
            enough = number
        else:
            too_few = number
    while (found := _replayed("greedy", step, ordered[:enough])).memory_bytes > budget_bytes:
        enough += 1  # trials are of few steps; with all of them it fits
    return found


def _needed(step: Unplanned, timeline: Timeline) -> int:
    """Return the least memory, with what a plan would set aside too where memory depends on data."""
    memory = StepMemory(timeline, step.costs.device, step.allocator)
    return memory.smallest_bytes + reserve_bytes(step.trace, timeline)


def _replayed(name: str, step: Unplanned, effects: list[Effect]) -> Baseline:
    replay = replayed(step.trace, step.costs, effects)
    peak_bytes = replay.timeline.peak_bytes + reserve_bytes(step.trace, replay.timeline)
    needed = _needed(step, replay.timeline)
    return Baseline(name, len(effects), peak_bytes, needed, replay.step_seconds)
