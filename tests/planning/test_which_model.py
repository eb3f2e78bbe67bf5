"""Plans are made for the model that the step names, whatever else runs in it."""

from __future__ import annotations

import torch
from torch import nn

import trainfit
from trainfit import Step
from trainfit.traces.trace import Trace
from trainfit.verifying.measuring import measure_step
from trainfit.verifying.plan_comparison import compare_results
from trainfit.workspace.measured import THOROUGH


def network(width: int, depth: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.Linear(width, 32)) for _ in range(depth))
    )


class Student(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = network(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


class Teacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = network(512, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def build_distillation() -> Step:
    """A teacher with ten times the parameters of the student, which is called first."""
    student, teacher = Student(), Teacher().requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    inputs = torch.randn(512, 32)

    def run() -> torch.Tensor:
        with torch.no_grad():
            wanted = teacher(inputs)
        loss = nn.functional.mse_loss(student(inputs), wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Step(student, optimizer, run)


def captured(build: object) -> Trace:
    return trainfit.capturing.capture(build, limits=THOROUGH)  # type: ignore[arg-type]


def test_a_teacher_larger_than_the_student() -> None:
    trace = captured(build_distillation)
    assert trace.modules[trace.model].name == "Student"
    assert all(trace.module_name(number).startswith("Student") for number in trace.in_model)
    before = trainfit.estimate(trace).peak_bytes
    smallest = trainfit.frontier(trace).points[0].plan
    assert smallest.peak_bytes < before
    assert {region.module.split(".")[0] for region in smallest.regions} == {"Student"}
    measured = measure_step(build_distillation, "cpu", smallest, timed=False)
    assert measured.peak_bytes == smallest.peak_bytes
    same = compare_results(build_distillation, smallest)
    assert same.loss.equal and same.gradients.equal


class Parts(nn.Module):
    """Never called as a whole; its first part is called while it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = network(64, 3)
        self.features = self.encoder(torch.zeros(1, 32)).shape[1]
        self.decoder = network(self.features, 1)


def build_parts() -> Step:
    model, inputs = Parts(), torch.randn(256, 32)

    def run() -> torch.Tensor:
        loss = model.decoder(model.encoder(inputs)).square().mean()
        loss.backward()
        model.zero_grad()
        return loss

    return Step(model, None, run)


def test_a_model_that_is_never_called_as_a_whole() -> None:
    trace = captured(build_parts)
    names = [module.name for module in trace.modules]
    assert names[trace.model] == "Parts" and "Parts.encoder.0.1" in names
    assert len(trace.in_model) == len(trace.modules)
    smallest = trainfit.frontier(trace).points[0].plan
    assert smallest.regions
    measured = measure_step(build_parts, "cpu", smallest, timed=False)
    assert measured.peak_bytes == smallest.peak_bytes < trainfit.estimate(trace).peak_bytes


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).square().mean()


def build_wrapped() -> Step:
    model, inputs = Student(), torch.randn(256, 32)
    wrapped = WithLoss(model)

    def run() -> torch.Tensor:
        loss = wrapped(inputs)
        loss.backward()
        model.zero_grad()
        return loss

    return Step(model, None, run)


def test_a_model_that_something_else_is_wrapped_around() -> None:
    trace = captured(build_wrapped)
    smallest = trainfit.frontier(trace).points[0].plan
    assert {region.module.split(".")[0] for region in smallest.regions} == {"Student"}
    measured = measure_step(build_wrapped, "cpu", smallest, timed=False)
    assert measured.peak_bytes == smallest.peak_bytes
