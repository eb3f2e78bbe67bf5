"""Copies to the host that share the link: what the program lets happen at once, and what plans gain by it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import trainfit
from trainfit import Step
from trainfit.costs.roofline import roofline_costs
from trainfit.devices.device_table import find_device
from trainfit.planning.host_copies import HostLink
from trainfit.planning.link_shares import link_rows
from trainfit.planning.master import MasterProblem
from trainfit.planning.planner import Planner

H100 = find_device("h100")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.first(x))


def build() -> Step:
    model = nn.Sequential(*(Block(1024) for _ in range(4))).to("cuda")
    inputs = torch.randn(8192, 1024, device="cuda")
    return Step.of(model, (inputs,), loss=lambda out: out.square().mean(), optimizer=None)


@pytest.fixture(scope="module", params=[2e10, 2e11], ids=["slow link", "fast link"])
def planner(request: pytest.FixtureRequest) -> Planner:
    trace = trainfit.capture(build, device=H100)
    return Planner(trace, roofline_costs(trace, H100), None, HostLink(request.param, 1e-6, overlaps=True))


def copying(planner: Planner) -> list[int]:
    options = planner.problem.options
    return [number for number, option in enumerate(options) if option.effects[0].host is not None]


def used(effect: Any, moment: int, planner: Planner) -> tuple[float, float]:
    """What of the link a region's copies take at a moment, out and back, worked out from its window."""
    host, trace = effect.host, planner.trace
    seconds = sum(host.link.seconds(trace.storages[number].bytes) for number in host.storages)
    out = effect.region.end <= moment < host.window.freed
    back = host.window.fetched <= moment < effect.insert
    return (
        out * min(seconds / host.window.out_seconds, 1.0),
        back * min(seconds / host.window.back_seconds, 1.0),
    )


def test_the_rows_forbid_what_takes_more_than_the_link_at_any_moment_and_nothing_else(
    planner: Planner,
) -> None:
    options, numbers = planner.problem.options, copying(planner)
    rows = link_rows(planner.trace, [option.effects for option in options])
    assert rows and len(numbers) > 4
    forbidden = allowed = 0
    for pair in itertools.combinations(numbers[:: max(len(numbers) // 16, 1)], 2):
        effects = [options[number].effects[0] for number in pair]
        most = max(
            sum(used(effect, moment, planner)[way] for effect in effects)
            for moment in range(len(planner.trace.ops))
            for way in (0, 1)
        )
        by_rows = max((sum(row.get(number, 0.0) for number in pair) for row in rows), default=0.0)
        both = any(all(number in row for number in pair) for row in rows)
        assert (most > 1 + 1e-9) == (both and by_rows > 1 + 1e-9)
        forbidden, allowed = forbidden + (most > 1), allowed + (both and most <= 1)
    assert forbidden or allowed


def test_sharing_the_link_is_never_slower_than_taking_turns(planner: Planner) -> None:
    problem: MasterProblem = planner.problem
    smallest, most = planner.smallest().peak_bytes, planner.step.peak_bytes
    for part in range(1, 5):
        budget = smallest + (most - smallest) * part // 5
        shared, alone = (
            problem.solve(budget, seconds_limit=20.0, gap_seconds=0.0, link_is_shared=one)
            for one in (True, False)
        )
        assert shared.feasible and shared.seconds <= alone.seconds + 1e-9
        # The plan is what the replay says, with copies that run one after the other; the bound holds for it.
        plan = planner.plan(budget)
        assert plan.fits and plan.plan.bound_seconds <= plan.step_seconds + 1e-12
        certified = planner.certified(alone.options, budget, 0.0)
        slack = 2e-3 * planner.step.step_seconds
        assert not certified.fits or plan.step_seconds <= certified.step_seconds + slack
