"""What all tests of plans that are made where training runs share: one thread, a machine of known speed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from known_speed import known_speed


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Models this small lose more to waking threads than they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def _known_speed() -> Iterator[None]:
    with known_speed():
        yield
