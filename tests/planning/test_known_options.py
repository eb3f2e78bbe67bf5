"""Options of one step, used for another: they are its own, or refused where forward or backward differs."""

from __future__ import annotations

import pytest

from trainfit.api.request import Request
from trainfit.costs.schedule import Schedule, schedule
from trainfit.models.recipe import StepOptions
from trainfit.planning.host_copies import HostLink
from trainfit.planning.known_options import KnownOptions
from trainfit.planning.options import options_of
from trainfit.traces.simulate import simulate


def step_of(optimizer: str, batch: int = 16, dtype: str | None = None) -> Schedule:
    options = StepOptions(batch=batch, seq=64, optimizer=optimizer, dtype=dtype)
    request = Request("gpt2-tiny", "h100", options, None)
    trace = request.trace()
    return schedule(trace, request.price(trace))


@pytest.fixture(scope="module")
def adam() -> Schedule:
    return step_of("adamw")


def test_steps_with_other_optimizers_share_their_options(adam: Schedule) -> None:
    fused, known = step_of("adamw-fused"), KnownOptions()
    link = HostLink.of(adam.costs.device)
    first = known.options(adam, simulate(adam.trace).peak_bytes, link)
    second = known.options(fused, simulate(fused.trace).peak_bytes, link)
    assert second is first
    own = options_of(fused, simulate(fused.trace).peak_bytes, link=link)
    assert own == first and len(own[0]) > 20, "what would have been found anew"


@pytest.mark.parametrize("other", [{"batch": 17}, {"dtype": "bf16"}], ids=str)
def test_another_forward_or_backward_has_options_of_its_own(adam: Schedule, other: dict[str, object]) -> None:
    step, known = step_of(**{"optimizer": "adamw", **other}), KnownOptions()  # type: ignore[arg-type]
    first = known.options(adam, simulate(adam.trace).peak_bytes, None)
    second = known.options(step, simulate(step.trace).peak_bytes, None)
    assert second is not first and len(known.known) == 2


def test_only_the_last_steps_are_remembered(adam: Schedule) -> None:
    known, peak = KnownOptions(), simulate(adam.trace).peak_bytes
    links = [None, *(HostLink(speed, 0.0, True) for speed in (1e9, 2e9, 3e9, 4e9))]
    found = [known.options(adam, peak, link) for link in links]
    assert [options for *_, options in known.known] == found[1:]


def test_options_with_copies_are_not_those_without(adam: Schedule) -> None:
    known, peak = KnownOptions(), simulate(adam.trace).peak_bytes
    without = known.options(adam, peak, None)
    assert known.options(adam, peak, HostLink.of(adam.costs.device)) is not without
    assert known.options(adam, peak, None) is without
