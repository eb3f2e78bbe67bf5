"""What the tests of exports share: traces written as text, estimates on a CPU and on a GPU, a plan."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import trainfit
from trainfit.api.choose import plan_step
from trainfit.api.request import Request
from trainfit.costs.estimates import Estimate
from trainfit.planning.plan_results import PlanResult

sys.path.append(str(Path(__file__).parent.parent / "core"))  # trace_text

SMALL = trainfit.StepOptions(batch=2, seq=64)


@pytest.fixture(scope="session")
def on_cpu() -> Estimate:
    return trainfit.estimate("gpt2-tiny", device="cpu", options=SMALL)


@pytest.fixture(scope="session")
def on_gpu() -> Estimate:
    return trainfit.estimate("gpt2-tiny", device="a100-40gb", options=SMALL)


@pytest.fixture(scope="session")
def expandable() -> Estimate:
    return trainfit.estimate("gpt2-tiny", device="a100-40gb", options=SMALL, allocator="expandable")


@pytest.fixture(scope="session")
def sharded() -> Estimate:
    cluster = trainfit.Cluster(world_size=4, mesh=(("dp", 4),))
    return trainfit.estimate("gpt2-tiny", device="a100-40gb", options=SMALL, cluster=cluster)


@pytest.fixture(scope="session")
def planned() -> PlanResult:
    options = trainfit.StepOptions(batch=8, seq=256)
    request = Request("gpt2-tiny", "a100-40gb", options, allocator="none")
    result = plan_step(request, budget=130 << 20)
    assert result.feasible and result.plan.regions
    return result
