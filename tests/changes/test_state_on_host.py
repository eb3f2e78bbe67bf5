"""State that is kept on the host: the same numbers, as much less memory as predicted, and put back whole."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainfit
from trainfit.api.find_ways import Ask
from trainfit.changes.change import NotPossible
from trainfit.changes.host_memory import host_like
from trainfit.changes.kinds import changes_of
from trainfit.changes.offloaded_state import keep_state_on_host
from trainfit.changes.unchanged_step import UnchangedStep
from trainfit.changes.updates_in_backward import update_in_backward
from trainfit.costs.roofline import roofline_costs
from trainfit.devices.device_table import find_device
from trainfit.models.recipe import StepOptions
from trainfit.plans.ways import BIT_EQUAL, ChangeMade, Way
from trainfit.traces.simulate import simulate
from trainfit.verifying.measuring import measure_step

Optimizer = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True, amsgrad=True),
    "AdamW one by one": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}
ON_HOST = ChangeMade("state", "on the host", "", BIT_EQUAL, by_apply=True)
WAY = Way("step", "cpu", (ON_HOST,), None, 0, 0, 1.0, None, None)


def model_and_batch() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16), nn.LayerNorm(16))
    model[3].bias.requires_grad_(False)
    return model, torch.randn(8, 16)


def trained(make: Optimizer, on_host: bool, with_closure: bool = False) -> tuple[list[Tensor], Any]:
    model, batch = model_and_batch()
    optimizer = make([{"params": model[:2].parameters(), "lr": 0.03}, {"params": model[2:].parameters()}])
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    if on_host:
        keep_state_on_host([optimizer])

    def losses() -> Tensor:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    for _ in range(4):
        if with_closure:
            assert optimizer.step(losses).dim() == 0
        else:
            losses()
            optimizer.step()
        assert len(optimizer.param_groups) == 2
        schedule.step()
    return [p.detach() for p in model.parameters()], optimizer.state_dict()


def assert_same_state(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for number, values in one["state"].items():
        for key, value in values.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other["state"][number][key]))


@pytest.mark.parametrize("with_closure", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_and_state_are_bit_equal(name: str, with_closure: bool) -> None:
    plain, state = trained(OPTIMIZERS[name], on_host=False, with_closure=with_closure)
    moved, moved_state = trained(OPTIMIZERS[name], on_host=True, with_closure=with_closure)
    assert all(torch.equal(one, other) for one, other in zip(plain, moved))
    assert_same_state(state, moved_state)


def is_on_host(tensor: Tensor) -> bool:
    """Memory that torch's allocator has made can be resized; other memory cannot."""
    return not tensor.untyped_storage().resizable()


def large_state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in values if isinstance(value, Tensor) and value.dim()]


def test_state_is_written_loaded_and_brought_back() -> None:
    make = OPTIMIZERS["AdamW one by one"]
    model, batch = model_and_batch()
    optimizer = make(model.parameters())
    model(batch).sum().backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    (moved,) = keep_state_on_host([optimizer])
    assert large_state(optimizer) and all(map(is_on_host, large_state(optimizer)))
    optimizer.step()
    after = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(copy.deepcopy(saved))
    assert all(map(is_on_host, large_state(optimizer)))
    assert_same_state(optimizer.state_dict(), saved)
    optimizer.step()
    assert_same_state(
        {"param_groups": [], "state": {n: {"step": s["step"]} for n, s in after["state"].items()}},
        {
            "param_groups": [],
            "state": {n: {"step": s["step"]} for n, s in optimizer.state_dict()["state"].items()},
        },
    )
    now = copy.deepcopy(optimizer.state_dict())
    moved.remove()
    assert not any(map(is_on_host, large_state(optimizer)))
    assert_same_state(optimizer.state_dict(), now)
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


LAYERS, WIDTH = 6, 256
LAYER_BYTES = 4 * WIDTH * WIDTH


def build(on_host: bool = False, in_backward: bool = False) -> trainfit.Step:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    if in_backward:
        update_in_backward(model, [optimizer])
    if on_host:
        keep_state_on_host([optimizer])
    return trainfit.Step.of(model, torch.randn(8, WIDTH), loss=lambda out: out.sum(), optimizer=optimizer)


def applied() -> trainfit.Step:
    step = build()
    trainfit.apply(step.model, WAY, optimizer=step.optimizers)
    return step


@pytest.mark.parametrize("make", [build, functools.partial(build, True), applied])
def test_the_peak_is_predicted_to_the_byte(make: Callable[[], trainfit.Step]) -> None:
    trace = trainfit.capture(make, device="cpu")
    measured = measure_step(make, "cpu", timed=0)
    assert simulate(trace).peak_bytes == measured.peak_bytes
    assert trace.persistent_bytes == measured.persistent_bytes


def test_the_state_of_one_layer_at_a_time_is_on_the_device() -> None:
    traces = [trainfit.capture(functools.partial(build, on_host)) for on_host in (False, True)]
    peaks = [simulate(trace).peak_bytes for trace in traces]
    assert traces[0].persistent_bytes - traces[1].persistent_bytes == 2 * LAYERS * LAYER_BYTES
    # And a temporary that the loop of a whole step still has from the layer before.
    assert peaks[0] - peaks[1] == (2 * (LAYERS - 1) + 1) * LAYER_BYTES


def test_in_backward_it_is_the_same_and_frees_gradients_too() -> None:
    steps = [build(), build(on_host=True, in_backward=True)]
    for _ in range(3):
        for step in steps:
            step.run()
    one, other = (list(step.model.parameters()) for step in steps)
    assert all(torch.equal(a, b) for a, b in zip(one, other))
    trace = trainfit.capture(lambda: build(on_host=True, in_backward=True))
    alone = trainfit.capture(lambda: build(on_host=True))
    assert simulate(trace).peak_bytes < simulate(alone).peak_bytes - (LAYERS - 2) * LAYER_BYTES


def test_on_a_gpu_each_state_passes_the_link_twice() -> None:
    trace = trainfit.capture(functools.partial(build, True), device="a100-40gb")
    costs = roofline_costs(trace, find_device("a100-40gb")).costs
    copies = [op.signature for op in trace.ops if trace.signatures[op.signature].over_link]
    assert len(copies) == 2 * 2 * LAYERS
    assert sum(trace.signatures[copy].moved_bytes // 2 for copy in copies) == 4 * LAYERS * LAYER_BYTES
    # Fourth generation of PCIe: 32 GB/s, of which at most all is used.
    assert sum(costs[copy].seconds for copy in copies) > 4 * LAYERS * LAYER_BYTES / 32e9
    assert sum(s.bytes for s in trace.storages if s.category == "optimizer_state" and s.persistent) == 0


def test_remove_puts_the_state_back() -> None:
    step, plain = build(), build()
    with trainfit.applied(step.model, WAY, optimizer=step.optimizers):
        step.run()
        assert all(map(is_on_host, large_state(step.optimizers[0])))
    step.run()
    assert not any(map(is_on_host, large_state(step.optimizers[0])))
    plain.run()
    plain.run()
    assert all(torch.equal(a, b) for a, b in zip(step.model.parameters(), plain.model.parameters()))


def test_without_the_optimizer_or_with_one_that_cannot_be_split_it_is_refused() -> None:
    with pytest.raises(trainfit.PlanError, match="state: on the host needs the optimizer"):
        trainfit.apply(build().model, WAY)
    model, _ = model_and_batch()
    with pytest.raises(NotPossible, match="LBFGS is not one of torch's optimizers that update each"):
        keep_state_on_host([torch.optim.LBFGS(model.parameters())])

    class Own(torch.optim.SGD):
        pass

    with pytest.raises(trainfit.PlanError, match="cannot be done here: Own is not one of torch's"):
        trainfit.apply(model, WAY, optimizer=Own(model.parameters(), lr=0.1))


def test_a_hook_that_would_come_too_late_is_an_error() -> None:
    step = build(on_host=True)
    step.optimizers[0].register_step_pre_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="Register it before"):
        step.run()
    assert len(step.optimizers[0].param_groups) == 1


def test_hooks_from_before_are_called_once_and_see_the_groups() -> None:
    step, seen = build(), []
    for register in ("register_step_pre_hook", "register_step_post_hook"):
        getattr(step.optimizers[0], register)(lambda o, *_: seen.append(len(o.param_groups[0]["params"])))
    keep_state_on_host(step.optimizers)
    step.run()
    assert seen == [LAYERS, LAYERS]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 5).t(),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(6, 6)[:, ::2],
        torch.zeros(0, 4),
        torch.arange(5),
    ],
)
def test_memory_of_the_host_has_the_layout_of_the_tensor(tensor: Tensor) -> None:
    home = host_like(tensor)
    assert home.shape == tensor.shape and home.dtype == tensor.dtype
    assert home.stride() == torch.empty_like(tensor).stride()
    assert torch.equal(home.copy_(tensor), tensor)


def test_fit_offers_it_and_captures_what_apply_makes() -> None:
    ask = Ask(build, "h100", StepOptions(), None, "default")
    found = ask.captured(())
    assert found is not None
    step = UnchangedStep(found[0], find_device("h100"), "function", ask.takes)
    (change,) = (change for change in changes_of(step) if change.kind == "state")
    assert change.made.by_apply and change.made.exactness == BIT_EQUAL
    changed = ask.captured([change])
    assert changed is not None
    by_hand = trainfit.capture(functools.partial(build, True), device="h100")
    assert simulate(changed[0]).peak_bytes == simulate(by_hand).peak_bytes
    assert len(changed[0].ops) == len(by_hand.ops)


def test_nothing_is_offered_where_nothing_is_kept() -> None:
    def plain() -> trainfit.Step:
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return trainfit.Step.of(model, torch.randn(2, 8), loss=torch.mean, optimizer=optimizer)

    ask = Ask(plain, "h100", StepOptions(), None, "default")
    found = ask.captured(())
    assert found is not None
    step = UnchangedStep(found[0], find_device("h100"), "function", ask.takes)
    assert not [change for change in changes_of(step) if change.kind == "state"]
