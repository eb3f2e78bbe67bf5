"""Costs measured on this machine: sane, remembered, and honest about what could not be run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_machine import FakeMachine
from torch import nn

from trainfit import Step
from trainfit.capturing import capture
from trainfit.costs import measured_costs as measured
from trainfit.costs.measured_costs import measured_costs
from trainfit.costs.pricing import price_trace
from trainfit.costs.table import CostTable, Host, OpCost
from trainfit.devices.device_table import Device, find_device, this_cpu
from trainfit.errors import DeviceError
from trainfit.timing.bench import Bench, Situation
from trainfit.timing.caller import REFUSED, Caller
from trainfit.timing.locality import FAR, NEAR, Caches, Locality
from trainfit.timing.memory import Memory
from trainfit.traces.trace import Signature, TensorSpec, Trace

HOST = Host(True, 5e-6, 3e-6, 4e-6, 1e-6, 1e-6, 1e-7)
FORMULA = OpCost(1e-3, "formula", "memory")


class Classifier(nn.Module):
    """Embeds words, mixes them, and drops some."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(100, 32)
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 10))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.layers(self.words(words).mean(1))


def build() -> Step:
    model = Classifier()
    words, labels = torch.randint(0, 100, (8, 16)), torch.randint(0, 10, (8,))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    return Step.of(
        model, words, loss=lambda out: nn.functional.cross_entropy(out, labels), optimizer=optimizer
    )


@pytest.fixture(scope="module")
def trace() -> Trace:
    return capture(build, target="classifier")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "BUDGET_SECONDS", 0.05)


@pytest.fixture
def price(trace: Trace, tmp_path: Path) -> Callable[..., CostTable]:
    def price(trace: Trace = trace, **options: object) -> CostTable:
        return measured_costs(
            trace,
            this_cpu(),
            host=HOST,
            fallback=lambda signature: FORMULA,
            cache_path=tmp_path / "costs.sqlite",
            **{"meter": FakeMachine(0.0).meter(), **options},
        )

    return price


def spec(*shape: int, dtype: str = "float32") -> TensorSpec:
    stride = tuple(math.prod(shape[number + 1 :]) for number in range(len(shape)))
    return TensorSpec(dtype, shape, stride)


def signature(
    name: str, arguments: str, *inputs: TensorSpec, outputs: tuple[TensorSpec, ...] = ()
) -> Signature:
    in_place = name.split(".")[1].endswith("_")
    return Signature(name, inputs, outputs, arguments, False, in_place, False)


def caller(signature: Signature, where: int = FAR) -> Caller:
    memory = Memory("cpu", Caches(1 << 16, 1 << 20))
    locality = Locality((where,) * len(signature.inputs), where)
    return Caller(signature, locality, memory, most_bytes=1 << 30)


def test_every_operator_of_a_step_is_measured(trace: Trace, price: Callable[..., CostTable]) -> None:
    table = price()
    assert len(table.costs) == len(trace.signatures)
    assert table.host is HOST
    assert table.warnings == ()
    for kind, cost in zip(trace.signatures, table.costs):
        if kind.view:
            assert cost is FORMULA
        else:
            assert cost.source == "measured", kind.name
            assert 0 <= cost.seconds < 1, kind.name
    product = next(cost.seconds for kind, cost in zip(trace.signatures, table.costs) if "addmm" in kind.name)
    assert product > 0


def test_what_was_measured_is_not_measured_again(
    price: Callable[..., CostTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What a busy machine measures unsteadily is not remembered; here all of it is to be.
    monkeypatch.setattr(measured, "_STEADY", float("inf"))
    calls: Counter[str] = Counter()

    def count(done: int, total: int, name: str) -> None:
        assert 0 < done <= total
        calls[name] += 1

    first = price(progress=count)
    assert calls["aten.embedding.default"] > 3
    calls.clear()
    assert price(progress=count).costs == first.costs
    assert not calls
    price(progress=count, refresh=True)
    assert calls["aten.embedding.default"] > 3


def test_what_a_busy_machine_measured_is_measured_again_when_it_is_quiet(
    price: Callable[..., CostTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "_STEADY", float("inf"))
    machine, calls = FakeMachine(0.57), Counter[str]()

    def priced() -> CostTable:
        calls.clear()
        return price(progress=lambda done, total, name: calls.update([name]), meter=machine.meter())

    (warning,) = priced().warnings
    assert (
        warning.startswith("other work took 57% of this machine's processors while ")
        and "--refresh" in warning
    )
    assert calls
    assert priced().warnings == (warning,) and not calls  # still busy: used, with the same warning
    machine.share = 0.0
    assert priced().warnings == () and calls
    machine.share = 0.9
    assert priced().warnings == () and not calls


def test_an_interruption_keeps_what_was_measured(
    price: Callable[..., CostTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "_BATCH", 8)
    calls: Counter[str] = Counter()

    def interrupt(done: int, total: int, name: str) -> None:
        calls[name] += 1
        if name == "aten.nll_loss_forward.default":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        price(progress=interrupt)
    before = calls["aten.embedding.default"]
    assert before > 3
    monkeypatch.setattr(measured, "_COMPANY", 0)
    price(progress=lambda done, total, name: calls.update([name]))
    assert calls["aten.embedding.default"] == before
    assert calls["aten.nll_loss_forward.default"] > 3


def test_what_cannot_run_alone_keeps_the_price_of_the_fallback(
    trace: Trace, price: Callable[..., CostTable]
) -> None:
    names = ["mine.secret.default", "aten.mm.default"]
    number = next(n for n, kind in enumerate(trace.signatures) if "addmm" in kind.name)
    for name in names:
        changed = replace(trace.signatures[number], name=name)
        signatures = (*trace.signatures[:number], changed, *trace.signatures[number + 1 :])
        table = price(replace(trace, signatures=signatures))
        assert table.costs[number] is FORMULA
        assert sum(cost.source == "measured" for cost in table.costs) > 10


def test_a_device_that_is_not_here_is_refused(trace: Trace) -> None:
    with pytest.raises(DeviceError, match="only be measured on a device of this machine"):
        measured_costs(trace, find_device("h100"), host=HOST, fallback=lambda kind: FORMULA)
    with pytest.raises(DeviceError, match="not one"):
        price_trace(trace, Device("epyc", "cpu", 1 << 40, source="datasheet"), costs="measured")


def test_a_cache_that_cannot_be_used_is_a_warning(trace: Trace, tmp_path: Path) -> None:
    (tmp_path / "costs.sqlite").write_text("not a database, but more than a header's worth of text" * 10)
    table = measured_costs(
        trace,
        this_cpu(),
        host=HOST,
        fallback=lambda kind: FORMULA,
        cache_path=tmp_path / "costs.sqlite",
    )
    assert "costs.sqlite" in table.warnings[0]
    assert any(cost.source == "measured" for cost in table.costs)


INDEXED = (
    (
        "aten.embedding.default",
        '[[{"tensor":0},{"tensor":1}],{}]',
        spec(50, 8),
        spec(40, 40, dtype="int64"),
        50,
    ),
    (
        "aten.embedding_dense_backward.default",
        '[[{"tensor":0},{"tensor":1},70,-1,false],{}]',
        spec(40, 40, 8),
        spec(40, 40, dtype="int64"),
        70,
    ),
    (
        "aten.gather.default",
        '[[{"tensor":0},1,{"tensor":1}],{}]',
        spec(40, 30),
        spec(40, 40, dtype="int64"),
        30,
    ),
    (
        "aten.index.Tensor",
        '[[{"tensor":0},[null,{"tensor":1}]],{}]',
        spec(9, 60),
        spec(2000, dtype="int64"),
        60,
    ),
    (
        "aten.nll_loss_forward.default",
        '[[{"tensor":0},{"tensor":1},null,1,-100],{}]',
        spec(2000, 12),
        spec(2000, dtype="int64"),
        12,
    ),
)


@pytest.mark.parametrize(("name", "arguments", "table", "indices", "bound"), INDEXED)
def test_indices_are_spread_over_the_valid_range(
    name: str, arguments: str, table: TensorSpec, indices: TensorSpec, bound: int
) -> None:
    called = caller(signature(name, arguments, table, indices))
    positional, keyword = called.prepare()
    drawn = next(
        leaf
        for value in positional
        for leaf in (value if isinstance(value, list) else [value])
        if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.int64
    )
    assert drawn.min() == 0 and drawn.max() == bound - 1
    assert drawn.unique().numel() == bound
    called.function(*positional, **keyword)


def test_floats_are_random_and_valid_everywhere() -> None:
    positional, _ = caller(signature("aten.log.default", '[[{"tensor":0}],{}]', spec(100, 100))).prepare()
    assert positional[0].min() > 0 and positional[0].max() < 1
    assert positional[0].unique().numel() > 9000


def test_repeating_an_in_place_operator_does_not_drift() -> None:
    called = caller(signature("aten.mul_.Scalar", '[[{"tensor":0},1e30],{}]', spec(1000)))
    for _ in range(2000):
        positional, keyword = called.prepare()
        assert positional[0].max() < 1
        called.finish(called.function(*positional, **keyword))


def test_far_inputs_are_not_where_they_were_used_last() -> None:
    called = caller(signature("aten.neg.default", '[[{"tensor":0}],{}]', spec(4096)), FAR)
    addresses = [called.prepare()[0][0].data_ptr() for _ in range(200)]
    first_again = addresses.index(addresses[0], 1)
    assert first_again * 4096 * 4 > 1 << 20  # more than the last cache has gone by


def test_long_lists_of_tensors() -> None:
    count = 300
    numbers = ",".join(f'{{"tensor":{number}}}' for number in range(count))
    kind = signature("aten._foreach_mul_.Scalar", f"[[[{numbers}],0.5],{{}}]", *[spec(64, 64)] * count)
    bench = Bench("cpu")
    (timing,) = bench.time([Situation(kind, Locality((FAR,) * count, NEAR))], 0.05)
    assert timing is not None and timing.seconds > 0


def test_operators_larger_than_memory_are_not_tried() -> None:
    kind = signature("aten.neg.default", '[[{"tensor":0}],{}]', spec(1 << 50))
    assert Bench("cpu").time([Situation(kind, Locality((FAR,), FAR))], 0.05) == [None]
    with pytest.raises(REFUSED):
        caller(kind)
