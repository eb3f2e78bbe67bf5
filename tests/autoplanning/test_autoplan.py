"""`trainfit.autoplan`: what it does, that training is the same afterwards, and that nothing was touched."""

from __future__ import annotations

import copy
import random
import weakref
from typing import Any

import numpy
import pytest
import torch
from small_loops import Loop, all_state, batches, make_loop, same
from torch import nn

import trainfit
from trainfit import autoplan
from trainfit.applying import runs_plan
from trainfit.applying.region import RegionCall
from trainfit.errors import BudgetTooSmall, OptionError, PlanError, StepError
from trainfit.steps.step import Step
from trainfit.traces.simulate import simulate
from trainfit.traces.trace_store import operators_hash
from trainfit.verifying.measuring import measure_step

SHARE = 0.8


def needed_bytes() -> int:
    model, _, step = make_loop()
    return autoplan(model, step, batches(1)[0]).needed_bytes


@pytest.fixture(scope="module")
def budget() -> int:
    return int(needed_bytes() * SHARE)


def held_by(model: nn.Module, batch: torch.Tensor) -> dict[int, int]:
    """Return the bytes of parameters, buffers and a batch, by address: the tied weight counts once."""
    return {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers(), batch)}


@pytest.fixture
def region_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    ran: list[int] = []
    original = RegionCall.run
    monkeypatch.setattr(RegionCall, "run", lambda *args: ran.append(1) or original(*args))
    return ran


def train(loop: Loop, before: int, budget: int | str | None) -> tuple[list[float], dict[str, Any]]:
    """Train six steps; before one of them, plan if a budget is given."""
    model, optimizer, step = loop
    losses = []
    for number, batch in enumerate(batches(6)):
        if number == before and budget is not None:
            autoplan(model, step, batch, budget=budget)
        losses.append(step(batch))
    state = all_state(model, optimizer)
    return losses, {key: state[key] for key in ("values", "optimizers", "random")}


@pytest.mark.parametrize("before", [0, 3], ids=["at the start", "in the middle"])
@pytest.mark.parametrize("fits", [True, False], ids=["fits", "planned"])
def test_training_is_the_same(budget: int, region_calls: list[int], before: int, fits: bool) -> None:
    without = train(make_loop(), before, None)
    with_it = train(make_loop(), before, "1GiB" if fits else budget)
    assert with_it[0] == without[0]
    assert same(with_it[1], without[1])
    assert bool(region_calls) is not fits


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("accumulating", [False, True])
def test_nothing_is_touched(steps: int, accumulating: bool) -> None:
    model, optimizer, step = make_loop()
    for batch in batches(steps):
        step(batch)
    if accumulating:
        model(batches(1)[0]).sum().backward()
    random.seed(3)
    numpy.random.seed(3)
    calls = [part.calls for part in model.parts]
    before, schedule = all_state(model, optimizer), dict(step.schedule.state_dict())
    others = random.getstate(), numpy.random.get_state()[1].tolist()
    done = autoplan(model, step, batches(1)[0], budget="1GiB")
    assert done.fits and done.plan is None and not runs_plan(model)
    assert same(all_state(model, optimizer), before)
    assert step.schedule.state_dict() == schedule
    assert len(step.losses) == steps
    assert [part.calls for part in model.parts] == calls
    assert others == (random.getstate(), numpy.random.get_state()[1].tolist())
    assert model.last.weight is model.first.weight


class OwnLoop:
    """A loop as people write it in a class: mixed precision, accumulation over calls, a moving average."""

    def __init__(self) -> None:
        self.model, self.optimizer, _ = make_loop()
        self.average = copy.deepcopy(self.model)
        self.scaler = torch.amp.GradScaler("cpu")
        self.calls, gone = 0, nn.Linear(1, 1)
        self.gone = weakref.proxy(gone)

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        with torch.autocast("cpu", torch.bfloat16):
            loss = (self.model(batch["x"]) - batch["y"]).square().mean()
        self.scaler.scale(loss).backward()
        self.calls += 1
        if self.calls % 2 == 0:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            with torch.no_grad():
                for mean, weight in zip(self.average.parameters(), self.model.parameters()):
                    mean.lerp_(weight, 0.1)
        return loss.item()


def test_a_loop_in_a_class_trains_the_same(region_calls: list[int]) -> None:
    one, other = OwnLoop(), OwnLoop()
    data = [{"x": batch, "y": batch.roll(1, 0)} for batch in batches(4)]
    needed = autoplan(other.model, other.step, data[0]).needed_bytes
    done = autoplan(other.model, other.step, data[0], budget=int(needed * 0.9))
    assert done.plan is not None and done.trace.settings.optimizer_class == "AdamW"
    for loop in (one, other):
        torch.manual_seed(5)
        loop.losses = [loop.step(batch) for batch in data]  # type: ignore[attr-defined]
    assert one.losses == other.losses and region_calls  # type: ignore[attr-defined]
    assert same(one.model.state_dict(), other.model.state_dict())
    assert same(one.average.state_dict(), other.average.state_dict())
    assert one.scaler.state_dict() == other.scaler.state_dict()


def test_a_capture_of_the_running_step_is_that_of_the_step_built_for_it() -> None:
    model, _, step = make_loop()
    done = autoplan(model, step, batches(1)[0])

    def build() -> Step:
        model, optimizer, step = make_loop()
        batch = torch.randn(batches(1)[0].shape)
        return Step(model, optimizer, lambda: step(batch))

    built = trainfit.capture(build)
    assert done.needed_bytes == simulate(built).peak_bytes
    assert operators_hash(done.trace) == operators_hash(built)
    assert done.trace.settings.optimizer_class == "AdamW"


def test_the_planned_step_needs_what_it_promises(budget: int) -> None:
    model, optimizer, step = make_loop()
    batch = batches(1)[0]
    done = autoplan(model, step, batch, budget=budget)
    assert done.plan is not None and not done.fits
    measured = measure_step(lambda: Step(model, optimizer, lambda: step(batch)), "cpu").peak_bytes
    # What was there before the measurement began is not in it.
    total = measured + sum(held_by(model, batch).values())
    assert total <= budget
    assert total == done.plan.peak_bytes


def test_what_was_done_is_one_line(budget: int) -> None:
    model, _, step = make_loop()
    done = autoplan(model, step, batches(1)[0], budget=budget)
    assert "\n" not in done.text
    assert done.text.startswith(f"trainfit: plan applied: {len(done.plan.regions)} region")
    assert "time per step (predicted in" in done.text
    assert repr(done) == f"<AutoPlan: {done.text}>"
    other, _, its_step = make_loop()
    text = autoplan(other, its_step, batches(1)[0], budget="1GiB").text
    assert text.startswith("trainfit: fits without a plan: nothing done. The step needs")


def test_a_step_object_is_taken_as_well(budget: int) -> None:
    model, optimizer, step = make_loop()
    batch = batches(1)[0]
    whole = Step(model, optimizer, lambda: step(batch))
    assert autoplan(model, whole, budget=budget).plan is not None
    trainfit.remove(model)
    with pytest.raises(OptionError, match="a Step has its batch itself"):
        autoplan(model, whole, batch)
    with pytest.raises(StepError, match="not the one of the Step"):
        autoplan(nn.Linear(2, 2), whole)


def test_the_budget_is_what_is_free_with_what_is_there_already(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainfit.autoplanning import at_hand

    monkeypatch.setattr(at_hand, "free_bytes", lambda kind: 1 << 30)
    model, _, step = make_loop()
    batch = batches(1)[0]
    there = (1 << 30) + sum(held_by(model, batch).values())
    assert autoplan(model, step, batch).budget_bytes == there
    assert autoplan(model, step, batch, reserve="64MiB").budget_bytes == there - (64 << 20)
    assert autoplan(model, step, batch, reserve=5).budget_bytes == there - 5
    with pytest.raises(OptionError, match="reserve leaves free is all"):
        autoplan(model, step, batch, reserve="100%")


def test_a_budget_that_no_plan_meets_leaves_everything_as_it_is() -> None:
    model, optimizer, step = make_loop()
    before = all_state(model, optimizer)
    with pytest.raises(BudgetTooSmall, match=r"no plan fits into 100\.00 KiB"):
        autoplan(model, step, batches(1)[0], budget="100KiB")
    assert not runs_plan(model)
    assert same(all_state(model, optimizer), before)


# What is refused ------------------------------------------------------------------------------------------


def test_what_makes_no_sense_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, step = make_loop()
    batch = batches(1)[0]
    with pytest.raises(StepError, match=r"a torch\.nn\.Module and its step, got int"):
        autoplan(3, step)  # type: ignore[arg-type]
    with pytest.raises(StepError, match="a function that runs one training step"):
        autoplan(model, 3)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="give budget= or reserve="):
        autoplan(model, step, batch, budget="1GiB", reserve="1GiB")
    with pytest.raises(OptionError, match="h100-sxm-80gb is a cuda device"):
        autoplan(model, step, batch, device="h100-sxm")
    with pytest.raises(OptionError, match="reserve is a number of bytes"):
        autoplan(model, step, batch, reserve=-1)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(PlanError, match="this is one of 4 processes"):
        autoplan(model, step, batch)


def test_a_model_that_runs_a_plan_is_refused(budget: int) -> None:
    model, _, step = make_loop()
    autoplan(model, step, batches(1)[0], budget=budget)
    with pytest.raises(PlanError, match="runs a plan already"):
        autoplan(model, step, batches(1)[0], budget=budget)


def test_a_step_that_fails_leaves_everything_as_it_was() -> None:
    model, optimizer, step = make_loop()
    step(batches(1)[0])

    def failing(batch: torch.Tensor) -> None:
        step(batch)
        raise ValueError("no more")

    before = all_state(model, optimizer)
    with pytest.raises(trainfit.UserCodeError, match="no more"):
        autoplan(model, failing, batches(1)[0])
    assert same(all_state(model, optimizer), before)
    step(batches(1)[0])
