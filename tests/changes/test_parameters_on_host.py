"""Parameters that are kept on the host: the same numbers, and as much less memory as predicted."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import trainfit
from trainfit.api.find_ways import Ask
from trainfit.changes.change import PLAN, NotPossible
from trainfit.changes.kinds import changes_of
from trainfit.changes.offloaded_parameters import keep_parameters_on_host
from trainfit.changes.offloaded_state import keep_state_on_host
from trainfit.changes.unchanged_step import UnchangedStep
from trainfit.changes.updates_in_backward import update_in_backward
from trainfit.devices.device_table import find_device
from trainfit.models.recipe import StepOptions
from trainfit.plans.ways import BIT_EQUAL, ChangeMade, Way
from trainfit.traces.simulate import simulate
from trainfit.verifying.measuring import measure_step

ON_HOST = ChangeMade("parameters", "on the host", "", BIT_EQUAL, by_apply=True)
WAY = Way("step", "cpu", (ON_HOST,), None, 0, 0, 1.0, None, None)
WIDTH, TOKENS = 64, 24


class Attention(nn.Module):
    """Uses the weight of a module inside without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        found, _ = self.attention(hidden, hidden, hidden, need_weights=False)
        return self.norm(hidden + found)


class Tied(nn.Module):
    """An embedding whose weight is the head's, too, a parameter of the model's own, a checkpointed part."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, WIDTH)
        self.places = nn.Parameter(torch.randn(TOKENS, WIDTH))
        self.blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.head = nn.Linear(WIDTH, 512, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.places
        hidden = checkpoint(self.blocks, hidden, use_reentrant=False)
        return F.cross_entropy(self.head(hidden).view(-1, 512), tokens.view(-1))


def layers() -> tuple[nn.Module, Any]:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.LayerNorm(WIDTH))
    return model, torch.randn(8, WIDTH)


def images() -> tuple[nn.Module, Any]:
    parts = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten()
    return nn.Sequential(*parts, nn.Linear(16 * 8 * 8, 10)), torch.randn(2, 3, 12, 12)


def attention() -> tuple[nn.Module, Any]:
    return Attention(), torch.randn(2, TOKENS, WIDTH)


def tied() -> tuple[nn.Module, Any]:
    return Tied(), torch.randint(512, (2, TOKENS))


def twice() -> tuple[nn.Module, Any]:
    """The same layer runs two times."""
    layer = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(layer, nn.Tanh(), layer), torch.randn(8, WIDTH)


def frozen() -> tuple[nn.Module, Any]:
    model, batch = layers()
    for parameter in model[1].parameters():
        parameter.requires_grad_(False)
    return model, batch


def in_bfloat16() -> tuple[nn.Module, Any]:
    model, batch = layers()
    return model.to(torch.bfloat16), batch.to(torch.bfloat16)


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    function.__name__: function for function in (layers, images, attention, tied, twice, frozen, in_bfloat16)
}


def build(name: str, on_host: bool = False, state: bool = False, in_backward: bool = False) -> trainfit.Step:
    torch.manual_seed(1)
    model, batch = MODELS[name]()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    if in_backward:
        update_in_backward(model, [optimizer])
    if on_host:
        keep_parameters_on_host(model, [optimizer])
    if state:
        keep_state_on_host([optimizer])
    return trainfit.Step.of(model, batch, loss=lambda out: out.square().mean(), optimizer=optimizer)


def results(step: trainfit.Step, steps: int = 3) -> list[Tensor]:
    losses = [step.run().detach() for _ in range(steps)]
    return [*losses, *(parameter.detach() for parameter in step.model.parameters())]


def assert_equal(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other))


@pytest.mark.parametrize("name", MODELS)
def test_results_are_bit_equal(name: str) -> None:
    plain = results(build(name))
    assert_equal(plain, results(build(name, on_host=True)))
    assert_equal(plain, results(build(name, on_host=True, state=True)))
    assert_equal(plain, results(build(name, on_host=True, state=True, in_backward=True)))


@pytest.mark.parametrize("name", ["layers", "images", "attention", "tied", "twice"])
def test_the_peak_is_predicted_to_the_byte(name: str) -> None:
    make = functools.partial(build, name, True, state=name == "layers")
    trace = trainfit.capture(make, device="cpu")
    measured = measure_step(make, "cpu", timed=0)
    assert simulate(trace).peak_bytes == measured.peak_bytes
    assert trace.persistent_bytes == measured.persistent_bytes


def test_one_layer_at_a_time_is_on_the_device() -> None:
    """Eight layers of one MiB with SGD: one MiB of them is in use at a time, beside the gradients."""

    def many(on_host: bool) -> trainfit.Step:
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        if on_host:
            keep_parameters_on_host(model, [optimizer])
        return trainfit.Step.of(model, torch.randn(4, 512), loss=lambda out: out.sum(), optimizer=optimizer)

    traces = [trainfit.capture(functools.partial(many, on_host)) for on_host in (False, True)]
    plain, moved = (simulate(trace) for trace in traces)
    assert traces[0].persistent_bytes - traces[1].persistent_bytes == 8 << 20
    assert moved.peak_by_category["parameter"] == 1 << 20
    # In the update, and no longer at the end of backward with its activations of some KiB.
    assert 0 <= plain.peak_bytes - moved.peak_bytes - (7 << 20) < 16 << 10


def test_each_parameter_passes_the_link_four_times() -> None:
    """In for forward, backward and update, and out after it; the first needs no gradient of its input."""
    trace = trainfit.capture(functools.partial(build, "layers", True), device="a100-40gb")
    copies = [trace.signatures[op.signature] for op in trace.ops if trace.signatures[op.signature].over_link]
    weight = 4 * WIDTH * WIDTH
    large = [copy for copy in copies if copy.moved_bytes // 2 == weight]
    assert len(large) == 4 * 4 - 1
    phases = [op.phase for op in trace.ops if trace.signatures[op.signature] in large]
    assert phases == ["forward"] * 4 + ["backward"] * 3 + ["optimizer"] * 8


def on_host(model: nn.Module) -> list[bool]:
    """Memory that torch's allocator has made can be resized; other memory cannot."""
    return [not parameter.untyped_storage().resizable() for parameter in model.parameters()]


def test_apply_and_remove() -> None:
    step, plain = build("tied"), build("tied")
    with trainfit.applied(step.model, WAY, optimizer=step.optimizers):
        step.run()
        assert all(on_host(step.model)[:2])
    assert not any(on_host(step.model))
    assert all("forward" not in vars(module) for module in step.model.modules())
    for _ in range(2):
        step.run()
        plain.run()
    plain.run()
    assert_equal(list(step.model.parameters()), list(plain.model.parameters()))


def test_what_else_people_do_with_parameters_works() -> None:
    """Reading, writing, saving, loading, copying: between steps a parameter is its values."""
    step, plain = build("layers", on_host=True), build("layers")
    for one in (step, plain):
        one.run()
        with torch.no_grad():
            one.model[0].weight.mul_(0.5)
        one.model.load_state_dict({k: v + 1 for k, v in one.model.state_dict().items()})
        assert one.model[0].weight.shape == (WIDTH, WIDTH)
    copied = copy.deepcopy(step.model)
    batch = torch.randn(2, WIDTH)
    assert torch.equal(step.model(batch), plain.model(batch))
    assert_equal(results(plain), results(step))
    with torch.no_grad():
        assert not torch.equal(copied(batch), step.model(batch)), "a copy has values of its own"
    for one in (step, plain):
        one.model.to(torch.float64)
    batch = batch.double()
    assert torch.equal(step.model(batch), plain.model(batch))


def test_a_forward_that_writes_to_its_parameters_is_not_forgotten() -> None:
    class Decaying(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.mul_(0.5)
            return super().forward(input)

    for moved in (False, True):
        model = Decaying(WIDTH, WIDTH)
        before = model.weight.detach().clone()
        if moved:
            keep_parameters_on_host(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
        model(torch.randn(2, WIDTH))
        assert torch.equal(model.weight, 0.5 * before)


def test_what_is_written_to_after_it_was_saved_is_refused_as_torch_does() -> None:
    class Overwriting(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            squared = super().forward(input).exp()
            squared.add_(1)
            return squared

    step = build("layers", on_host=True)
    loss = step.model(torch.randn(2, WIDTH)).sum()
    with torch.no_grad():
        step.model[2].weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    model = Overwriting(WIDTH, WIDTH)
    keep_parameters_on_host(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.randn(2, WIDTH)).sum().backward()


def refused(model: nn.Module, message: str, *parameters: nn.Parameter) -> None:
    optimizer = torch.optim.AdamW(parameters or model.parameters())
    with pytest.raises(NotPossible, match=message):
        keep_parameters_on_host(model, [optimizer])
    assert all("forward" not in vars(module) for module in model.modules())


def test_what_cannot_be_done_says_why() -> None:
    refused(nn.LSTM(8, 8), "a LSTM uses its parameters where that cannot be noticed")
    model, _ = layers()
    refused(
        model, r"the optimizer does not have 1\.weight, which gets gradients", model[0].weight, model[0].bias
    )
    both = torch.randn(2, 8, 8)
    shared = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer, part in zip(shared, both):
        layer.weight = nn.Parameter(part)
    refused(shared, r"0\.weight shares its memory with other tensors")
    with pytest.raises(trainfit.PlanError, match="parameters: on the host needs the optimizer"):
        trainfit.apply(model, WAY)
    with pytest.raises(NotPossible, match="LBFGS is not one of"):
        keep_parameters_on_host(model, [torch.optim.LBFGS(model.parameters())])


class UsedOutside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(self.one(hidden), self.other.weight).square().mean()


def test_fit_offers_it_without_a_plan_and_refuses_what_a_gpu_would() -> None:
    def outside() -> trainfit.Step:
        model = UsedOutside()
        optimizer = torch.optim.AdamW(model.parameters())
        return trainfit.Step.of(model, torch.randn(4, WIDTH), optimizer=optimizer)

    for target, possible in ((functools.partial(build, "attention"), True), (outside, False)):
        ask = Ask(target, "h100", StepOptions(), None, "default")
        found = ask.captured(())
        assert found is not None
        step = UnchangedStep(found[0], find_device("h100"), "function", ask.takes)
        (change,) = (change for change in changes_of(step) if change.kind == "parameters")
        assert {PLAN, "loss"} <= change.excludes
        changed = ask.captured([change])
        if possible:
            assert changed is not None
            assert simulate(changed[0]).peak_bytes < simulate(found[0]).peak_bytes
        else:
            assert changed is None
            assert "uses a parameter outside of its module's forward" in ask.impossible[change.name]
