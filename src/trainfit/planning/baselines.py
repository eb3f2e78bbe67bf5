"""What people do without a solver, replayed on the same trace: what a plan is compared with.

- `keep everything`: no checkpointing.
- `full`: every block under `torch.utils.checkpoint`, as transformers does when asked to checkpoint.
- `every second block`: the same for half of the blocks.
- `greedy`: blocks one after the other, by bytes freed per second added, until the step fits.

They are priced like regions that are left to torch: no op is followed. Where the executor leaves all of these
blocks to torch, a usual way is a plan like any other, and the planner takes it if it has found none that is
faster. Where the executor does not, because torch alone may compute something else, `differs` says why.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from trainfit.allocator.device_memory import StepMemory
from trainfit.basics.units import format_bytes, format_seconds
from trainfit.operators.memory_use import moves_statistics
from trainfit.planning.certify import Unplanned, reserve_bytes
from trainfit.planning.effects import Effect, effect_of
from trainfit.planning.full_recompute import full_recompute, is_full_recompute
from trainfit.planning.model_calls import block_families, calls_in_pass
from trainfit.planning.planned_columns import PlannedColumns
from trainfit.planning.regions import RegionGraph, region_graph
from trainfit.planning.replay import replayed
from trainfit.planning.trials import Trials
from trainfit.plans.plan import Plan
from trainfit.traces.simulate import Timeline
from trainfit.traces.trace import Trace

_LEAST_GAIN = 1e-9
"""Of a step: less is rounding."""


Block = tuple[Effect, ...]
"""A block of the model that is recomputed, once for each pass over the model."""


@dataclass(frozen=True)
class Baseline:
    """One of the usual ways, certified like a plan."""

    name: str
    regions: int
    peak_bytes: int
    memory_bytes: int
    """The least memory with which it runs."""
    step_seconds: float
    differs: str | None = None
    """Why it may compute something else than the step without it; a plan never does."""


@dataclass(frozen=True)
class UsualWay:
    """One of the usual ways, and its regions."""

    baseline: Baseline
    effects: tuple[Effect, ...] = field(repr=False)

    def beats(self, plan: Plan | None, budget_bytes: int) -> bool:
        """Whether it runs within a budget and is faster than a plan, or there is none."""
        return _beats(self.baseline, budget_bytes, math.inf if plan is None else plan.step_seconds)


@dataclass
class UsualWays:
    """The usual ways of one step; what is the same for all budgets is replayed once."""

    step: Unplanned
    _greedy: dict[int, UsualWay] = field(default_factory=dict)

    def within(self, budget_bytes: int) -> tuple[UsualWay, ...]:
        """Return each of the usual ways; those that need blocks are left out if the model has none."""
        if not self._blocks:
            return (self._nothing,)
        if budget_bytes not in self._greedy:
            self._greedy[budget_bytes] = self._until_it_fits(budget_bytes)
        return self._nothing, self._everything, self._every_second, self._greedy[budget_bytes]

    @cached_property
    def _blocks(self) -> list[Block]:
        """The blocks, each recomputed as a whole, in all passes over the model alike."""
        trace = self.step.trace
        seconds = self.step.replay.times.marginal_seconds.tolist()
        places, found = calls_in_pass(trace), dict[tuple[int, int], list[Effect]]()
        for block in blocks_of(trace, seconds):
            effect = effect_of(trace, block, full_recompute(block), by_torch=True)
            found.setdefault((block.module, places[block.call]), []).append(effect)
        return [tuple(passes) for passes in found.values()]

    @cached_property
    def _nothing(self) -> UsualWay:
        return self._replayed("keep everything", [])

    @cached_property
    def _everything(self) -> UsualWay:
        return self._replayed("full", self._blocks)

    @cached_property
    def _every_second(self) -> UsualWay:
        return self._replayed("every second block", self._blocks[::2])

    def _until_it_fits(self, budget_bytes: int) -> UsualWay:
        """Return the first blocks that fit, the best first, or all of them; more blocks mostly need less."""

        def worth(block: Block) -> float:
            freeable = sum(effect.region.freeable_bytes for effect in block)
            return freeable / max(sum(effect.choice.seconds for effect in block), 1e-12)

        ordered = sorted(self._blocks, key=worth, reverse=True)
        too_few, enough = 0, len(ordered)
        if self._nothing.baseline.memory_bytes <= budget_bytes:
            return _named("greedy", self._nothing)
        if self._everything.baseline.memory_bytes > budget_bytes:
            return _named("greedy", self._everything)
        step = self.step
        trials = Trials(step, step.allocator, PlannedColumns(step.trace, step.costs.device))
        while enough - too_few > 1:
            number = (too_few + enough) // 2
            if trials.run(_effects(ordered[:number]), budget_bytes):
                enough = number
            else:
                too_few = number
        found = self._replayed("greedy", ordered[:enough])
        while found.baseline.memory_bytes > budget_bytes:
            enough += 1  # trials are of few steps; with all of them it fits
            found = self._replayed("greedy", ordered[:enough])
        return found

    def _replayed(self, name: str, blocks: Sequence[Block]) -> UsualWay:
        step, effects = self.step, _effects(blocks)
        replay = replayed(step.trace, step.costs, effects) if effects else step.replay
        peak_bytes = replay.timeline.peak_bytes + reserve_bytes(step.trace, replay.timeline)
        needed, differs = _needed(step, replay.timeline), _differs(step.trace, effects)
        found = Baseline(name, len(blocks), peak_bytes, needed, replay.step_seconds, differs)
        return UsualWay(found, tuple(effects))


def baselines(step: Unplanned, budget_bytes: int) -> tuple[Baseline, ...]:
    """Replay each of the usual ways; those that need blocks are left out if the model has none."""
    return tuple(way.baseline for way in UsualWays(step).within(budget_bytes))


def blocks_of(trace: Trace, seconds: list[float]) -> Iterator[RegionGraph]:
    """Yield the calls of the model's blocks: numbered siblings of one class that keep the most together."""
    families = [
        [graph for call in calls if (graph := region_graph(trace, call, seconds)) and graph.freeable_bytes]
        for calls in block_families(trace)
    ]
    yield from max(families, key=lambda members: sum(m.freeable_bytes for m in members), default=[])


def faster_ways(plans: Sequence[tuple[int, float]], ways: Sequence[Baseline]) -> tuple[str, ...]:
    """Say which of the usual ways are faster than a plan within its bytes, and why they are no plans."""
    found: dict[str, list[str]] = {}
    for way in ways:
        beats = any(_beats(way, memory_bytes, step_seconds) for memory_bytes, step_seconds in plans)
        if way.differs is not None and beats:
            figures = f"{way.name} ({format_bytes(way.memory_bytes)}, {format_seconds(way.step_seconds)})"
            found.setdefault(way.differs, []).append(figures)
    return tuple(
        f"faster than a plan: {', '.join(names)}; but {why}. A plan computes what the step computes without "
        "it, and follows such regions op by op, which takes the host longer."
        for why, names in found.items()
    )


def _differs(trace: Trace, effects: Sequence[Effect]) -> str | None:
    """Say why torch alone may compute something else than the step without a checkpoint."""
    followed = [e for e in effects if not is_full_recompute(trace, e.region, e.choice)]
    if not followed:
        return None
    ops = [number for effect in followed for number in effect.region.ops]
    if any(moves_statistics(trace.op_name(number)) for number in ops):
        return "torch's checkpoint moves the running statistics of batch norm twice in every step"
    if any(trace.ops[number].reads_value for number in ops):
        return "Python reads values in these blocks, and torch's checkpoint may take another branch again"
    return "these blocks change what is outside of them, and torch's checkpoint does that twice"


def _beats(way: Baseline, memory_bytes: int, step_seconds: float) -> bool:
    return way.memory_bytes <= memory_bytes and way.step_seconds < step_seconds * (1 - _LEAST_GAIN)


def _effects(blocks: Sequence[Block]) -> list[Effect]:
    return [effect for block in blocks for effect in block]


def _named(name: str, way: UsualWay) -> UsualWay:
    return replace(way, baseline=replace(way.baseline, name=name))


def _needed(step: Unplanned, timeline: Timeline) -> int:
    """Return the least memory, with what a plan would set aside too where memory depends on data."""
    memory = StepMemory(timeline, step.costs.device, step.allocator)
    return memory.smallest_bytes + reserve_bytes(step.trace, timeline)
