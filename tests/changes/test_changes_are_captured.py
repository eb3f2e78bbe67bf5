"""A change that is made to a step is captured as the step would be that was written so from the start."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import trainfit
from trainfit.api.find_ways import Ask
from trainfit.changes.change import StepChange
from trainfit.changes.kinds import changes_of
from trainfit.changes.unchanged_step import UnchangedStep
from trainfit.devices.device_table import find_device
from trainfit.models.recipe import StepOptions
from trainfit.traces.simulate import simulate
from trainfit.traces.trace import Trace

WIDTH, BATCH = 64, 16


def build(
    batch: int = BATCH,
    dtype: torch.dtype = torch.float32,
    parts: int = 1,
    clip: bool = False,
    sgd: bool = False,
    **how: Any,
) -> trainfit.Step:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1)).to(dtype)
    kind: Any = torch.optim.SGD if sgd else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=0.01, **how)
    inputs = torch.randn(batch, WIDTH, dtype=torch.float32)

    def run() -> torch.Tensor:
        for _ in range(parts):
            loss = model(inputs.to(dtype)).sum()
            loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trainfit.Step(model, optimizer, run, samples=batch * parts)


def asked(target: Any = build, device: str = "h100", options: StepOptions | None = None) -> Ask:
    return Ask(target, device, options or StepOptions(), None, "default")


def offered(ask: Ask) -> dict[str, StepChange]:
    found = ask.captured(())
    assert found is not None
    step = UnchangedStep(found[0], find_device(str(ask.device)), "function", ask.takes)
    return {change.name: change for change in changes_of(step)}


def ops_of(trace: Trace) -> list[tuple[str, str]]:
    return [(op.phase, trace.op_name(number)) for number, op in enumerate(trace.ops)]


def figures(trace: Trace) -> tuple[list[tuple[str, str]], int, int]:
    return ops_of(trace), simulate(trace).peak_bytes, trace.persistent_bytes


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("optimizer: fused", {"fused": True}),
        ("optimizer: SGD without momentum", {"sgd": True}),
    ],
)
def test_an_optimizer_is_as_if_it_had_been_written(name: str, written: dict[str, Any]) -> None:
    ask = asked()
    changed = ask.captured([offered(ask)[name]])
    assert changed is not None
    by_hand = trainfit.capture(lambda: build(**written), device="h100")
    assert figures(changed[0]) == figures(by_hand)


def test_foreach_and_one_by_one_are_offered_where_there_is_no_fused_kernel() -> None:
    def with_rmsprop(foreach: bool = True) -> trainfit.Step:
        model = nn.Linear(WIDTH, WIDTH)
        optimizer = torch.optim.RMSprop(model.parameters(), foreach=foreach)
        return trainfit.Step.of(model, torch.randn(4, WIDTH), loss=torch.mean, optimizer=optimizer)

    ask = asked(with_rmsprop)
    found = offered(ask)
    assert "optimizer: fused" not in found
    changed = ask.captured([found["optimizer: for-loop"]])
    assert changed is not None
    by_hand = trainfit.capture(lambda: with_rmsprop(foreach=False), device="h100")
    assert figures(changed[0]) == figures(by_hand)


def test_smaller_batches_are_as_a_loop_over_them() -> None:
    """Two passes are captured, however many there are: the rest are like the second."""
    ask = asked(options=StepOptions(batch=BATCH))
    found = offered(ask)
    assert [name for name in found if name.startswith("batch")] == [
        *("batch: 2 x 8", "batch: 4 x 4", "batch: 8 x 2", "batch: 16 x 1"),
    ]
    changed = ask.captured([found["batch: 4 x 4"]])
    assert changed is not None
    by_hand = trainfit.capture(lambda: build(batch=4, parts=2), device="h100")
    _same_but_for_a_loss(changed[0], by_hand)
    assert changed[0].samples == 8 and found["batch: 4 x 4"].repeats == 4


def test_accumulation_leaves_clipping_to_the_last_batch() -> None:
    ask = asked(lambda batch=BATCH: build(batch, clip=True), options=StepOptions(batch=BATCH))
    changed = ask.captured([offered(ask)["batch: 2 x 8"]])
    assert changed is not None
    by_hand = trainfit.capture(lambda: build(batch=8, parts=2, clip=True), device="h100")
    _same_but_for_a_loss(changed[0], by_hand)


def _same_but_for_a_loss(one: Trace, other: Trace) -> None:
    """The loss of the first batch is a number in a block of 512 bytes, which either may hold longer."""
    assert ops_of(one) == ops_of(other)
    assert one.persistent_bytes == other.persistent_bytes
    assert abs(simulate(one).peak_bytes - simulate(other).peak_bytes) <= 512


def test_parameters_in_bf16() -> None:
    ask = asked()
    changed = ask.captured([offered(ask)["dtype: bf16"]])
    assert changed is not None
    by_hand = trainfit.capture(lambda: build(dtype=torch.bfloat16), device="h100")
    assert changed[0].persistent_bytes == by_hand.persistent_bytes
    assert simulate(changed[0]).peak_bytes == simulate(by_hand).peak_bytes


def test_eight_bit_state_is_what_bitsandbytes_keeps() -> None:
    """4,096 numbers: two bytes each, and two float32 for each of 16 blocks; fewer are in float32."""
    ask = asked()
    changed = ask.captured([offered(ask)["optimizer: 8-bit state"]])
    assert changed is not None
    state = sum(s.bytes for s in changed[0].storages if s.category == "optimizer_state")
    small = WIDTH + WIDTH + 1  # a bias, the second weight and its bias
    assert state == 2 * WIDTH * WIDTH + 2 * 4 * 16 + 2 * 4 * small


def test_updates_in_backward_are_not_offered_where_gradients_are_clipped() -> None:
    assert "optimizer: in backward" in offered(asked())
    assert "optimizer: in backward" not in offered(asked(lambda: build(clip=True)))


def test_a_change_that_cannot_be_made_says_why() -> None:
    """The same without a look at gradients: in the first run it is noticed that there are two backwards."""
    ask = asked(lambda: build(parts=2))
    change = offered(asked())["optimizer: in backward"]
    assert ask.captured([change]) is None
    assert ask.impossible == {"optimizer: in backward": "gradients are accumulated over several backwards"}


def test_a_step_that_accumulates_is_offered_less() -> None:
    kinds = {change.kind for change in offered(asked(lambda: build(parts=2))).values()}
    assert kinds == {"allocator", "optimizer", "parameters", "state", "dtype"}
    names = set(offered(asked(lambda: build(parts=2))))
    assert not any("in backward" in name for name in names)


def test_a_target_without_a_size_is_not_offered_smaller_batches() -> None:
    def fixed() -> trainfit.Step:
        return build()

    assert not [name for name in offered(asked(fixed)) if name.startswith("batch")]
