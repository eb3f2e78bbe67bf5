"""Fails when a change raises the peak or the time of the training step by more than a percentage.

    pytest                      compare with baseline.json
    pytest --update-baseline    growth is wanted: store what the step needs now, and commit the file

No GPU is needed. The device is one of trainfit's table and not this machine, so that the figures are the same
wherever the test runs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from model import build

import trainfit

BASELINE = Path(__file__).parent / "baseline.json"
DEVICE = "a100-40gb"
MAX_PEAK, MAX_TIME = "2%", "5%"


def test_the_step_does_not_grow(request: pytest.FixtureRequest) -> None:
    now = trainfit.estimate(build, device=DEVICE)
    if request.config.getoption("--update-baseline"):
        trainfit.save_result(now, BASELINE)
    growth = trainfit.diff(BASELINE, now, max_peak=MAX_PEAK, max_time=MAX_TIME)
    assert not growth.exceeded, f"\n{growth}\nIf this is wanted: pytest --update-baseline"
    print(growth)  # pytest -s shows it
