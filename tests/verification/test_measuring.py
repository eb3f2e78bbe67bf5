"""Real runs: how often, compiled or not, with data that ends, on a busy machine, in the memory there is."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from fake_machine import FakeMachine
from torch import nn

from trainfit.api import request
from trainfit.api.prove import verify, verify_step
from trainfit.api.request import Request
from trainfit.capturing import capture, session
from trainfit.capturing.compiled import noticed
from trainfit.devices.device_table import find_device
from trainfit.errors import MemoryGuard, OptionError, StepError, UserCodeError
from trainfit.plans.plan import Plan
from trainfit.steps.step import Step
from trainfit.traces.simulate import simulate
from trainfit.traces.step_runs import Steps
from trainfit.verifying import measuring, verification
from trainfit.verifying.measuring import Measurement, RunCounts, measure_step
from trainfit.verifying.verification import Verification

CPU = find_device("cpu")


class Net(nn.Module):
    """A little of everything that a compiler joins."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.down(torch.relu(self.up(x)).sin()).square().mean()
        return loss


def step_of(model: nn.Module, call: Callable[[], torch.Tensor], calls: list[int] | None = None) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> torch.Tensor:
        if calls is not None:
            calls.append(1)
        loss = call()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Step(model, optimizer, run)


def plain(calls: list[int] | None = None) -> Step:
    model, x = Net(), torch.randn(16, 8)
    return step_of(model, lambda: model(x), calls)


def verified(build: Callable[[], Step], **options: Any) -> Verification:
    options = {"costs": "roofline", "meter": FakeMachine(0.0).meter(), **options}
    request = Request(build, CPU, costs=options.pop("costs"), steps=options.pop("steps", None))
    return verify_step(request, **options)


def test_refresh_measures_operators_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    price = request.price_trace

    def noted(*args: Any, refresh: bool = False, **kwargs: Any) -> Any:
        asked.append(refresh)
        return price(*args, refresh=False, **kwargs)

    monkeypatch.setattr(request, "price_trace", noted)
    for refresh in (False, True):
        verify(plain, costs="roofline", refresh=refresh, runs=1)
    assert asked == [False, True]


# How often ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timed", [0, 1, 4, measuring.TIMED_RUNS])
def test_run_is_called_as_often_as_the_result_says(timed: int) -> None:
    calls: list[int] = []
    found = measure_step(lambda: plain(calls), "cpu", timed=timed)
    assert found.runs == RunCounts(warm_up=1, observed=1, timed=timed)
    assert len(calls) == found.runs.total == timed + 2
    assert found.seconds > 0 and not found.notes and not found.compiled


def test_slow_steps_are_timed_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_ENOUGH_SECONDS", 0.0)
    assert measure_step(plain, "cpu").runs.timed == 3


def test_a_plan_doubles_the_runs_and_compares_twice() -> None:
    calls: list[int] = []
    trace = capture(plain)
    calls.clear()
    found = verified(lambda: plain(calls), plan=no_regions(simulate(trace).peak_bytes), runs=2)
    assert found.comparison is not None
    assert found.runs == {"total": 10, "warm_up": 2, "observed": 2, "timed": 4, "compared": 2}
    hollow = len(calls) - found.runs["total"]
    assert hollow >= 2  # what the capture ran, on tensors without memory


def test_a_second_measurement_finds_no_function_cache_filled_by_the_first() -> None:
    # GIVEN a model that keeps its positions in a cache of the whole process
    @functools.lru_cache
    def positions(length: int) -> torch.Tensor:
        return torch.arange(length).float() + 0.5

    def build() -> Step:
        model, x = Net(), torch.randn(16, 8)
        return step_of(model, lambda: model(x + positions(8)))

    # WHEN it is measured twice
    predicted = simulate(capture(build))
    first, second = (measure_step(build, "cpu", timed=0) for _ in range(2))
    # THEN both allocate the positions, as predicted
    assert first.persistent_bytes == second.persistent_bytes
    assert first.peak_bytes == second.peak_bytes == predicted.peak_bytes
    assert positions.cache_info().currsize == 0


@pytest.mark.parametrize("runs", [0, -1, 1001, True, 2.0])
def test_a_number_of_runs_that_makes_no_sense(runs: Any) -> None:
    with pytest.raises(OptionError, match=f"--runs must be a whole number from 1 to 1000, got {runs}"):
        verify(plain, runs=runs)


def no_regions(peak_bytes: int) -> Plan:
    """Return a plan that changes nothing."""
    return Plan(
        target="net",
        device="cpu",
        torch=torch.__version__,
        trace_hash="",
        budget_bytes=peak_bytes,
        kinds=(),
        regions=(),
        peak_bytes=peak_bytes,
        memory_bytes=peak_bytes,
        step_seconds=1.0,
        baseline_peak_bytes=peak_bytes,
        baseline_step_seconds=1.0,
        bound_seconds=1.0,
    )


# Data that ends -------------------------------------------------------------------------------------------


def with_data(
    batches: Callable[[], Iterable[torch.Tensor]], *, in_generator: bool = False
) -> Callable[[], Step]:
    def build() -> Step:
        model, data = Net(), iter(batches())

        def losses() -> Iterator[torch.Tensor]:
            while True:
                yield model(next(data))

        generator = losses()
        return step_of(model, lambda: next(generator) if in_generator else model(next(data)))

    return build


@pytest.mark.parametrize("in_generator", [False, True])
@pytest.mark.parametrize(("batches", "timed"), [(2, 0), (3, 1), (5, 3), (100, 10)])
def test_a_loader_that_ends_ends_the_timing(batches: int, timed: int, in_generator: bool) -> None:
    build = with_data(lambda: [torch.randn(16, 8)] * batches, in_generator=in_generator)
    found = measure_step(build, "cpu")
    assert found.runs.timed == timed and found.seconds > 0
    if timed == 10:
        assert found.notes == ()
    else:
        (note,) = found.notes
        said = f"{timed} of 10 steps were timed" if timed else "no step was timed by itself"
        assert note == f"the step's data ended while it was timed: {said}"


def test_the_result_says_that_the_data_ended() -> None:
    found = verified(with_data(lambda: [torch.randn(16, 8)] * 4))
    assert found.runs["timed"] == 2
    assert "the step's data ended while it was timed: 2 of 10 steps were timed" in found.warnings
    assert found.error == 0.0


def quietly_ending(batches: int) -> Callable[[], Step]:
    """A loop over data that ends without an error, after which a step does nothing."""

    def build() -> Step:
        model, data = Net(), iter([torch.randn(16, 8)] * batches)
        whole = step_of(model, lambda: model(current[0]))
        current: list[torch.Tensor] = []

        def run() -> torch.Tensor | None:
            for current[:1] in ([batch] for batch in data):
                loss: torch.Tensor = whole.run()
                return loss
            return None

        return Step(model, whole.optimizer, run)

    return build


@pytest.mark.parametrize(("batches", "timed"), [(2, 0), (3, 1), (5, 3), (100, 10)])
def test_runs_that_do_nothing_are_not_timed(batches: int, timed: int) -> None:
    found = measure_step(quietly_ending(batches), "cpu")
    assert found.runs.timed == timed
    assert found.seconds > 50e-6  # a run that does nothing takes less than one that computes
    assert len(found.notes) == (timed < 10)
    assert all(note.startswith("the step did nothing when it was timed again") for note in found.notes)


def test_a_run_that_does_nothing_is_not_measured() -> None:
    with pytest.raises(StepError, match=r"trained in its first 3 runs and did nothing in the next.*cycle"):
        measure_step(quietly_ending(3), "cpu", steps=Steps(recorded=4))


def test_a_step_without_an_optimizer_may_leave_nothing_behind() -> None:
    def build() -> Step:
        model, x = Net(), torch.randn(16, 8)

        def run() -> None:
            model(x).backward()
            model.zero_grad()

        return Step(model, None, run)

    assert measure_step(build, "cpu").runs.timed == 10


def test_a_loader_with_one_batch_is_a_clear_mistake() -> None:
    with pytest.raises(UserCodeError) as caught:
        verified(with_data(lambda: [torch.randn(16, 8)]))
    message = str(caught.value)
    assert "raised StopIteration: its data ended. run() is called several times" in message
    assert "itertools.cycle" in message


def test_an_error_while_the_step_is_timed_is_an_error() -> None:
    def build() -> Step:
        model, numbers = Net(), itertools.count()

        def call() -> torch.Tensor:
            if next(numbers) == 4:
                raise ValueError("the fifth batch is bad")
            loss: torch.Tensor = model(torch.randn(16, 8))
            return loss

        return step_of(model, call)

    with pytest.raises(UserCodeError, match="the real step raised ValueError: the fifth batch is bad"):
        verified(build, steps=1)


# Compiled -------------------------------------------------------------------------------------------------


class Backend:
    """A compiler that leaves the graph as it is, and counts how often it runs."""

    def __init__(self) -> None:
        self.graphs = self.runs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.runs += 1
            return graph.forward(*args)

        return run


def compiled_method(backend: Backend) -> Step:
    model, x = Net(), torch.randn(16, 8)
    model.compile(backend=backend)
    return step_of(model, lambda: model(x))


def compiled_model(backend: Backend) -> Step:
    model, x = Net(), torch.randn(16, 8)
    compiled = torch.compile(model, backend=backend)
    return step_of(model, lambda: compiled(x))


def compiled_function(backend: Backend) -> Step:
    model, x = Net(), torch.randn(16, 8)

    @torch.compile(backend=backend)
    def loss() -> torch.Tensor:
        found: torch.Tensor = model(x)
        return found

    return step_of(model, loss)


class Stack(nn.Module):
    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = Net()
        self.last.compile(backend=backend)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.last(self.first(x))
        return loss


def compiled_block(backend: Backend) -> Step:
    model, x = Stack(backend), torch.randn(16, 8)
    return step_of(model, lambda: model(x))


COMPILED = (compiled_method, compiled_model, compiled_function, compiled_block)


@pytest.fixture(autouse=True)
def _compile_anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which torch's compiler asks every tensor for
@pytest.mark.parametrize("make", COMPILED)
def test_what_is_compiled_runs_compiled(make: Callable[[Backend], Step]) -> None:
    backend = Backend()
    found = measure_step(lambda: make(backend), "cpu", timed=2)
    assert found.compiled and backend.graphs == 1
    assert backend.runs == found.runs.total
    assert found.runs.warm_up == 2  # one compiles, and the next one does not


@pytest.mark.parametrize("make", COMPILED)
def test_unless_it_is_told_to_run_eagerly(make: Callable[[Backend], Step]) -> None:
    backend = Backend()
    found = measure_step(lambda: make(backend), "cpu", timed=2, eager=True)
    assert not found.compiled and backend.graphs == backend.runs == 0
    assert found.runs.warm_up == 1


def test_a_step_that_compiles_nothing_says_nothing() -> None:
    assert capture(plain).warnings == ()
    assert not measure_step(plain, "cpu", timed=0).compiled


@pytest.mark.filterwarnings("ignore")  # that flex_attention is slow without a compiler
def test_what_torch_compiles_by_itself_is_not_the_users() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    noticed_calls: list[int] = []
    query = torch.randn(1, 1, 16, 8)
    with noticed(lambda: noticed_calls.append(1)), torch.compiler.set_stance("force_eager"):
        flex_attention(query, query, query)
        assert not noticed_calls
        torch.compile(nn.Linear(8, 8), backend="eager")(query)
        assert noticed_calls


def test_a_compiled_step_is_compared_with_the_predicted_eager_one() -> None:
    backend = Backend()
    found = verified(lambda: compiled_method(backend))
    assert found.measured.compiled and backend.runs > 0
    assert any("captured as eager PyTorch runs it" in warning for warning in found.warnings)
    eager = verified(lambda: compiled_method(Backend()), eager=True)
    assert not eager.measured.compiled and eager.error == 0.0


def test_a_step_that_compiles_again_and_again_ends() -> None:
    def build() -> Step:
        model, sizes = Net(), itertools.count(2)
        compiled = torch.compile(model, backend="eager", dynamic=False)
        return step_of(model, lambda: compiled(torch.randn(next(sizes), 8)))

    with torch._dynamo.config.patch(recompile_limit=3, accumulated_recompile_limit=64):
        assert measure_step(build, "cpu", timed=1).runs.warm_up <= 20


def late(
    backend: Backend, begins: int, *, calls: list[int], batches: int = 1000, every: int = 1
) -> Callable[[], Step]:
    """Return a step that is eager, and from its `begins`-th run on compiled, `every` so many runs."""

    def build() -> Step:
        model, numbers = Net(), itertools.count(1)
        compiled, data = torch.compile(model, backend=backend), iter([torch.randn(16, 8)] * batches)

        def call() -> torch.Tensor:
            number, x = next(numbers), next(data)
            runs_compiled = number >= begins and (number - begins) % every == 0
            loss: torch.Tensor = (compiled if runs_compiled else model)(x)
            return loss

        return step_of(model, call, calls)

    return build


NOT_STEADY = "the step did not become steady: something was compiled while it was measured"


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("begins", [2, 3, 4, 9])
def test_what_is_compiled_late_is_measured_compiled(begins: int) -> None:
    backend, calls = Backend(), list[int]()
    found = measure_step(late(backend, begins, calls=calls), "cpu")
    assert found.compiled and found.notes == ()
    assert found.runs.timed == 10 and len(calls) == found.runs.total
    # All that was measured in the end ran compiled, and nothing was compiled any more.
    assert backend.runs >= 1 + 10 and backend.graphs == 1
    eager = measure_step(late(backend, begins, calls=[]), "cpu", eager=True)
    assert not eager.compiled and eager.notes == () and eager.runs.warm_up == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_step_that_is_compiled_now_and_then_says_so() -> None:
    backend, calls = Backend(), list[int]()
    found = measure_step(late(backend, 4, calls=calls, every=2), "cpu")
    assert [note.startswith(NOT_STEADY) for note in found.notes] == [True]
    assert len(calls) == found.runs.total


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_without_data_for_more_runs_the_result_is_the_eager_one_and_says_so() -> None:
    backend, calls = Backend(), list[int]()
    found = measure_step(late(backend, 4, calls=calls, batches=4), "cpu", timed=3)
    assert not found.compiled and found.peak_bytes == measure_step(plain, "cpu", timed=0).peak_bytes
    assert [note.startswith(NOT_STEADY) for note in found.notes] == [False, True]
    assert len(calls) == found.runs.total + 1  # the first run for which there was no data


def test_a_compiler_that_fails_is_one_clear_message() -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no C++ compiler was found")

    def build() -> Step:
        model, x = Net(), torch.randn(16, 8)
        model.compile(backend=broken)
        return step_of(model, lambda: model(x))

    with pytest.raises(StepError) as caught:
        verified(build)
    message = str(caught.value)
    assert message.startswith("the step is compiled, and torch's compiler failed on this machine: ")
    assert "no C++ compiler was found" in message and "--eager" in message and "\n" not in message
    assert verified(build, eager=True).error == 0.0


# Memory ---------------------------------------------------------------------------------------------------


def test_nothing_is_run_for_a_step_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a step larger than the free memory, THEN none of its operators runs before it is refused."""
    needed = simulate(capture(plain)).peak_bytes
    monkeypatch.setattr(verification, "free_bytes", lambda kind: needed // 2)
    monkeypatch.setattr(session, "measure_operators", lambda *args: pytest.fail("ran operators"))
    monkeypatch.setattr(request, "price_trace", lambda *args, **kwargs: pytest.fail("timed operators"))
    with pytest.raises(MemoryGuard, match=r"the real step would need .* \(predicted\).*--force"):
        verified(plain)


def test_what_fits_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = simulate(capture(plain)).peak_bytes
    monkeypatch.setattr(verification, "free_bytes", lambda kind: needed * 2)
    assert verified(plain).error == 0.0
    monkeypatch.setattr(verification, "free_bytes", lambda kind: 1)
    assert verified(plain, force=True).error == 0.0


def test_with_a_plan_the_step_without_it_has_to_fit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = simulate(capture(plain)).peak_bytes
    parameters = 4 * sum(parameter.numel() for parameter in Net().parameters())
    plan = no_regions(peak // 4)

    def refusal(free: int) -> str:
        monkeypatch.setattr(verification, "free_bytes", lambda kind: free)
        with pytest.raises(MemoryGuard) as caught:
            verified(plain, plan=plan)
        return str(caught.value)

    # The first guard, before operators are run, sees the step without the plan already.
    assert refusal(peak // 2).startswith("the real step would need")
    assert refusal(round(peak / 0.9) + parameters).startswith("comparing the results of both runs would need")
    monkeypatch.setattr(verification, "free_bytes", lambda kind: round((peak + 3 * parameters + 64) / 0.9))
    assert verified(plain, plan=plan).comparison is not None


def test_the_guard_names_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "free_bytes", lambda kind: 1000)
    with pytest.raises(MemoryGuard, match=r"^the second would need 901 B .* has 1000 B free"):
        verification.guard_memory(CPU, {"the first": 900, "the second": 901})
    verification.guard_memory(CPU, {"the first": 900})


# A busy machine -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.05, 0.57])
def test_the_result_says_that_the_machine_was_busy(share: float) -> None:
    found = verified(plain, meter=FakeMachine(share).meter())
    assert found.measured.load == pytest.approx(share)
    told = "other work took 57% of this machine's processors while the step was measured"
    assert any(warning.startswith(told) for warning in found.warnings) is (share == 0.57)


def test_without_timed_steps_no_load_is_claimed() -> None:
    assert measure_step(plain, "cpu", timed=0, meter=FakeMachine(0.57).meter()).load is None
    assert Measurement(1, 1, 1.0).load is None


def test_what_a_build_lets_go_of_is_not_taken_off() -> None:
    # GIVEN a build that keeps its step in a global variable, so that the next one frees what it held
    kept: list[Any] = []

    def build() -> Step:
        kept.clear()
        step = plain()
        kept.append((step, torch.ones(1 << 20)))
        return step

    first, second = measure_step(build, "cpu", timed=0), measure_step(build, "cpu", timed=0)
    assert second.peak_bytes == first.peak_bytes
    assert second.persistent_bytes == first.persistent_bytes >= 4 << 20
