"""Plans for torch.compile that were made before: bound by what computes a value, carried out, checked."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_compiled_steps import Autocast, Broken, Checkpointed, Convolutions, Mlp, Tied
from torch import nn
from torch.utils.checkpoint import checkpoint

import trainfit
from trainfit.api.compiled_steps import compiled_step, estimate_compiled_step, plan_compiled_step
from trainfit.api.request import Request
from trainfit.compiling.carried_plan import carried_plan
from trainfit.compiling.step_graphs import compiled_call
from trainfit.compiling.value_names import module_of
from trainfit.errors import BudgetTooSmall, FileFormatError, OptionError, PlanError, StepError
from trainfit.plans.compiled_plan import CompiledPlan
from trainfit.plans.plan_store import load_eager_plan
from trainfit.steps.step import Step
from trainfit.verifying.measuring import measure_step

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

Build = Callable[[], Step]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Forget what was compiled: recompiles are counted per function."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Row(nn.Module):
    """A block that is compiled by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(torch.tanh(self.up(x))))


class Rows(nn.Module):
    """Blocks, of which each is compiled, and a part that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ModuleList(Row() for _ in range(3))
        for row in self.rows:
            row.compile(backend="aot_eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for row in self.rows:
            x = row(x)
        return x.square().mean()


def rows() -> torch.Tensor:
    return torch.randn(512, 32)


def step_of(make: Callable[[], nn.Module], batch: Callable[[], torch.Tensor] = rows, **loss: Any) -> Build:
    def build() -> Step:
        torch.manual_seed(0)
        model = make()
        return Step.of(model, batch(), optimizer=torch.optim.SGD(model.parameters(), lr=0.01), **loss)

    return build


STEPS: dict[str, Build] = {
    "mlp": step_of(Mlp),
    "loss outside": step_of(
        lambda: nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 64)),
        loss=lambda out: F.log_softmax(out, -1).square().mean(),
    ),
    "dropout": step_of(lambda: Mlp(nn.Dropout(0.3))),
    "batch norm": step_of(Convolutions, lambda: torch.randn(4, 3, 24, 24)),
    "tied": step_of(Tied, lambda: torch.arange(8 * 16).view(8, 16) % 64),
    "checkpoints": step_of(Checkpointed),
    "autocast": step_of(Autocast),
    "graph breaks": step_of(Broken),
    "compiled blocks": step_of(Rows),
}


def compiled(build: Build, plan: CompiledPlan | None = None, *, after: bool = False) -> Build:
    """Compile the model of a step, and apply a plan before or after that."""

    def build_compiled() -> Step:
        step = build()
        if plan is not None and not after:
            trainfit.apply(step.model, plan)
        if not isinstance(step.model, Rows):
            step.model._compiled_call_impl = compiled_call(step.model, "aot_eager")
        if plan is not None and after:
            trainfit.apply(step.model, plan)
        return step

    return build_compiled


def results(build: Build) -> tuple[list[torch.Tensor], Step]:
    step = build()
    torch.manual_seed(3)
    loss = step.run()
    tensors = (*step.model.parameters(), *step.model.buffers())
    return [loss.detach(), *(t.detach().clone() for t in tensors)], step


@pytest.mark.parametrize("name", STEPS)
def test_the_predicted_peak_of_a_compiled_step_is_that_of_a_real_one(name: str) -> None:
    found = estimate_compiled_step(Request(STEPS[name], "cpu"), backend="aot_eager")
    found.trace.check()
    measured = measure_step(compiled(STEPS[name]), "cpu", timed=1)
    assert measured.compiled
    assert found.timeline.persistent_bytes == measured.persistent_bytes
    assert abs(found.peak_bytes - measured.peak_bytes) <= 0.02 * measured.peak_bytes
    assert found.time is not None and found.time.step_seconds > 0
    assert found.target.endswith(", compiled")


@pytest.mark.parametrize("name", ["mlp", "loss outside", "dropout", "batch norm", "tied", "graph breaks"])
def test_a_plan_from_a_file_is_carried_out(name: str, tmp_path: Path) -> None:
    build = STEPS[name]
    unplanned = plan_compiled_step(Request(build, "cpu"), "1GiB", backend="aot_eager").plan
    budget = int(0.85 * unplanned.baseline_peak_bytes)
    try:
        plan = trainfit.plan_compiled(build, budget=budget, backend="aot_eager")
    except BudgetTooSmall as error:
        plan = trainfit.plan_compiled(build, budget=error.minimum_peak_bytes, backend="aot_eager")
    trainfit.save_plan(plan, tmp_path / "plan.json")
    read = trainfit.load_plan(tmp_path / "plan.json")
    assert read == plan and isinstance(read, CompiledPlan)
    expected, _ = results(compiled(build))
    for after in (False, True):
        found, step = results(compiled(build, read, after=after))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        carried = carried_plan(step.model)
        assert carried is not None and sorted(carried.carried) == list(range(len(plan.graphs)))
        assert not carried.refused
        trainfit.remove(step.model)
    measured = measure_step(compiled(build, read), "cpu", timed=1)
    assert measured.peak_bytes <= plan.budget_bytes
    assert abs(measured.peak_bytes - plan.peak_bytes) <= 0.02 * measured.peak_bytes


@pytest.fixture(scope="module")
def plan() -> CompiledPlan:
    return plan_compiled_step(Request(STEPS["mlp"], "cpu"), "1MiB", backend="aot_eager").plan


def test_another_graph_is_left_to_torch_with_one_warning(plan: CompiledPlan) -> None:
    model = Mlp(blocks=3)
    trainfit.apply(model, plan)
    with pytest.warns(UserWarning, match="it computes something else .* than the graphs of the plan") as seen:
        torch.compile(model, backend="aot_eager")(rows()).backward()
    assert len([w for w in seen if "partitioner" in str(w.message)]) == 1
    trainfit.remove(model)
    model = Mlp()
    trainfit.apply(model, replace(plan, backend="inductor"))
    with pytest.warns(UserWarning, match="compiled by aot_eager, and the plan was made for inductor"):
        torch.compile(model, backend="aot_eager")(rows()).backward()
    trainfit.remove(model)


def test_another_model_with_the_same_graph_is_left_alone(plan: CompiledPlan) -> None:
    planned, other = Mlp(), Mlp()
    trainfit.apply(planned, plan)
    carried = carried_plan(planned)
    assert carried is not None
    with warnings.catch_warnings(action="error"):
        torch.compile(other, backend="aot_eager")(rows()).backward()
    assert not carried.carried and not carried.refused
    trainfit.remove(planned)


def test_larger_inputs_are_said(plan: CompiledPlan) -> None:
    model = Mlp()
    trainfit.apply(model, plan)
    with pytest.warns(UserWarning, match="larger inputs than its plan was made for"):
        torch.compile(model, backend="aot_eager")(torch.randn(1024, 32)).backward()
    carried = carried_plan(model)
    assert carried is not None and carried.carried == [0]
    trainfit.remove(model)


def test_a_model_that_is_not_compiled_is_said(plan: CompiledPlan) -> None:
    model = Mlp()
    trainfit.apply(model, plan)
    with pytest.warns(UserWarning, match=r"runs without torch\.compile"):
        model(rows())
    with pytest.raises(PlanError, match="runs a plan already"):
        trainfit.apply(model, plan)
    trainfit.remove(model)
    with pytest.raises(PlanError, match="runs no plan"):
        trainfit.remove(model)
    with pytest.raises(PlanError, match=r"applied to a torch\.nn\.Module, got function"):
        trainfit.apply(lambda x: x, plan)  # type: ignore[arg-type]


def test_files_of_both_kinds_are_told_apart_and_damage_is_one_message(
    plan: CompiledPlan, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    trainfit.save_plan(plan, path)
    with pytest.raises(FileFormatError, match=r"is a plan for torch\.compile"):
        load_eager_plan(path)
    document = json.loads(path.read_text())
    document["compiled-plan"]["graphs"][0]["kept_bytes"] = 1
    path.write_text(json.dumps(document))
    with pytest.raises(FileFormatError, match="does not match its hash"):
        trainfit.load_plan(path)
    for broken, message in (
        (replace(plan, calls=(7,)), r"calls: a step calls graph 7, of 1"),
        (replace(plan, peak_bytes=-1), "sizes in bytes are not negative"),
        (
            replace(plan, graphs=(replace(plan.graphs[0], kept=plan.graphs[0].kept[:1] * 2),)),
            r"graphs\[0\]\.kept: a value is kept twice",
        ),
    ):
        trainfit.save_plan(broken, path)
        with pytest.raises(FileFormatError, match=message):
            trainfit.load_plan(path)


def test_what_dynamo_calls_modules_becomes_a_name_below_the_compiled_one() -> None:
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    for written, name in (
        ("L['self']", ""),
        ("L['self'].blocks.0.up", "blocks.0.up"),
        ("L['self']._modules['blocks']._modules['0']", "blocks.0"),
        ("L['self'].blocks[1].down", "blocks.1.down"),
    ):
        node.meta["nn_module_stack"] = {"1": (written, nn.Linear)}
        assert module_of(node) == name
    node.meta.clear()
    assert module_of(node) == ""


def test_cuda_graphs_save_launches() -> None:
    seconds = {}
    for mode in ("default", "reduce-overhead"):
        request = Request(STEPS["mlp"], "h100")
        found = estimate_compiled_step(request, backend="aot_eager", mode=mode)  # type: ignore[arg-type]
        assert found.time is not None
        seconds[mode] = found.time.step_seconds
    assert seconds["reduce-overhead"] < seconds["default"]


def test_what_cannot_be_compiled_is_one_message() -> None:
    def no_model() -> Step:
        model = Mlp()
        return Step(model, None, lambda: model.blocks[0]["up"](rows()).sum().backward())

    with pytest.raises(OptionError, match="the step does not call its model"):
        compiled_step(Request(no_model, "cpu"), backend="aot_eager")

    class Skipped(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = x + block["down"](F.gelu(block["up"](x)))
                torch._dynamo.graph_break()
            return x.square().mean()

    with pytest.raises(StepError, match=r"nothing that torch\.compile makes of the step has a backward"):
        compiled_step(Request(step_of(Skipped), "cpu"), backend="aot_eager")
    with pytest.raises(OptionError, match="--compile-mode must be one of default, reduce-overhead"):
        compiled_step(Request(STEPS["mlp"], "cpu"), mode="fast")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="--compile-backend must be one of"):
        compiled_step(Request(STEPS["mlp"], "cpu"), backend="eager")  # type: ignore[arg-type]


@pytest.mark.slow
def test_inductor_carries_a_plan_out() -> None:
    build = STEPS["mlp"]
    unplanned = plan_compiled_step(Request(build, "cpu"), "1GiB").plan
    plan = trainfit.plan_compiled(build, budget=int(0.85 * unplanned.baseline_peak_bytes))

    def planned() -> Step:
        step = build()
        trainfit.apply(step.model, plan)
        step.model.compile()
        return step

    measured = measure_step(planned, "cpu", timed=1)
    assert measured.peak_bytes <= plan.budget_bytes
    assert abs(measured.peak_bytes - plan.peak_bytes) <= 0.02 * measured.peak_bytes


class CheckpointedAttention(nn.Module):
    """Attention that is computed again: a kernel of torch's with several results, which inductor calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(32, 96)

    def attended(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.inputs(x).view(4, 16, 3, 2, 16).permute(2, 0, 3, 1, 4).unbind(0)
        return x + F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(4, 16, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.attended, x, use_reentrant=False).square().mean()


class Joining(nn.Module):
    """Each layer gets what all before it have made: kernels write it into parts of one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(8 * n, 8, 3, padding=1) for n in range(1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x).relu()], 1)
        return x.mean((2, 3)).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "shape"),
    [(CheckpointedAttention, (4, 16, 32)), (Joining, (4, 8, 32, 32))],
    ids=["calls", "joined"],
)
def test_what_inductors_kernels_need_is_counted(
    model: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    build = step_of(model, lambda: torch.randn(shape))
    found = estimate_compiled_step(Request(build, "cpu"))
    found.trace.check()

    def with_inductor() -> Step:
        step = build()
        step.model.compile()
        return step

    measured = measure_step(with_inductor, "cpu", timed=1)
    assert measured.compiled
    assert found.peak_bytes == measured.peak_bytes
