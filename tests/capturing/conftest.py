"""What all tests of capture share: one thread, and little for the garbage collector to look through."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# The training steps of the benchmarks are test cases as well: `from cases import all_cases`.
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Models this small lose more to waking threads than they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def little_garbage() -> Iterator[None]:
    """Hide what exists already from the collector: a capture looks through everything, for half a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
