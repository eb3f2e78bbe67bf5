"""Steps of a deep model worked out from few layers, against captures of the whole; where that is refused."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest

from trainfit.api.find_ways import Ask
from trainfit.api.model_depth import model_depth
from trainfit.changes.change import StepChange
from trainfit.changes.kinds import changes_of
from trainfit.changes.unchanged_step import UnchangedStep
from trainfit.costs.table import CostTable
from trainfit.fitting.shallow_steps import ShallowSteps
from trainfit.fitting.way_candidates import Candidates
from trainfit.models.recipe import StepOptions
from trainfit.traces.trace import Trace


@pytest.fixture(scope="module")
def deep() -> tuple[Ask, Candidates, list[StepChange]]:
    """GPT-2 with its twelve layers, small otherwise, on a GPU."""
    options = StepOptions(batch=4, seq=128, set={"hidden": 128, "heads": 4, "vocab_size": 2048})
    ask = Ask("gpt2", "a100-40gb", options, None, "default")
    candidates = Candidates(ask.captured, 1 << 30, ask.request().allocator)
    captured = ask.captured(())
    assert captured is not None
    candidates.know((), *captured)
    assert candidates.unplanned(()) is not None
    step = UnchangedStep(captured[0], captured[1].device, "built-in", ask.takes)
    return ask, candidates, changes_of(step)


def shallow_of(ask: Ask, candidates: Candidates) -> ShallowSteps | None:
    depth, base = model_depth(ask.request().found()), candidates.known_outlook(())
    captured = ask.captured(())
    assert depth == ("layers", 12) and base is not None and captured is not None
    return ShallowSteps.of(partial(ask.captured_with, depth[0]), depth[1], captured[0], base)


def test_what_is_worked_out_is_what_a_capture_of_the_whole_has(
    deep: tuple[Ask, Candidates, list[StepChange]],
) -> None:
    ask, candidates, changes = deep
    shallow = shallow_of(ask, candidates)
    assert shallow is not None
    named = {change.name: change for change in changes}
    wanted = ("optimizer: fused", "optimizer: in backward", "loss: in chunks", "batch: 4 x 1", "dtype: bf16")
    several: list[tuple[str, ...]] = [*((name,) for name in wanted), ("optimizer: fused", "batch: 2 x 2")]
    compared = 0
    for names in several:
        if not all(name in named for name in names):
            continue
        combination = [named[name] for name in names]
        whole, worked_out = candidates.unplanned(combination), shallow.outlook(combination)
        assert whole is not None and worked_out is not None
        assert worked_out.step_seconds == pytest.approx(whole.step_seconds, rel=2e-3), names
        assert worked_out.peak_bytes == pytest.approx(whole.peak_bytes, rel=5e-3), names
        # The allocator's share is that of the step as it is.
        assert worked_out.memory_bytes == pytest.approx(whole.memory_bytes, rel=0.15), names
        compared += 1
    assert compared >= 4, sorted(named)
    assert shallow.has_same_forward([named["optimizer: fused"]])


def test_layers_that_are_not_alike_are_captured_whole(
    deep: tuple[Ask, Candidates, list[StepChange]],
) -> None:
    ask, candidates, _ = deep
    captured, base = ask.captured(()), candidates.known_outlook(())
    assert captured is not None and base is not None
    calls: list[int] = []

    def capture(changes: Sequence[StepChange], layers: int) -> tuple[Trace, CostTable] | None:
        calls.append(layers)
        return ask.captured_with("layers", changes, 2 * layers)  # every second layer is another

    assert ShallowSteps.of(capture, 12, captured[0], base) is None
    assert calls == [2, 3]
    assert ShallowSteps.of(capture, 4, captured[0], base) is None  # few enough to be captured
    assert calls == [2, 3]
