"""FX graphs: what they allocate, and that another order computes the same with the predicted peak."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from trainfit import Step
from trainfit.errors import CaptureError, GraphError, StepError
from trainfit.order_fronts.fx import buffer_graph, in_order, reorder
from trainfit.order_fronts.joint import joint_graph, joint_graph_without_memory
from trainfit.ordering.order_timeline import order_timeline
from trainfit.workspace.profiler import no_cycle_collection, profile_allocations

ROWS = 256
ROW = ROWS * ROWS * 4
SMALL = 64


def traced(function: Callable[..., Any], *inputs: Tensor) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def square() -> Tensor:
    return torch.randn(ROWS, ROWS)


def measured_peak(module: GraphModule, *inputs: Tensor) -> Any:
    """Return the measured peak, nearly: numbers in the code are tensors of a few bytes for torch."""
    module(*inputs)
    with no_cycle_collection(), profile_allocations() as log, log.range("run"):
        module(*inputs)
    return pytest.approx(log.usage("run").peak_bytes, abs=SMALL)


def branches(x: Tensor) -> Tensor:
    wide = [x + n for n in range(6)]
    narrow = [w.sum() for w in wide]
    return torch.stack(narrow)


def test_another_order_computes_the_same_with_the_predicted_peak() -> None:
    x = square()
    module = traced(branches, x)
    better, order = reorder(module)
    assert order.optimal
    assert order.baseline_peak_bytes > 6 * ROW
    assert ROW < order.peak_bytes < 2 * ROW
    assert torch.equal(better(x), module(x))
    assert order.baseline_peak_bytes == measured_peak(module, x)
    assert order.peak_bytes == measured_peak(better, x)


def test_views_are_names_for_the_same_memory() -> None:
    def function(x: Tensor) -> Tensor:
        made = x * 2
        view = made.view(-1)[:10]
        other = x * 3
        return view.sum() + other.sum()

    x = square()
    module = traced(function, x)
    found = order_timeline(buffer_graph(module))
    assert found.peak_bytes == measured_peak(module, x)
    assert found.peak_bytes >= 2 * ROW, "the view keeps what it is a view of"


def test_one_of_several_results_is_released_without_the_others() -> None:
    def function(x: Tensor) -> Tensor:
        mantissa, exponent = torch.frexp(x)
        total = mantissa.sum()
        return total + exponent.float().sum()

    x = square()
    module = traced(function, x)
    assert order_timeline(buffer_graph(module)).peak_bytes == measured_peak(module, x)


def test_what_is_written_in_place_stays_in_order() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        made = x * 2
        before = made.sum()
        made.add_(1)
        return before, made.sum()

    x = square()
    module = traced(function, x)
    names = [node.name for node in buffer_graph(module).nodes]
    with pytest.raises(GraphError, match="runs 'add_' before 'sum_1', which it needs"):
        order_timeline(buffer_graph(module), [names[0], names[2], names[1], *names[3:]])
    better, _ = reorder(module)
    for ours, theirs in zip(better(x), module(x)):
        assert torch.equal(ours, theirs)


def test_random_operators_keep_their_order() -> None:
    def function(x: Tensor) -> Tensor:
        drawn = [torch.rand_like(x) for _ in range(4)]
        return torch.stack([d.sum() * (n + 1) for n, d in enumerate(drawn)])

    x = square()
    module = traced(function, x)
    better, order = reorder(module)
    assert order.peak_bytes < order.baseline_peak_bytes
    torch.manual_seed(0)
    expected = module(x)
    torch.manual_seed(0)
    assert torch.equal(better(x), expected)


def test_placeholders_that_are_given_away_are_released() -> None:
    def function(saved: Tensor, other: Tensor) -> Tensor:
        return (saved * 2).sum() + (other * 2).sum()

    module = traced(function, square(), square())
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    kept, freed = buffer_graph(module), buffer_graph(module, freeable=names)
    assert order_timeline(freed).initial_bytes == 2 * ROW
    assert order_timeline(freed).peak_bytes == 3 * ROW
    assert order_timeline(kept).peak_bytes < 2 * ROW
    assert order_timeline(freed).live_bytes[-1] < ROW
    with pytest.raises(GraphError, match="there is no placeholder 'nonsense' that could be freed"):
        buffer_graph(module, freeable=["nonsense"])


def test_a_graph_without_metadata_is_refused() -> None:
    module = traced(lambda x: x * 2, square())
    for node in module.graph.nodes:
        node.meta.clear()
    with pytest.raises(GraphError, match="'mul' does not say what it returns"):
        buffer_graph(module)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 4)) for _ in range(4)
        )
        self.norm = nn.BatchNorm1d(16)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        made = torch.cat([branch(x) for branch in self.branches], dim=1)
        return nn.functional.dropout(self.norm(made), 0.1).square().mean()


def branching_step() -> Step:
    torch.manual_seed(0)
    return Step.of(Branching(), (torch.randn(64, 32),), loss=lambda value: value)


def test_a_joint_graph_in_another_order_gives_the_loss_and_gradients_of_the_step() -> None:
    step = branching_step()
    module = joint_graph(step)
    better, _ = reorder(module)
    state = [*step.model.parameters(), *step.model.buffers()]
    inputs = [tensor.detach().clone() for tensor in state]
    given = [torch.randn(64, 32)]
    torch.manual_seed(1)
    expected = module(*inputs, *given)
    torch.manual_seed(1)
    found = better(*inputs, *given)
    assert len(found) == len(expected) > 20
    for ours, theirs in zip(found, expected):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)
    torch.manual_seed(1)
    loss = step.model(*given)
    loss.backward()
    gradients = [p.grad for p in step.model.parameters() if p.grad is not None]
    assert all(any(torch.equal(g, ours) for ours in found if ours is not None) for g in gradients)
    assert all(parameter.requires_grad for parameter in step.model.parameters())


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(8, 512, bias=False) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([head(x).logsumexp(-1).mean() for head in self.heads]).sum()


def test_a_head_can_finish_its_backward_before_the_next_begins() -> None:
    module = joint_graph_without_memory(lambda: Step.of(Heads(), (torch.randn(64, 8),), loss=lambda y: y))
    _, order = reorder(module)
    logits = 64 * 512 * 4
    assert order.baseline_peak_bytes > 5 * logits
    assert order.peak_bytes < 4 * logits


def test_a_joint_graph_needs_no_memory() -> None:
    with profile_allocations() as log, log.range("trace"):
        module = joint_graph_without_memory(branching_step)
    assert order_timeline(buffer_graph(module)).peak_bytes > 64 * 128 * 4
    assert log.usage("trace").peak_bytes < 1 << 20


def test_what_cannot_be_traced_is_said() -> None:
    def without_backward() -> Step:
        return Step(model=nn.Linear(2, 2), optimizer=None, run=lambda: None)

    with pytest.raises(StepError, match="never calls backward"):
        joint_graph_without_memory(without_backward)

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x)
            return y.sum() if y.sum() > 0 else y.mean()

    def asking() -> Step:
        return Step.of(Asks(), (torch.ones(2, 2),), loss=lambda value: value)

    with pytest.raises(CaptureError, match=r"cannot be traced into one graph: .* --graph eager"):
        joint_graph_without_memory(asking)
    assert torch.Tensor.backward.__qualname__ == "Tensor.backward", "the stand-in is gone"


def test_in_order_keeps_placeholders_and_metadata() -> None:
    module = traced(branches, square())
    names = [node.name for node in module.graph.nodes if node.op == "call_function"]
    same = in_order(module, names)
    assert [n.name for n in same.graph.nodes] == [n.name for n in module.graph.nodes]
    assert all("val" in node.meta for node in same.graph.nodes if node.op == "call_function")


def saved_placeholders(module: torch.fx.GraphModule) -> list[str]:
    """Return the placeholders of a backward graph of AOTAutograd that are activations saved for it."""
    owned = ("primals", "arg", "tangents", "fwd_rng_state", "bwd_rng_state")
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    return [name for name in names if not name.startswith(owned)]


def test_forward_and_backward_graphs_of_aot_autograd() -> None:
    orders = []

    def as_it_is(module: GraphModule, example_inputs: Any) -> Any:
        return make_boxed_func(module)

    def ordering(module: GraphModule, example_inputs: Any) -> Any:
        better, order = reorder(module, saved_placeholders(module))
        orders.append(order)
        return make_boxed_func(better)

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return torch.stack([torch.tanh(x @ weight + n).sum() for n in range(3)]).prod()

    x, weight = torch.randn(16, 16), torch.randn(16, 16, requires_grad=True)
    aot_function(function, fw_compiler=as_it_is, bw_compiler=as_it_is)(x, weight).backward()
    expected, weight.grad = weight.grad, None
    aot_function(function, fw_compiler=ordering, bw_compiler=ordering)(x, weight).backward()
    assert torch.equal(weight.grad, expected)
    forward, backward = orders
    assert not forward.graph.inputs
    assert backward.graph.inputs, "what was saved for backward is given away to it"


def test_exported_programs() -> None:
    class Doubles(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return branches(x)

    x = square()
    program = torch.export.export(Doubles(), (x,))
    better, order = reorder(program.graph_module)
    assert order.peak_bytes < order.baseline_peak_bytes
    assert torch.equal(better(x)[0], branches(x))
