"""Steps compiled within a budget, run for real: the same results, and the peak that was promised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import trainfit
from trainfit.compiling.compiled_model import compile as planned_compile
from trainfit.compiling.graph_probe import GraphProbe
from trainfit.compiling.node_costs import NodeCosts
from trainfit.compiling.recompute_problem import GraphLimits
from trainfit.devices.device_table import find_device
from trainfit.errors import BudgetTooSmall, OptionError, StepError
from trainfit.workspace.profiler import profile_allocations


class Mlp(nn.Module):
    """Blocks with a wide middle; `extra` is applied in the middle of each."""

    def __init__(self, extra: Callable[[torch.Tensor], torch.Tensor] = torch.tanh, blocks: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(32, 128), "down": nn.Linear(128, 32)}) for _ in range(blocks)
        )
        self.extra = extra

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block["down"](F.gelu(self.extra(block["up"](x))))
        return x.square().mean()


class Convolutions(nn.Module):
    """Convolutions with batch norm: buffers that forward changes."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, padding=1)]
        for _ in range(4):
            layers += [nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


class Tied(nn.Module):
    """An embedding that is the output layer, too, and views of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.inner = Mlp(blocks=3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.inner.blocks:
            a, b = block["up"](x).view(*x.shape[:2], 2, 64).unbind(2)
            x = x + block["down"](torch.cat((a.sigmoid() * b, a.transpose(0, 1).transpose(0, 1)), -1))
        return F.cross_entropy((x @ self.embedding.weight.t()).flatten(0, 1), tokens.flatten())


class Broken(Mlp):
    """A graph break between blocks: several graphs share the budget."""

    def run(self, number: int, x: torch.Tensor) -> torch.Tensor:
        block = self.blocks[number]
        return x + block["down"](F.gelu(torch.tanh(block["up"](x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.run(0, x)
        torch._dynamo.graph_break()
        x = self.run(2, self.run(1, x))
        torch._dynamo.graph_break()
        return self.run(4, self.run(3, x)).square().mean()


class Checkpointed(Mlp):
    """The user's own checkpoints, around every second block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):

            def run(y: torch.Tensor, block: Any = block) -> torch.Tensor:
                return y + block["down"](F.gelu(self.extra(block["up"](y))))

            x = checkpoint(run, x, use_reentrant=False) if number % 2 else run(x)
        return x.square().mean()


class Autocast(Mlp):
    """Products in bfloat16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x)


pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

ROWS = torch.linspace(-1, 1, 512 * 32).view(512, 32)
IMAGES = torch.linspace(-1, 1, 4 * 3 * 24 * 24).view(4, 3, 24, 24)
TOKENS = torch.arange(8 * 16).view(8, 16) % 64
MODELS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "mlp": (Mlp, ROWS),
    "dropout": (lambda: Mlp(nn.Dropout(0.3)), ROWS),
    "batch norm": (Convolutions, IMAGES),
    "tied": (Tied, TOKENS),
    "graph breaks": (Broken, ROWS),
    "checkpoints": (Checkpointed, ROWS),
    "checkpointed dropout": (lambda: Checkpointed(nn.Dropout(0.3)), ROWS),
    "autocast": (Autocast, ROWS),
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Forget what was compiled: recompiles are counted per function."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step(model: nn.Module, compiled: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    """Return loss, gradients and buffers of one step."""
    model.zero_grad()
    torch.manual_seed(3)
    loss = compiled(batch)
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *gradients, *(b.clone() for b in model.buffers())]


def measured_peak(model: nn.Module, compiled: nn.Module, batch: torch.Tensor) -> int:
    """Return the peak of a steady step's forward and backward, with parameters, buffers and batch."""
    step(model, compiled, batch)
    model.zero_grad()
    with profile_allocations() as log, log.range("step"):
        compiled(batch).backward()
    standing = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), batch))
    return standing + log.usage("step").peak_bytes


def built(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    make, batch = MODELS[name]
    return make(), batch


@pytest.mark.parametrize("name", MODELS)
def test_node_by_node_the_results_are_equal_and_the_peak_is_the_promise(name: str) -> None:
    model, batch = built(name)
    plain = torch.compile(model, backend="aot_eager")
    expected = step(model, plain, batch)
    unplanned = measured_peak(model, plain, batch)
    reached = []
    for share in (0.95, 0.8):
        torch._dynamo.reset()
        model, batch = built(name)
        budget = int(share * unplanned)
        try:
            compiled = planned_compile(model, budget=budget, backend="aot_eager")
            found = step(model, compiled, batch)
        except BudgetTooSmall as error:
            assert error.minimum_peak_bytes > budget
            continue
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        plan = compiled.compile_plan
        assert not any(graph.refused for graph in plan.graphs)
        peak = measured_peak(model, compiled, batch)
        assert plan.promised_bytes <= budget
        assert peak <= budget
        assert abs(plan.promised_bytes - peak) <= 0.02 * peak
        reached.append(peak)
    assert reached, "one of the budgets is within reach"


def test_parts_that_are_compiled_by_themselves_share_the_budget() -> None:
    class Row(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(F.gelu(torch.tanh(self.up(x))))

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.ModuleList(Row() for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for row in self.rows:
                x = row(x)
            return x.square().mean()

    def made() -> Rows:
        torch.manual_seed(0)
        return Rows()

    plain = made()
    for row in plain.rows:
        row.compile(backend="aot_eager")
    expected = step(plain, plain, ROWS)
    unplanned = measured_peak(plain, plain, ROWS)
    torch._dynamo.reset()
    model = made()
    budget = int(0.7 * unplanned)
    compiled = planned_compile(model, budget=budget, backend="aot_eager", only=model.rows)
    found = step(model, compiled, ROWS)
    assert compiled is model
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(model.compile_plan.calls) == 4
    assert measured_peak(model, compiled, ROWS) <= budget


def test_sizes_that_change_are_planned_for_the_largest() -> None:
    model, batch = built("mlp")
    plain = torch.compile(model, backend="aot_eager")
    unplanned = measured_peak(model, plain, batch)
    torch._dynamo.reset()
    model, _ = built("mlp")
    budget = int(0.7 * unplanned)
    compiled = planned_compile(model, budget=budget, backend="aot_eager", fullgraph=True)
    small = batch[:128].clone()
    torch._dynamo.mark_dynamic(small, 0, min=2, max=512)
    step(model, compiled, small)
    large = batch.clone()
    torch._dynamo.mark_dynamic(large, 0, min=2, max=512)
    assert measured_peak(model, compiled, large) <= budget
    assert len(compiled.compile_plan.graphs) == 1
    assert measured_peak(model, compiled, small) < 0.5 * budget


@pytest.mark.parametrize("dynamic", [True, None])
def test_a_plan_for_the_largest_holds_for_all_sizes(dynamic: bool | None) -> None:
    model, batch = built("mlp")
    unplanned = measured_peak(model, torch.compile(model, backend="aot_eager"), batch)
    torch._dynamo.reset()
    model, _ = built("mlp")
    budget = int(0.75 * unplanned)
    compiled = planned_compile(model, budget=budget, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    peaks = []
    for rows in (512, 384, 130, 64, 512):
        part = batch[:rows].clone()
        torch._dynamo.mark_dynamic(part, 0, min=2, max=512)
        peaks.append(measured_peak(model, compiled, part))
        expected = step(model, model, part)
        assert all(torch.equal(a, b) for a, b in zip(step(model, compiled, part), expected, strict=True))
    assert max(peaks) == peaks[0] == peaks[-1] <= budget
    assert peaks[:4] == sorted(peaks[:4], reverse=True)
    assert len(compiled.compile_plan.graphs) == 1
    assert compiled.compile_plan.graphs[0].repeated


@pytest.mark.parametrize("name", ["mlp", "batch norm", "checkpointed dropout"])
def test_a_larger_budget_has_no_lower_peak_and_no_slower_plan(name: str) -> None:
    model, batch = built(name)
    probe = GraphProbe(NodeCosts(find_device("cpu")), "aot_eager")
    torch.compile(model, backend=probe)(batch)
    planner = probe.planners[0]
    assert planner is not None
    low, high = planner.smallest().peak_bytes, planner.search.partitions[-1].peak_bytes
    # What was asked before must not matter.
    limits = [low + (high - low) * n // 16 for n in range(18)]
    found = {limit: planner.fastest(GraphLimits.same(limit)) for limit in (*limits[::2], *limits[::-2])}
    divided = [found[limit] for limit in limits if found[limit] is not None]
    assert len(divided) >= len(limits) - 1
    assert all(d.peak_bytes <= limit for limit, d in found.items() if d is not None)
    assert [d.peak_bytes for d in divided] == sorted(d.peak_bytes for d in divided)
    seconds = [d.partition.seconds for d in divided]
    assert seconds == sorted(seconds, reverse=True)
    assert len(set(seconds)) >= 3


def test_a_graph_break_where_the_whole_graph_is_asked_for_is_torchs_error() -> None:
    model, batch = built("graph breaks")
    compiled = planned_compile(model, budget="1GiB", backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(batch)


def test_a_budget_that_is_too_small_says_what_is_reached() -> None:
    model, batch = built("mlp")
    compiled = planned_compile(model, budget="300KiB", backend="aot_eager")
    with pytest.raises(BudgetTooSmall, match=r"no plan of the compiled step fits 300\.00 KiB") as caught:
        compiled(batch)
    reached = caught.value.minimum_peak_bytes
    torch._dynamo.reset()
    model, batch = built("mlp")
    compiled = planned_compile(model, budget=reached, backend="aot_eager")
    assert measured_peak(model, compiled, batch) <= reached


def test_state_of_the_optimizer_and_other_memory_count() -> None:
    model, _ = built("mlp")
    parameters = sum(p.nbytes for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    plan = planned_compile(model, budget="1GiB", optimizer=optimizer, other="1MiB").compile_plan
    steps = 4 * len(list(model.parameters()))
    assert plan.standing_bytes == 3 * parameters + steps + 2**20
    assert plan.promised_bytes is None and "not compiled yet" in str(plan)


def test_what_is_left_to_eager_is_said() -> None:
    class Skipped(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = x + block["down"](F.gelu(block["up"](x)))
                torch._dynamo.graph_break()
            return x.square().mean()

    compiled = planned_compile(Skipped(), budget="1GiB", backend="aot_eager")
    with pytest.warns(UserWarning, match="so that the budget is not kept"):
        compiled(ROWS)


def test_mistakes_are_said_before_anything_is_compiled() -> None:
    model, _ = built("mlp")
    with pytest.raises(OptionError, match="backend must be one of inductor, aot_eager, got 'eager'"):
        planned_compile(model, budget="1GiB", backend="eager")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="only= takes modules of the model; Linear is none"):
        planned_compile(model, budget="1GiB", only=[nn.Linear(1, 1)])
    with pytest.raises(OptionError, match="not negative, got -1"):
        planned_compile(model, budget=-1)
    with pytest.raises(OptionError, match=r"number of bytes or text such as 20GiB, got 2\.5"):
        planned_compile(model, budget=2.5)  # type: ignore[arg-type]
    with pytest.raises(StepError, match=r"compile takes a model \(torch.nn.Module\), got function"):
        planned_compile(lambda x: x, budget="1GiB")  # type: ignore[arg-type]


def test_the_public_name_is_the_same_function() -> None:
    assert trainfit.compile is planned_compile


@pytest.mark.parametrize("name", ["mlp", "dropout"])
def test_inductor_keeps_the_budget(name: str) -> None:
    model, batch = built(name)
    plain = torch.compile(model)
    expected = step(model, plain, batch)
    unplanned = measured_peak(model, plain, batch)
    torch._dynamo.reset()
    model, batch = built(name)
    budget = int(0.75 * unplanned)
    compiled = planned_compile(model, budget=budget)
    found = step(model, compiled, batch)
    peak = measured_peak(model, compiled, batch)
    assert peak <= budget
    assert abs(compiled.compile_plan.promised_bytes - peak) <= 0.02 * peak
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
