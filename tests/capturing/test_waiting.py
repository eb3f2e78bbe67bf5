"""Where the host waits for a GPU, and where Python reads values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from captured_steps import base_name, captured, ops
from torch import nn

from trainfit.steps.step import Step
from trainfit.traces.trace import Trace

pytestmark = pytest.mark.usefixtures("little_garbage")

Extra = Callable[[torch.Tensor], object]


def with_extra(extra: Extra, device: str = "cuda") -> Trace:
    """Capture a step that does something with its loss, on the device, before backward."""

    def build() -> Step:
        model = nn.Linear(4, 4).to(device)
        inputs = torch.randn(3, 4, device=device)

        def run() -> None:
            out = model(inputs)
            extra(out.detach())
            out.sum().backward()
            model.zero_grad()

        return Step(model, None, run)

    return captured(build, device)


def waits(trace: Trace) -> list[str]:
    return [base_name(trace.op_name(n)) for n, op in enumerate(trace.ops) if op.host_waits]


WAITS = {
    "item": (lambda out: out.sum().item(), ["_local_scalar_dense"]),
    "bool": (lambda out: bool(out.sum() > 0), ["_local_scalar_dense"]),
    "int": (lambda out: int(out.argmax()), ["_local_scalar_dense"]),
    "branch": (lambda out: 1 if out.isfinite().all() else 0, ["_local_scalar_dense"]),
    "nonzero": (lambda out: out.nonzero(), ["nonzero"]),
    "mask": (lambda out: out[out > 0], ["index"]),
    "masked_select": (lambda out: out.masked_select(out > 0), ["masked_select"]),
    "assign by mask": (lambda out: out.clone().index_put_((out[:, 0] == out[:, 0],), out), ["index_put_"]),
    "cpu": (lambda out: out.cpu(), ["_to_copy"]),
    "to cpu": (lambda out: out.to("cpu"), ["_to_copy"]),
    "to cpu and dtype": (lambda out: out.to("cpu", torch.float64), ["_to_copy"]),
    "copy to the host": (lambda out: torch.empty(3, 4, device="cpu").copy_(out), ["copy_"]),
    "from the host": (lambda out: torch.ones(3, device="cpu").to("cuda"), ["_to_copy"]),
    "tolist": (lambda out: out.argmax(1).tolist(), ["torch.tolist"]),
    "print": (lambda out: print(out.sum()), ["torch.print"]),
    "print many": (lambda out: print(out), ["torch.print"]),
    "str": (lambda out: str(out.sum()), ["torch.print"]),
    "format": (lambda out: f"{out.sum():.3f}", ["_local_scalar_dense"]),
    "equal": (lambda out: torch.equal(out, out + 1), ["equal"]),
    "unique": (lambda out: out.argmax(1).unique(), ["_unique2"]),
    "bincount": (lambda out: out.argmax(1).bincount(), ["bincount"]),
    "synchronize": (lambda out: torch.cuda.synchronize(), ["torch.synchronize"]),
    "stream": (lambda out: torch.cuda.current_stream().synchronize(), ["torch.synchronize"]),
}


@pytest.mark.parametrize("name", WAITS)
def test_the_host_waits(name: str) -> None:
    extra, expected = WAITS[name]
    assert waits(with_extra(extra)) == expected


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param(lambda out: out.count_nonzero(), id="count_nonzero"),
        pytest.param(lambda out: out.to("cpu", non_blocking=True), id="non_blocking"),
        pytest.param(lambda out: out.to("cpu", torch.float64, True), id="non_blocking by position"),
        pytest.param(lambda out: torch.empty(3, 4, device="cpu").copy_(out, True), id="copy_"),
        pytest.param(lambda out: torch.ones(3, device="cpu").cuda(non_blocking=True), id="cuda()"),
        pytest.param(lambda out: out.clone().masked_fill_(out > 0, 0.0), id="masked_fill"),
        pytest.param(lambda out: out.clone().__setitem__(out > 0, 0.0), id="one value by mask"),
        pytest.param(lambda out: out[out.argmax(1)], id="index"),
        pytest.param(lambda out: torch.tensor(3.0).item(), id="a number of the host's"),
        pytest.param(lambda out: torch.arange(3, device="cpu").tolist(), id="a list of the host's"),
        pytest.param(lambda out: torch.arange(3, device="cpu").nonzero(), id="nonzero on the host"),
        pytest.param(lambda out: out.to(torch.float64), id="another dtype"),
        pytest.param(lambda out: out.shape[0], id="a shape"),
    ],
)
def test_the_host_goes_on(extra: Extra) -> None:
    assert waits(with_extra(extra)) == []


def test_on_a_cpu_nothing_waits_but_what_python_reads_is_there() -> None:
    trace = with_extra(lambda out: (out.sum().item(), out.tolist(), out.cpu(), out.nonzero()), "cpu")
    assert waits(trace) == []
    read = [base_name(trace.op_name(n)) for n, op in enumerate(trace.ops) if op.reads_value]
    assert read == ["_local_scalar_dense", "torch.tolist"]


def test_printing_shows_known_values_and_assumes_nothing_of_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def show(out: torch.Tensor) -> None:
        print(torch.arange(3, device="cuda"), torch.randn(1 << 20, device="cuda"))

    assert not with_extra(show).warnings
    assert "tensor([0, 1, 2]) tensor([0., 0., 0.,  ..., 0., 0., 0.])" in capsys.readouterr().out


def test_reading_belongs_to_the_module_that_reads() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            return y * 2 if y.sum() > 0 else y

    def build() -> Step:
        model = Reads().cuda()
        return Step.of(model, (torch.randn(3, 4, device="cuda"),), loss=torch.sum)

    trace = captured(build, "cuda")
    (read,) = ops(trace, "_local_scalar_dense")
    assert trace.module_name(trace.ops[read].module) == "Reads"
    assert trace.ops[read].phase == "forward" and trace.ops[read].reads_value


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_optimizer_reads_its_own_counters_without_waiting(
    kind: type[torch.optim.Optimizer], device: str
) -> None:
    def build() -> Step:
        model = nn.Linear(4, 4).to(device)
        optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
        return Step.of(model, (torch.randn(3, 4, device=device),), loss=torch.sum, optimizer=optimizer)

    trace = captured(build, device)
    assert waits(trace) == [] and not any(op.reads_value for op in trace.ops)


def test_a_gradient_scaler_waits_once_for_what_it_found() -> None:
    def build() -> Step:
        model = nn.Linear(4, 4).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda")
        inputs = torch.randn(3, 4, device="cuda")

        def run() -> None:
            scaler.scale(model(inputs).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        return Step(model, optimizer, run)

    assert waits(captured(build, "cuda")) == ["_local_scalar_dense"]
