"""A replayed plan against the capture of a model that is checkpointed so, and what planning promises."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import trainfit
from trainfit import Step, Trace
from trainfit.costs.roofline import roofline_costs
from trainfit.devices.device_table import find_device
from trainfit.planning.baselines import baselines, full_recompute
from trainfit.planning.certify import Unplanned
from trainfit.planning.effects import effect_of
from trainfit.planning.master import MasterProblem, Solution
from trainfit.planning.model_calls import candidate_calls
from trainfit.planning.planner import Planner
from trainfit.planning.regions import region_graph
from trainfit.planning.rewrite import rewritten
from trainfit.traces.simulate import simulate
from trainfit.verifying.plan_comparison import compare_results

H100 = find_device("h100")
PRICES = replace(H100, name="the prices of an H100")
"""For steps on any device: a plan for an H100 itself is not for a CPU, and says so when it runs there."""


class Block(nn.Module):
    """A transformer block with dropout and an in-place activation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.mix(self.norm(x)).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.drop(mixed.transpose(1, 2).flatten(2))
        return x + self.down(torch.relu_(self.up(x)))


class Net(nn.Module):
    """Blocks between an embedding and a head, checkpointed by torch itself if asked."""

    def __init__(self, checkpointed: bool, layers: int = 4, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 50)
        self.checkpointed = checkpointed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            if self.checkpointed:
                hidden = checkpoint(block, hidden, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


def build(checkpointed: bool = False, device: str = "cpu") -> Callable[[], Step]:
    def make() -> Step:
        model = Net(checkpointed).to(device)
        tokens = torch.randint(0, 50, (8, 64), device=device)
        return Step.of(model, {"tokens": tokens}, optimizer=torch.optim.AdamW(model.parameters()))

    return make


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def trace(request: pytest.FixtureRequest) -> Trace:
    return trainfit.capture(build(device=request.param), device="cpu" if request.param == "cpu" else H100)


@pytest.fixture(scope="module")
def planner() -> Planner:
    trace = trainfit.capture(build(device="cuda"), device=H100)
    return Planner(trace, roofline_costs(trace, PRICES), allocator=None)


def test_full_checkpointing_is_what_torch_does(trace: Trace) -> None:
    """Within a thousandth: the replay does not know the few bytes of bookkeeping in torch's function.

    Torch is told not to keep the state of the random generator; our executor keeps one per region.
    """
    device = trace.device
    real = trainfit.capture(build(True, device), device="cpu" if device == "cpu" else H100)
    seconds = [1.0] * len(trace.ops)
    graphs = [region_graph(trace, call, seconds) for call in candidate_calls(trace)]
    blocks = [g for g in graphs if g is not None and trace.modules[g.module].class_name == "Block"]
    assert len(blocks) == 4
    replayed = rewritten(trace, [effect_of(trace, block, full_recompute(block)) for block in blocks])
    replayed.check()
    predicted, expected = simulate(replayed).peak_bytes, simulate(real).peak_bytes
    assert simulate(trace).peak_bytes > 1.2 * expected
    states = 4 * torch.get_rng_state().numel() if device == "cpu" else 0
    assert predicted - states == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7])
def test_the_promise_is_what_capture_sees_with_the_plan_applied(trace: Trace, share: float) -> None:
    planner = Planner(trace, roofline_costs(trace, PRICES), allocator=None)
    smallest = planner.smallest().peak_bytes
    found = planner.plan(smallest + int(share * (planner.step.peak_bytes - smallest)))
    plan = found.plan
    assert found.fits and plan.regions

    def make() -> Step:
        step = build(device=trace.device)()
        trainfit.apply(step.model, plan)
        return step

    again = trainfit.capture(make, device="cpu" if trace.device == "cpu" else H100)
    assert simulate(again).peak_bytes == plan.peak_bytes


def test_the_replay_of_nothing_is_the_trace(trace: Trace) -> None:
    assert rewritten(trace, []).ops == trace.ops


def test_every_promise_is_within_the_budget_and_more_memory_never_costs_time(planner: Planner) -> None:
    smallest = planner.smallest()
    assert smallest.peak_bytes < 0.7 * planner.step.peak_bytes
    span = planner.step.peak_bytes - smallest.peak_bytes
    before = float("inf")
    for part in range(1, 9):
        budget = smallest.peak_bytes + span * part // 8
        found = planner.plan(budget)
        plan = found.plan
        assert found.fits
        assert plan.peak_bytes <= budget
        assert plan.step_seconds >= plan.bound_seconds - 1e-12
        # Both are within the solver's gap of the best.
        assert plan.step_seconds <= before * 1.003
        before = plan.step_seconds
    assert before == pytest.approx(planner.step.step_seconds)


def test_the_same_trace_prices_and_budget_give_the_same_plan(planner: Planner) -> None:
    again = Planner(planner.trace, planner.costs, allocator=None)
    for share in (0.6, 0.8):
        budget = int(share * planner.step.peak_bytes)
        assert again.plan(budget).plan == planner.plan(budget).plan


def test_nothing_is_planned_where_nothing_is_needed(planner: Planner) -> None:
    found = planner.plan(planner.step.peak_bytes)
    plan = found.plan
    assert found.fits
    assert plan.regions == ()
    assert plan.step_seconds == planner.step.step_seconds


def test_a_budget_that_cannot_be_met_says_what_can(planner: Planner) -> None:
    answer = planner.plan(1000)
    assert not answer.fits
    assert answer.peak_bytes == pytest.approx(planner.smallest().peak_bytes, rel=0.01)


def test_out_of_time_is_not_out_of_memory(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A solver that finds nothing in its time: a usual way still fits, and the gap says what is not known."""
    nothing = Solution([], 0.0, 0.0, feasible=False, optimal=False)
    monkeypatch.setattr(MasterProblem, "solve", lambda *args, **kwargs: nothing)
    monkeypatch.setattr(MasterProblem, "smallest_peak", lambda *args, **kwargs: nothing)
    budget = planner.step.peak_bytes * 9 // 10
    found = planner.plan(budget)
    plan = found.plan
    assert found.fits
    assert plan.peak_bytes <= budget and 1 <= len(plan.regions) <= 4
    assert plan.bound_seconds == planner.step.step_seconds
    assert found.timeline.peak_bytes <= budget


def test_no_baseline_is_better(planner: Planner) -> None:
    """Though this step is so short that following a plan op by op takes longer than all of it."""
    for baseline in baselines(planner.step, planner.step.peak_bytes // 2):
        found = planner.plan(baseline.peak_bytes)
        plan = found.plan
        assert found.fits
        assert plan.step_seconds <= baseline.step_seconds * 1.003


def test_regions_are_never_nested(planner: Planner) -> None:
    found = planner.plan(planner.step.peak_bytes * 7 // 10)
    plan = found.plan
    assert found.fits
    names = [region.module for region in plan.regions]
    assert len(set(names)) == len(names)
    assert not any(a != b and b.startswith(a + ".") for a in names for b in names)


def test_the_frontier_is_sorted_and_not_beaten(planner: Planner) -> None:
    plans = planner.frontier(6)
    peaks = [plan.peak_bytes for plan in plans]
    seconds = [plan.step_seconds for plan in plans]
    assert peaks == sorted(peaks)
    assert seconds == sorted(seconds, reverse=True)
    assert peaks[-1] == planner.step.peak_bytes


def test_batch_norm_may_run_again() -> None:
    """Its running statistics move in a copy then, so that plans may drop its results."""

    def make() -> Step:
        layers = [
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(4)
        ]
        model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 64, 2))
        images = torch.randn(4, 8, 8, 8)
        return Step.of(model, (images,), loss=lambda out: out.square().mean(), optimizer=None)

    trace = trainfit.capture(make, device="cpu")
    plan = Planner(trace, roofline_costs(trace, PRICES), allocator=None).smallest().plan
    decisions = {op.decision for kind in plan.kinds for op in kind.ops if "batch_norm" in op.name}
    assert "recompute" in decisions
    states: list[dict[str, torch.Tensor]] = []
    for planned in (False, True):
        torch.manual_seed(0)
        step = make()
        with trainfit.applied(step.model, plan) if planned else contextlib.nullcontext():
            step.run()
        states.append(step.model.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_passes_that_accumulate_gradients_share_their_decisions() -> None:
    """A model that runs a plan cannot tell the passes apart; the promise holds for all of them."""

    def make() -> Step:
        model = Net(checkpointed=False)
        optimizer = torch.optim.AdamW(model.parameters())
        batches = [torch.randint(0, 50, (rows, 64)) for rows in (6, 8, 8)]

        def run() -> torch.Tensor:
            optimizer.zero_grad()
            for tokens in batches:
                loss = model(tokens)
                loss.backward()
            optimizer.step()
            return loss

        return Step(model=model, optimizer=optimizer, run=run)

    trace = trainfit.capture(make, device="cpu")
    planner = Planner(trace, roofline_costs(trace, PRICES), allocator=None)
    smallest = planner.smallest().peak_bytes
    found = planner.plan((smallest + planner.step.peak_bytes) // 2)
    plan = found.plan
    assert found.fits and plan.regions
    assert {region.call for region in plan.regions} == {0}

    def planned() -> Step:
        step = make()
        trainfit.apply(step.model, plan)
        return step

    again = trainfit.capture(planned, device="cpu")
    assert simulate(again).peak_bytes == plan.peak_bytes


def test_a_model_that_is_checkpointed_already_is_no_trouble() -> None:
    trace = trainfit.capture(build(checkpointed=True), device="cpu")
    costs = roofline_costs(trace, PRICES)
    assert [way.name for way in baselines(Unplanned.of(trace, costs), 0)] == ["keep everything"]
    answer = Planner(trace, costs).plan(simulate(trace).peak_bytes // 2)
    assert not answer.fits


class MovesOn(nn.Module):
    """Multiplies by a buffer that every call moves on, as the power iteration of a spectral norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("scale", torch.ones(16))
        self.scale: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.scale.mul_(0.9)
        return (self.linear(x) * self.scale.clone()).exp().sin().cos()


def test_what_the_next_call_overwrites_is_kept() -> None:
    def build() -> Step:
        torch.manual_seed(0)
        part = MovesOn()
        model = nn.Sequential(nn.Linear(16, 16), part, nn.Tanh(), part)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Step.of(model, torch.randn(64, 16), loss=torch.mean, optimizer=optimizer)

    trace = trainfit.capture(build)
    plan = Planner(trace, roofline_costs(trace, PRICES), allocator=None).smallest().plan
    assert ("Sequential.1", 0) in [(region.module, region.call) for region in plan.regions]
    assert compare_results(build, plan).differences == ()


class OwnCheckpoint(nn.Module):
    """Checkpoints a part of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: self.down(self.up(x).tanh()), x.sin(), use_reentrant=False)


def test_what_checkpoints_itself_is_not_a_region() -> None:
    """Around it, a plan would promise less than it needs."""

    def build() -> Step:
        model = nn.Sequential(nn.Linear(16, 16), OwnCheckpoint(), nn.Sequential(nn.Linear(16, 64), nn.Tanh()))
        return Step.of(model, torch.randn(64, 16), loss=torch.mean)

    trace = trainfit.capture(build)
    modules = {
        trace.module_name(trace.calls[call].module): region_graph(trace, call, [0.0] * len(trace.ops))
        for call in candidate_calls(trace)
    }
    assert modules["Sequential.1"] is None and modules["Sequential"] is None
    assert modules["Sequential.2"] is not None
