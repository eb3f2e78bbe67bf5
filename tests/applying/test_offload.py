"""Results that a plan offloads: in the host's memory between forward and backward, with the same results."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from planned_models import ConvNet, InPlaceMLP, Subject, Transformer, assert_same_with
from torch import nn

from trainfit.applying import applied, apply, offloaded_results
from trainfit.capturing import capture
from trainfit.costs.roofline import roofline_costs
from trainfit.devices.device_table import this_cpu
from trainfit.planning.host_copies import HostLink
from trainfit.planning.plan_replay import replay_plan
from trainfit.planning.planner import Planner
from trainfit.plans.decisions import Decision
from trainfit.plans.plan import Plan
from trainfit.plans.plan_store import load_plan, save_plan
from trainfit.steps.step import Step
from trainfit.traces.simulate import simulate
from trainfit.verifying.measuring import measure_step
from trainfit.workspace.measured import THOROUGH
from trainfit.workspace.profiler import no_cycle_collection, profile_allocations

FAST = 1e14
"""Bytes per second: so fast that everything is worth a copy."""
COMPUTER = replace(this_cpu(), bandwidth_bytes_per_second=2e10, flops={"fp32": 1e11})


class TwoTowers(nn.Module):
    """Two rows of blocks that do not follow each other, and a block that is called twice."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.left, self.right = (
            nn.ModuleList(
                nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in "ab"
            )
            for _ in "lr"
        )
        self.shared = nn.Sequential(nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = x, x.flip(0)
        for block in self.left:
            left = left + block(left)
        for block in self.right:
            right = right + block(right)
        return (self.shared(left) + self.shared(right)).square().mean()


class Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gated = torch.nn.functional.silu(self.gate(x)) * self.up(x)
        return x + self.down(gated)


class GatedMLP(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Gated(width) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.layers(x)
        return mixed.square().mean()


class Recurrent(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.cell = nn.Sequential(nn.Linear(2 * width, 6 * width), nn.Sigmoid(), nn.Linear(6 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(x[0])
        for row in x:
            state = self.cell(torch.cat([state, row], -1)).tanh()
        return state.square().mean()


class EncoderLayers(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 2, 4 * width, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.encoder(x)
        return mixed.square().mean()


class NormalisedConvolutions(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
            for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


SUBJECTS = {
    "transformer": Subject(
        lambda: Transformer(blocks=4, width=32), lambda: torch.randint(0, 20, (4, 24)), ()
    ),
    "in place": Subject(InPlaceMLP, lambda: 0.1 * torch.randn(100, 12), ()),
    "convolutions": Subject(ConvNet, lambda: torch.randn(4, 3, 16, 16), ()),
    "two towers": Subject(TwoTowers, lambda: torch.randn(64, 48), ()),
    "gated": Subject(GatedMLP, lambda: torch.randn(128, 32), ()),
    "recurrent": Subject(Recurrent, lambda: torch.randn(5, 40, 24), ()),
    "encoder": Subject(EncoderLayers, lambda: torch.randn(4, 20, 32), ()),
    "batch norm": Subject(NormalisedConvolutions, lambda: torch.randn(4, 3, 20, 20), ()),
}


@cache
def planner(name: str, *, overlaps: bool) -> Planner:
    trace = capture(SUBJECTS[name].build, limits=THOROUGH)
    return Planner(trace, roofline_costs(trace, COMPUTER), None, HostLink(FAST, 0.0, overlaps))


@cache
def plan_with_copies(name: str, *, overlaps: bool) -> Plan:
    """Return a plan that has as much as possible in the host's memory, region by region."""
    found = planner(name, overlaps=overlaps)
    options = found.problem.options
    copied = {
        number: sum(len(effect.fetched) for effect in option.effects) for number, option in enumerate(options)
    }
    chosen: list[int] = []
    for number in sorted(copied, key=lambda number: -copied[number]):
        beside = {other for chain in found.problem.exclusive if number in chain for other in chain}
        if copied[number] and beside.isdisjoint(chosen):
            chosen.append(number)
    return found.certified(chosen, found.step.peak_bytes, 0.0).promised()


def planned(name: str, plan: Plan) -> Callable[[], Step]:
    def build() -> Step:
        step = SUBJECTS[name].build()
        apply(step.model, plan)
        return step

    return build


@pytest.mark.parametrize("overlaps", [False, True], ids=["at once", "beside the next block"])
@pytest.mark.parametrize("name", SUBJECTS)
def test_what_is_offloaded_frees_as_much_as_promised_and_changes_nothing(name: str, overlaps: bool) -> None:
    # GIVEN a plan that has results in the host's memory
    plan = plan_with_copies(name, overlaps=overlaps)
    assert plan.host_bytes > 0
    assert any(op.decision is Decision.OFFLOAD for kind in plan.kinds for op in kind.ops)
    # WHEN the step runs with and without it
    without = planner(name, overlaps=overlaps).step.peak_bytes
    error = without - measure_step(SUBJECTS[name].build, "cpu").peak_bytes
    measured = measure_step(planned(name, plan), "cpu").peak_bytes
    # THEN its peak is the promised one, to the byte, or as close as the capture is without a plan
    assert abs(plan.peak_bytes - measured) <= abs(error)
    # AND its results are the same
    assert_same_with(SUBJECTS[name], plan, steps=2)


def test_copies_need_no_memory_of_torch_and_nothing_is_left() -> None:
    plan = plan_with_copies("transformer", overlaps=True)
    model, inputs = SUBJECTS["transformer"].new()
    with applied(model, plan):
        model(inputs).backward()
        gc.collect()
        with no_cycle_collection(), profile_allocations() as log, log.range("step"):
            model(inputs).backward()
    usage = log.usage("step")
    assert usage.end_bytes == usage.start_bytes


def test_what_is_offloaded_is_fetched_for_every_backward() -> None:
    # GIVEN a model that offloads, and a graph that is kept for a second backward
    plan = plan_with_copies("transformer", overlaps=True)
    model, inputs = SUBJECTS["transformer"].new()
    expected = _gradients(model, inputs)
    with applied(model, plan):
        loss = model(inputs)
        # WHEN backward runs twice
        loss.backward(retain_graph=True)
        first = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        model.zero_grad()
        loss.backward()
        second = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    # THEN it finds the same both times
    for name in expected:
        assert torch.equal(expected[name], first[name])
        assert torch.equal(expected[name], second[name])


def _gradients(model: nn.Module, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model(inputs).backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    torch.manual_seed(0)
    return found


def test_a_capture_of_the_model_that_offloads_predicts_its_peak() -> None:
    plan = plan_with_copies("gated", overlaps=False)
    predicted = simulate(capture(planned("gated", plan), limits=THOROUGH)).peak_bytes
    assert predicted == measure_step(planned("gated", plan), "cpu").peak_bytes


def test_the_file_of_a_plan_has_what_is_offloaded_and_beside_what(tmp_path) -> None:
    plan = plan_with_copies("transformer", overlaps=True)
    assert any(region.beside is not None for region in plan.regions)
    save_plan(plan, tmp_path / "plan.json")
    read = load_plan(tmp_path / "plan.json")
    assert read == plan
    # replayed from the file it needs the same
    trace = planner("transformer", overlaps=True).trace
    assert replay_plan(read, trace)[1] == plan.peak_bytes


def test_evaluation_copies_nothing() -> None:
    plan = plan_with_copies("gated", overlaps=True)
    model, inputs = SUBJECTS["gated"].new()
    with applied(model, plan), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        with no_cycle_collection(), profile_allocations() as log, log.range("step"):
            model(inputs)
    assert log.usage("step").end_bytes == log.usage("step").start_bytes


class Stream:
    """Stands in for a GPU's stream: notes what is asked of it, in the order of the program."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.count = name, log, 0

    def __enter__(self) -> None:
        self.log.append(f"on {self.name}")

    def __exit__(self, *exception: object) -> None:
        self.log.append(f"off {self.name}")

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> str:
        self.count += 1
        return f"{self.name} copy {self.count}"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")


def test_copies_of_a_gpu_wait_for_what_they_read_and_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN streams, which are noted
    log: list[str] = []
    streams = {name: Stream(name, log) for name in ("compute", "out", "back")}
    monkeypatch.setattr(offloaded_results, "has_streams", lambda device: True)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: streams["compute"])
    memory = offloaded_results.HostMemory()
    monkeypatch.setattr(memory, "stream", lambda device, direction: streams[direction])
    values = torch.arange(8.0)
    # WHEN a result is copied, freed and fetched
    copy = offloaded_results.HostCopy(memory, values.untyped_storage())
    copied = ["out waits for compute", "on out", "off out"]
    assert log == copied
    copy.free()
    freed = [*copied, "compute waits for out copy 1"]
    assert log == freed
    values.zero_()
    copy.fetch()
    fetched = [*freed, "back waits for compute", "back waits for out copy 1", "on back", "off back"]
    assert log == fetched
    # THEN the device waits for the copy before it uses it, and finds what was there when the region ended
    assert torch.equal(copy.taken().view(torch.float32), torch.arange(8.0))
    assert log == [*fetched, "compute waits for back copy 1"]
    # AND who uses the host's memory next waits until it was read
    del copy, log[:]
    offloaded_results.HostCopy(memory, values.untyped_storage())
    assert log[:2] == ["out waits for compute", "out waits for back copy 1"]
