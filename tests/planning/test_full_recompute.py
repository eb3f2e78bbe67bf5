"""Regions that torch alone computes again: which ones, what they promise, and when they are worth it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import trainfit
from trainfit import Step, StepOptions, Trace
from trainfit.capturing import capture
from trainfit.costs.roofline import roofline_costs
from trainfit.costs.table import CostTable
from trainfit.devices.device_table import find_device
from trainfit.planning.baselines import blocks_of
from trainfit.planning.certify import certified
from trainfit.planning.effects import effect_of
from trainfit.planning.full_recompute import full_recompute, torch_can_recompute
from trainfit.planning.model_calls import candidate_calls
from trainfit.planning.planner import Planner
from trainfit.planning.regions import RegionGraph, region_graph
from trainfit.planning.replay import replayed
from trainfit.targets.parse import load
from trainfit.verifying.measuring import measure_step
from trainfit.workspace.measured import THOROUGH


def costs_of(trace: Trace) -> CostTable:
    return roofline_costs(trace, find_device("h100"))


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("gpt2-tiny", None), ("gpt2-tiny", "bf16-autocast"), ("llama-tiny", "bf16"), ("vit-tiny", None)],
)
def test_they_promise_what_is_measured(name: str, dtype: str | None, every: int) -> None:
    build = load(name, StepOptions(batch=2, dtype=dtype)).build
    trace = capture(build, limits=THOROUGH)
    planner = Planner(trace, costs_of(trace))
    blocks = list(blocks_of(trace, [1.0] * len(trace.ops)))[::every]
    effects = [effect_of(trace, block, full_recompute(block)) for block in blocks]
    found = certified(planner.step, effects, budget_bytes=1 << 40, bound_seconds=0.0, method="regions")
    plan = found.plan
    assert found.effects == tuple(effects)
    assert len(plan.regions) == len(blocks) and all(region.whole for region in plan.regions)
    measured = measure_step(build, "cpu", plan, timed=0).peak_bytes
    assert plan.peak_bytes == measured < planner.step.peak_bytes


class Parts(nn.Module):
    """One module that only computes, and some that do more."""

    def __init__(self) -> None:
        super().__init__()
        self.computes = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.2))
        self.normalises = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.counts = Counts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.counts(self.normalises(self.computes(x))).square().mean()


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.linear(x).tanh() * self.seen


def regions_of(trace: Trace) -> dict[str, RegionGraph]:
    graphs = [region_graph(trace, call, [1.0] * len(trace.ops)) for call in candidate_calls(trace)]
    return {trace.module_name(graph.module): graph for graph in graphs if graph is not None}


def test_only_what_computes_and_nothing_else() -> None:
    def build() -> Step:
        return Step.of(Parts(), (torch.randn(4, 8),), loss=lambda out: out, optimizer=None)

    trace = trainfit.capture(build, device="cpu")
    regions = regions_of(trace)
    whole = {name for name, region in regions.items() if torch_can_recompute(trace, region)}
    assert "Parts.computes" in whole
    assert whole.isdisjoint(("Parts", "Parts.normalises", "Parts.counts"))
    assert {"Parts", "Parts.normalises", "Parts.counts"} <= set(regions)


class Reads(nn.Module):
    """Looks at a value, which decides nothing this time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).tanh()
        return y * 2 if y.isnan().any() else y


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_what_reads_values_is_priced_as_followed(device: str) -> None:
    def build() -> Step:
        model = nn.Sequential(Reads(), nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
        return Step.of(model, (torch.randn(4, 8),), loss=torch.sum, optimizer=None)

    trace = trainfit.capture(build, device=device)
    regions = regions_of(trace)
    assert not torch_can_recompute(trace, regions["Sequential.0"])
    assert torch_can_recompute(trace, regions["Sequential.0.linear"]) and torch_can_recompute(
        trace, regions["Sequential.1"]
    )
    region = regions["Sequential.0"]
    effect = effect_of(trace, region, full_recompute(region))
    assert not effect.by_torch
    # Values are read once, and not again when the region is recomputed.
    assert not any(trace.ops[op].reads_value for op in effect.segment)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return trainfit.capture("gpt2-tiny", device="h100")


def test_they_are_chosen_where_the_device_waits_for_the_host(trace: Trace) -> None:
    """A plan at the peak of full checkpointing: followed op by op it would take three times as long."""
    costs = costs_of(trace)
    planner = Planner(trace, costs, allocator=None)
    effects = [
        effect_of(trace, block, full_recompute(block)) for block in blocks_of(trace, [1.0] * len(trace.ops))
    ]
    full = replayed(trace, costs, effects)
    found = planner.plan(full.timeline.peak_bytes)
    plan = found.plan
    assert found.fits and all(region.whole for region in plan.regions)
    assert plan.step_seconds <= full.step_seconds * (1 + 1e-9)
    followed = replayed(trace, costs, [replace(effect, by_torch=False) for effect in effects])
    added = full.step_seconds - planner.step.step_seconds
    assert followed.step_seconds - planner.step.step_seconds > 2 * added


def test_what_nobody_needs_is_computed_again_too(trace: Trace) -> None:
    """Until the last value that backward needs: nobody looks at ops where torch does it alone."""
    looked_at = 0
    for region in regions_of(trace).values():
        choice = full_recompute(region)
        effect = effect_of(trace, region, choice)
        needed = [n for n, group in enumerate(region.groups) if group.needed]
        if effect.by_torch and needed:
            last = needed[-1]
            expected = [op for n, g in enumerate(region.groups[: last + 1]) if not g.free for op in g.ops]
            assert list(effect.segment) == sorted(expected)
            looked_at += 1
    assert looked_at > 4
