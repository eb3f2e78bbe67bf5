"""What a step of a running program refers to is lent to a capture, and is afterwards as it was."""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from trainfit import autoplan
from trainfit.autoplanning.at_hand import memory_at_hand
from trainfit.capturing import capture
from trainfit.capturing.lent_tensors import LentState
from trainfit.capturing.python_rollback import PythonRollback
from trainfit.devices.device_table import find_device
from trainfit.devices.hardware import Cuda
from trainfit.errors import StepError, UserCodeError
from trainfit.steps.step import Step
from trainfit.traces.simulate import simulate

Train = Callable[[], Any]
number_of_steps = 0


def trained(model: nn.Module, *inputs: torch.Tensor) -> Train:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> float:
        loss = model(*inputs)
        loss = (loss[0] if isinstance(loss, tuple) else loss).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


# Python state ---------------------------------------------------------------------------------------------


class Slotted:
    __slots__ = ("count", "late")

    def __init__(self) -> None:
        self.count = 0


class Counting(nn.Module):
    made = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.seen: list[int] = []
        self.kinds: Counter[str] = Counter(old=2)
        self.order = OrderedDict(first=1, second=2)
        self.last = deque([1, 2], maxlen=2)
        self.names = {"a"}
        self.slotted = Slotted()
        self.raw = bytearray(b"abc")
        self.array = numpy.zeros(3)
        self.drawn = numpy.random.default_rng(1)
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global number_of_steps
        number_of_steps += 1
        Counting.made += 1
        self.new_name = 1
        self.seen.append(1)
        self.kinds["new"] += 1
        self.order.move_to_end("first")
        self.last.append(3)
        self.names |= {"b"}
        self.slotted.count += 1
        self.slotted.late = 1
        self.raw[0] = 0
        self.array += 1
        self.drawn.random()
        torch.rand(2, generator=self.generator)
        return self.layer(x)


def test_python_state_is_put_back() -> None:
    model = Counting()
    inner: list[int] = []
    total = 0
    step = trained(model, torch.ones(2, 3))

    def counting() -> None:
        nonlocal total
        total += 1
        inner.append(total)
        step()

    drawn = model.drawn.bit_generator.state
    generated = model.generator.get_state()
    autoplan(model, counting)
    assert (total, inner, number_of_steps, Counting.made) == (0, [], 0, 0)
    assert not hasattr(model, "new_name") and not hasattr(model.slotted, "late")
    assert (model.seen, dict(model.kinds), model.slotted.count) == ([], {"old": 2}, 0)
    assert list(model.order) == ["first", "second"]
    assert (list(model.last), model.last.maxlen, model.names) == ([1, 2], 2, {"a"})
    assert (bytes(model.raw), model.array.tolist()) == (b"abc", [0, 0, 0])
    assert model.drawn.bit_generator.state == drawn
    assert torch.equal(model.generator.get_state(), generated)


def test_what_an_ordered_dictionary_was_stays_one() -> None:
    ordered: OrderedDict[str, int] = OrderedDict(a=1, b=2, c=3)
    noted = PythonRollback(("ordered", ordered))
    ordered.pop("b")
    ordered["z"] = 4
    ordered.move_to_end("a")
    noted.restore()
    assert list(ordered.items()) == [("a", 1), ("b", 2), ("c", 3)]
    ordered.move_to_end("a")
    assert list(reversed(ordered)) == ["a", "c", "b"]


def test_a_large_array_may_not_be_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainfit.capturing.python_rollback._MOST_COPIED_BYTES", 8)
    model, history = nn.Linear(3, 3), numpy.zeros(100)
    train = trained(model, torch.ones(2, 3))

    def step() -> None:
        history[0] = 1.0
        train()

    with pytest.raises(UserCodeError, match="read-only"):
        autoplan(model, step)
    assert history.flags.writeable and history[0] == 0


def _numbers() -> Iterator[int]:
    yield from range(100)


@pytest.mark.parametrize(
    "make",
    [
        lambda data: iter(data),
        lambda data: iter([torch.ones(2, 3)] * 50),
        lambda data: enumerate([torch.ones(2, 3)] * 50),
        lambda data: zip([torch.ones(2, 3)] * 50, range(50)),
        lambda data: itertools.count(),
        lambda data: _numbers(),
    ],
    ids=["loader", "list", "enumerate", "zip", "count", "generator"],
)
def test_an_iterator_that_the_step_advances_is_refused(make: Callable[[Any], Iterator[Any]]) -> None:
    model = nn.Linear(3, 3)
    train = trained(model, torch.ones(2, 3))
    batches = make(torch.utils.data.DataLoader(torch.ones(64, 3), batch_size=2))

    def step() -> None:
        next(batches)
        train()

    with pytest.raises(StepError, match=r"from an iterator \(batches\).*autoplan\(model, step, batch\)"):
        autoplan(model, step)


def test_an_iterator_that_the_step_leaves_alone_is_none_of_its_business() -> None:
    model = nn.Linear(3, 3)
    batches = iter(torch.utils.data.DataLoader(torch.arange(6.0)))
    assert next(batches).tolist() == [0.0]
    model.batches = batches
    autoplan(model, trained(model, torch.ones(2, 3)))
    assert [float(batch) for batch in batches] == [1.0, 2.0, 3.0, 4.0, 5.0]


# Tensors --------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(3, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cells(x)[0]


class Flat(nn.Module):
    """All weights in one buffer, of which parameters are views, as some optimizers want them."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = torch.arange(24.0)
        self.one = nn.Parameter(self.flat[:12].view(3, 4))
        self.two = nn.Parameter(self.flat[12:].view(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.one @ self.two


class LastLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (Recurrent, (2, 5, 3)),
        (Flat, (2, 3)),
        (LastLayers, (2, 3, 6, 6)),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), (2, 3)),
        (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)), (2, 3)),
        (lambda: nn.Linear(3, 3, dtype=torch.float64), (2, 3)),
    ],
    ids=["recurrent", "views of one buffer", "channels last", "weight norm", "spectral norm", "float64"],
)
def test_tensors_of_all_kinds_come_back(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    results = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = make()
        step = trained(model, torch.randn(shape, dtype=next(model.parameters()).dtype))
        step()
        layouts = [(p.data_ptr(), p.stride(), p._version) for p in model.parameters()]
        if planned:
            autoplan(model, step)
        assert layouts == [(p.data_ptr(), p.stride(), p._version) for p in model.parameters()]
        results.append(([step(), step()], [p.detach().clone() for p in model.parameters()]))
    assert results[0][0] == results[1][0]
    assert all(map(torch.equal, results[0][1], results[1][1]))


def test_a_graph_from_before_runs_backward_afterwards() -> None:
    model, batch = nn.Linear(3, 3), torch.ones(2, 3)
    pending = model(batch).square().sum()
    autoplan(model, trained(model, batch))
    pending.backward()
    assert model.weight.grad is not None and model.weight.grad.abs().sum() > 0


def test_hooks_and_frozen_parameters_stay() -> None:
    model, heard = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), []
    model[0].weight.requires_grad_(False)
    model[1].weight.register_hook(lambda gradient: heard.append(1))
    step = trained(model, torch.ones(2, 3))
    autoplan(model, step)
    assert heard == [] and not model[0].weight.requires_grad
    step()
    assert heard == [1]


def test_values_of_the_batch_are_known() -> None:
    """A step that asks about its ids gets the answers of a real run; floats of the model are not asked."""
    model, asked = nn.Embedding(10, 4), []
    ids = torch.tensor([[1, 2, 3]])

    def step() -> None:
        asked.append(int(ids.max()))
        model(ids)[:, : int(ids[0, 1])].sum().backward()
        model.zero_grad()

    state = LentState(("step", step), ("model", model))
    seen: list[int] = []

    def run() -> None:
        step()
        seen.append(asked[-1])

    trace = capture(lambda: Step(model, None, run), lent_state=state)
    assert set(seen) == {3} and asked == []
    assert not trace.warnings


def test_a_step_for_a_gpu_is_captured_from_real_tensors() -> None:
    device = find_device("a100-40gb")

    def make() -> Step:
        model, batch = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), torch.ones(32, 64)
        return Step(model, None, trained(model, batch))

    real = make()
    state = LentState(("run", real.run), ("model", real.model))
    lent = capture(lambda: real, device=device, lent_state=state)
    assert simulate(lent).peak_bytes == simulate(capture(make, device=device)).peak_bytes


def test_tensors_that_are_on_a_gpu_count_and_those_of_the_host_do_not() -> None:
    """There is no GPU here: what the tensors say about where they are is set by hand."""
    device = find_device("a100-40gb")
    model, batch, waiting = nn.Linear(64, 64), torch.ones(32, 64), torch.ones(1000, 1000)
    run = trained(model, batch)

    def step() -> None:
        (waiting[0] + 1).sum()  # a data set that stays on the host
        run()

    state = LentState(("step", step), ("model", model))
    state.on_gpu, places = True, state._memory
    assert state.bytes_on("cuda") == 0
    state._memory = {
        number: replace(memory, on_gpu=memory.storage.data_ptr() != waiting.data_ptr())
        for number, memory in places.items()
    }
    assert state.bytes_on("cpu") == waiting.nbytes
    trace = capture(lambda: Step(model, None, step), device=device, lent_state=state)

    def build() -> Step:
        model, batch = nn.Linear(64, 64).cuda(), torch.ones(32, 64).cuda()
        return Step(model, None, trained(model, batch))

    assert simulate(trace).peak_bytes == simulate(capture(build, device=device)).peak_bytes
    assert waiting[0, 0] == 1 and not model.weight.is_cuda


class HalfFull(Cuda):
    """A GPU of which 30 bytes are free, 50 reserved and 40 of those in use."""

    def free_bytes(self) -> int:
        return 30

    def reserved_bytes(self) -> int:
        return 50

    def allocated_bytes(self) -> int:
        return 40


def test_memory_at_hand_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    state = LentState(("nothing", ()))
    # The allocator's own spare bytes are at hand, too.
    assert memory_at_hand("cuda", state, HalfFull()) == 30 + 50 - 40
    # Of what is in use, 15 are the step's, and 25 those of others.
    monkeypatch.setattr(LentState, "bytes_on", lambda self, kind: 15)
    assert memory_at_hand("cuda", state, HalfFull()) == 30 + 50 - 25


def test_tensors_of_other_classes_are_refused() -> None:
    class Own(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise NotImplementedError

    odd = torch.Tensor._make_wrapper_subclass(Own, (2, 3))  # type: ignore[attr-defined]
    model = nn.Linear(3, 3)
    model.odd = odd
    with pytest.raises(StepError, match="tensors of the class Own"):
        autoplan(model, trained(model, torch.ones(2, 3)))
