"""Runs that differ: the worst of them is recorded, as in a real run, and what grows is named."""

from __future__ import annotations

import io
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from captured_steps import Build, captured
from rich.console import Console
from torch import nn

import trainfit
from trainfit.basics.units import format_bytes
from trainfit.capturing.random_stream import seeded
from trainfit.errors import OptionError, StepError, UserCodeError
from trainfit.report import json_result
from trainfit.report.reading import estimate_data
from trainfit.report.text_estimates import estimate_view
from trainfit.steps.step import Step
from trainfit.traces.simulate import simulate
from trainfit.traces.trace import Trace
from trainfit.workspace.measured import THOROUGH
from trainfit.workspace.profiler import no_cycle_collection, profile_allocations

pytestmark = pytest.mark.usefixtures("little_garbage")


def real_peaks(build: Build, runs: int) -> list[int]:
    """Return the measured peak of each of the first runs."""
    with seeded(), no_cycle_collection(), profile_allocations() as log:
        step = build()
        for run in range(runs):
            with log.range(f"run {run}"):
                result = step.run()
            del result
    return [log.usage(f"run {run}").peak_bytes for run in range(runs)]


def assert_worst_of(build: Build, runs: int) -> Trace:
    """The recorded run is the worst of so many real ones, to the byte."""
    trace = captured(build, limits=THOROUGH)
    real = real_peaks(build, runs)
    peak = simulate(trace).peak_bytes
    assert peak == max(real)
    assert peak == real[trace.steps.recorded - 1]
    return trace


def model_and(optimizer: Callable[..., torch.optim.Optimizer]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 48))
    return model, optimizer(model.parameters(), lr=0.01)


def loss_of(model: nn.Module, batch: int = 16) -> torch.Tensor:
    return model(torch.ones(batch, 48)).square().mean()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_an_ordinary_step_runs_twice(kind: type[torch.optim.Optimizer]) -> None:
    def build() -> Step:
        model, optimizer = model_and(kind)

        def run() -> None:
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()

        return Step(model, optimizer, run)

    trace = assert_worst_of(build, 12)
    steps = trace.steps
    assert (steps.recorded, steps.looked_at, steps.differ, steps.complete) == (2, 2, False, True)
    assert steps.changing == () and trace.warnings == ()


def build_accumulating(every: int) -> Step:
    """Gradients are accumulated in so many calls; a counter decides."""
    model, optimizer = model_and(torch.optim.Adam)
    calls = 0

    def run() -> None:
        nonlocal calls
        calls += 1
        loss_of(model).backward()
        if calls % every == 0:
            optimizer.step()
            optimizer.zero_grad()

    return Step(model, optimizer, run)


def test_an_optimizer_that_steps_every_fourth_time() -> None:
    trace = assert_worst_of(lambda: build_accumulating(4), 16)
    steps = trace.steps
    assert steps.first == 5 and steps.recorded % 4 == 0
    assert steps.differ and steps.changing == ("calls",) and not steps.grows
    assert any(storage.category == "optimizer_state" for storage in trace.storages)


class Trainer:
    """What people write: a class with a counter, which copies the weights every tenth step."""

    def __init__(self) -> None:
        self.model, self.optimizer = model_and(torch.optim.AdamW)
        self.steps = 0

    def train(self) -> torch.Tensor:
        loss = loss_of(self.model)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        if self.steps % 10 == 0:
            copies = [parameter.detach().clone() for parameter in self.model.parameters()]
            for parameter, copy in zip(self.model.parameters(), [copy * 0.5 + 1 for copy in copies]):
                parameter.data.copy_(copy)
        return loss


def build_every_tenth() -> Step:
    trainer = Trainer()
    return Step(trainer.model, trainer.optimizer, trainer.train)


def test_extra_work_every_ten_steps() -> None:
    trace = assert_worst_of(build_every_tenth, 13)
    assert trace.steps.recorded == 10 and trace.steps.changing == ("self.steps",)


class EveryThird(torch.optim.SGD):
    """An optimizer of one's own, which averages weights every third time (Lookahead)."""

    def __init__(self, parameters: object, lr: float) -> None:
        super().__init__(parameters, lr=lr)  # type: ignore[arg-type]
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        super().step()
        self.calls += 1
        if self.calls % 3 == 0:
            for group in self.param_groups:
                for parameter in group["params"]:
                    slow = self.state[parameter].setdefault("slow", torch.zeros_like(parameter))
                    slow.add_((parameter - slow) * 0.5)
                    parameter.copy_(slow)


def test_an_optimizer_of_ones_own_with_a_counter() -> None:
    def build() -> Step:
        model, optimizer = model_and(EveryThird)

        def run() -> None:
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()

        return Step(model, optimizer, run)

    trace = assert_worst_of(build, 13)
    assert trace.steps.differ and not trace.steps.grows


def test_a_list_that_holds_graphs_is_a_leak() -> None:
    def build() -> Step:
        model, optimizer = model_and(torch.optim.SGD)
        history: list[torch.Tensor] = []

        def run() -> None:
            history.append(model(torch.ones(32, 48)).relu().mean())
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()

        return Step(model, optimizer, run)

    trace = captured(build, limits=THOROUGH)
    steps = trace.steps
    real = real_peaks(build, steps.looked_at)
    assert simulate(trace).peak_bytes == max(real) == real[-1] and steps.recorded == steps.looked_at
    assert steps.growth_bytes == real[-1] - real[-2] > 10_000
    assert {growth.holder for growth in steps.grows} == {"autograd", "program"}
    assert "test_steps.py:" in steps.grows[0].line
    (warning,) = trace.warnings
    assert f"with every run of the step, and still did after {steps.looked_at} runs" in warning
    assert "`history` changes" in warning and "held by autograd, for a result that Python holds" in warning


def test_what_is_replaced_by_more_with_every_run_is_a_leak() -> None:
    def build() -> Step:
        model, optimizer = model_and(torch.optim.SGD)
        memory = torch.zeros(0, 48)

        def run() -> None:
            nonlocal memory
            memory = torch.cat([memory, torch.ones(16, 48)])
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()

        return Step(model, optimizer, run)

    trace = assert_worst_of(build, 37)
    assert trace.steps.growth_bytes == 16 * 48 * 4
    (growth,) = trace.steps.grows
    assert growth.producer == "aten.cat.default" and "test_steps.py:" in growth.line


def test_a_list_that_grows_now_and_then_is_a_leak() -> None:
    def build() -> Step:
        model, optimizer = model_and(torch.optim.SGD)
        history: list[torch.Tensor] = []
        calls = 0

        def run() -> None:
            nonlocal calls
            calls += 1
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
            if calls % 10 == 0:
                history.append(torch.ones(100, 100))

        return Step(model, optimizer, run)

    trace = captured(build)
    assert any("memory grows by" in warning and "aten.ones" in warning for warning in trace.warnings)
    assert trace.steps.growth_bytes == pytest.approx(100 * 100 * 4 / 10, rel=0.5)


def test_an_optimizer_that_steps_late_is_counted_when_it_has_stepped() -> None:
    trace = captured(lambda: build_accumulating(25))
    assert any(storage.category == "optimizer_state" for storage in trace.storages)
    assert not any("has not stepped" in warning for warning in trace.warnings)


def test_a_queue_grows_until_it_is_full() -> None:
    def build() -> Step:
        model, optimizer = model_and(torch.optim.SGD)
        queue: deque[torch.Tensor] = deque(maxlen=15)

        def run() -> None:
            out = model(torch.ones(16, 48))
            queue.append(out.detach())
            (out @ torch.cat(list(queue)).t()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return Step(model, optimizer, run)

    trace = assert_worst_of(build, 20)
    assert not trace.steps.grows and trace.warnings == ()
    assert trace.steps.recorded >= 15


def test_random_numbers_of_python_decide() -> None:
    def build() -> Step:
        model, optimizer = model_and(torch.optim.SGD)

        def run() -> None:
            loss_of(model, batch=256 if random.random() < 0.5 else 16).backward()
            optimizer.step()
            optimizer.zero_grad()

        return Step(model, optimizer, run)

    trace = assert_worst_of(build, 13)
    assert trace.steps.differ and "random numbers of Python or NumPy" in trace.steps.changing


def test_a_draw_of_torchs_decides() -> None:
    def build() -> Step:
        model, optimizer = model_and(torch.optim.SGD)

        def run() -> None:
            loss_of(model, batch=256 if torch.rand(()) < 0.3 else 16).backward()
            optimizer.step()
            optimizer.zero_grad()

        return Step(model, optimizer, run)

    trace = assert_worst_of(build, 13)
    assert trace.steps.differ


def build_batches(sizes: list[int]) -> Build:
    def build() -> Step:
        model, optimizer = model_and(torch.optim.SGD)
        batches = iter(sizes)

        def run() -> None:
            loss_of(model, next(batches)).backward()
            optimizer.step()
            optimizer.zero_grad()

        return Step(model, optimizer, run)

    return build


def test_the_end_of_the_data_ends_the_looking() -> None:
    trace = assert_worst_of(build_batches([16, 16, 64, 8]), 4)
    assert trace.steps.recorded == 3 and trace.steps.looked_at == 4 and not trace.steps.complete
    (warning,) = trace.warnings
    assert "only 4 runs of the step were looked at" in warning and "`batches` changes" in warning


def test_a_result_that_names_the_run() -> None:
    found = trainfit.estimate(build_every_tenth)
    result = json_result.result_json(estimate_data(found))["steps"]
    assert result["looked_at"] == 13 and result["recorded"] == 10 and result["differ"]
    assert result["leak_bytes_per_step"] == 0 and not result["leaks"]
    assert result["largest_peak_bytes"] == found.trace.observed_peak_bytes > result["smallest_peak_bytes"]
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(estimate_view(estimate_data(found)))
    shown = console.export_text()
    assert "Steps differ: of runs 2 to 13, with peaks from " in shown and "this is run 10" in shown


@pytest.mark.parametrize("steps", [0, -1, True, 10_001, 2.0])
def test_numbers_of_steps_that_are_refused(steps: int) -> None:
    for ask in (trainfit.estimate, trainfit.plan, trainfit.frontier, trainfit.verify):
        with pytest.raises(OptionError, match="--steps must be a whole number from 1 to 10,000, got"):
            ask("gpt2-tiny", steps=steps)  # type: ignore[operator]


def test_verify_measures_the_run_that_was_recorded() -> None:
    found = trainfit.verify(build_every_tenth, costs="roofline")
    assert found.error == 0.0 and found.trace.steps.recorded == 10


def test_data_for_one_run_is_not_enough() -> None:
    with pytest.raises(UserCodeError, match="StopIteration"):
        captured(build_batches([16]))


def quietly_ending(batches: int) -> Step:
    """A loop over an iterator that ends without an error."""
    model, optimizer = model_and(torch.optim.Adam)
    left = iter(range(batches))

    def run() -> None:
        for _ in left:
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
            break

    return Step(model, optimizer, run)


def test_data_that_ends_quietly_for_all_runs_that_count_is_refused() -> None:
    with pytest.raises(StepError, match=r"trains when it is called first, and no more.*itertools.cycle"):
        captured(lambda: quietly_ending(1))


def test_runs_that_do_nothing_do_not_count() -> None:
    trace = captured(lambda: quietly_ending(4))
    assert simulate(trace).peak_bytes == simulate(captured(lambda: quietly_ending(1000))).peak_bytes
    assert not trace.steps.differ
    said = "the step did nothing in 9 of the first 13 runs, first in run 5: has its data ended?"
    assert any(said in warning for warning in trace.warnings)


def test_steps_says_how_many_runs() -> None:
    from trainfit.capturing import capture

    runs = [16] * 30 + [128] + [16] * 30
    assert simulate(capture(build_batches(runs), steps=40)).peak_bytes == max(
        real_peaks(build_batches(runs), 41)
    )
    assert capture(build_batches(runs), steps=1).steps.looked_at == 2
    usual = capture(build_batches(runs)).steps
    assert usual.looked_at == 13 and usual.complete


def test_an_optimizer_that_never_steps_is_named() -> None:
    def build() -> Step:
        model, optimizer = model_and(torch.optim.Adam)
        return Step(model, optimizer, lambda: loss_of(model).backward())

    trace = captured(build)
    assert not trace.steps.all_stepped
    assert any("an optimizer has not stepped in the first 20 runs" in warning for warning in trace.warnings)


def test_a_first_run_that_needs_more_is_said() -> None:
    def build() -> Step:
        model, optimizer = model_and(torch.optim.SGD)
        first = [True]

        def run() -> None:
            if first:
                first.pop()
                torch.zeros(1 << 20).sum()
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()

        return Step(model, optimizer, run)

    trace = captured(build, limits=THOROUGH)
    assert trace.steps.recorded == 2
    (warning,) = trace.warnings
    assert warning.startswith("run 1 of the step, before it is steady, has a peak of 4")


def build_lbfgs(width: int, history_size: int = 12) -> Build:
    def build() -> Step:
        model = nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 1))
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, history_size=history_size)
        inputs, wanted = torch.randn(64, 16), torch.randn(64, 1)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(inputs) - wanted).square().mean()
            loss.backward()
            return loss

        return Step(model, optimizer, lambda: optimizer.step(closure))

    return build


def test_the_history_of_lbfgs_fills() -> None:
    """With weights that are too large to be known by themselves: all values are computed for it."""
    build = build_lbfgs(width=5000)
    trace = captured(build, limits=THOROUGH)
    real = real_peaks(build, trace.steps.looked_at)
    assert simulate(trace).peak_bytes == max(real) == real[trace.steps.recorded - 1]
    assert not trace.steps.grows and trace.warnings == ()
    parameters = (16 * 5000 + 5000 + 5000 + 1) * 4
    assert sum(s.bytes for s in trace.storages if s.category == "optimizer_state") >= 24 * parameters


def test_a_history_of_lbfgs_that_does_not_fill_is_stated() -> None:
    trace = captured(build_lbfgs(width=5000, history_size=1000), limits=replace(THOROUGH, nbytes=1))
    pair = 2 * (16 * 5000 + 5000 + 5000 + 1) * 4
    (warning,) = [warning for warning in trace.warnings if "LBFGS" in warning]
    assert warning.startswith("LBFGS remembers up to 1000 steps; 0 were there")
    assert f"may take {format_bytes(1000 * pair)}, which is not counted" in warning


def test_looking_at_a_generator_does_not_keep_its_batches() -> None:
    # GIVEN a loader of the user's own, which holds the batch that it hands out
    def build() -> Step:
        model = nn.Linear(16, 16)

        def batches() -> Iterator[torch.Tensor]:
            for number in range(1000):
                batch = torch.randn(8, 16)
                yield batch + number

        loader = batches()

        def run() -> torch.Tensor:
            loss = model(next(loader)).sum()
            loss.backward()
            model.zero_grad()
            return loss

        return Step(model, None, run)

    # THEN every run needs the same, as it does in reality
    trace = assert_worst_of(build, 12)
    assert len(trace.steps.peaks) >= 12 and len(set(trace.steps.peaks[1:])) == 1
