"""Experts on different ranks that tell each other how many tokens they send, before they send them.

What a rank receives has the shape that these counts say: a capture has to know them. Real processes, which
have the same tokens, say what is right.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from real_ranks import on_ranks
from torch import nn
from torch.distributed import _functional_collectives as functional

from trainfit import Step
from trainfit.capturing import capture
from trainfit.traces.ranks import Cluster

RANKS, WIDTH, PER_RANK = 3, 8, 2
TOKENS = torch.tensor([0, 1, 1, 2, 7, 8, 8, 8, 13, 14, 15, 18, 18, 23])
"""Token t goes to expert t % 6, which rank t % 6 // 2 has."""


class CountedExperts(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.embedding = nn.Embedding(24, WIDTH)
        self.weights = nn.Parameter(torch.randn(PER_RANK, WIDTH, WIDTH))
        self.seen: list[Any] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        experts = tokens % (RANKS * PER_RANK)
        order = experts.argsort(stable=True)
        counts = torch.bincount(experts, minlength=RANKS * PER_RANK)
        received = self._exchanged(counts).view(RANKS, PER_RANK)
        to_send = counts.view(RANKS, PER_RANK).sum(1).tolist()
        to_receive = received.sum(1).tolist()
        here = _sent(self.embedding(tokens[order]), to_receive, to_send)
        own = torch.arange(PER_RANK).repeat(RANKS).repeat_interleave(received.flatten())
        done = torch.cat([here[own == number] @ self.weights[number] for number in range(PER_RANK)])
        self.seen.append((counts.tolist(), received.tolist(), to_send, to_receive, tuple(done.shape)))
        return done

    def _exchanged(self, counts: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(counts)
        if self.way == "one tensor":
            dist.all_to_all_single(received, counts)
        elif self.way == "with sizes":
            dist.all_to_all_single(received, counts, [PER_RANK] * RANKS, [PER_RANK] * RANKS)
        elif self.way == "asynchronous":
            work = dist.all_to_all_single(received, counts, async_op=True)
            assert work is not None
            work.wait()
        else:
            assert self.way == "functional"
            received = functional.all_to_all_single(counts, None, None, dist.group.WORLD)
        return received


def _sent(rows: torch.Tensor, to_receive: list[int], to_send: list[int]) -> torch.Tensor:
    moved = functional.all_to_all_single_autograd(rows, to_receive, to_send, dist.group.WORLD)
    waited: torch.Tensor = functional.wait_tensor(moved)
    return waited


def build(way: str, seen: list[Any]) -> Step:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = CountedExperts(way)
    model.seen = seen
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Step.of(model, TOKENS, loss=torch.Tensor.sum, optimizer=optimizer)


def really(way: str) -> Any:
    seen: list[Any] = []
    build(way, seen).run()
    return seen[0]


@pytest.mark.parametrize("way", ["one tensor", "with sizes", "asynchronous", "functional"])
def test_counts_that_are_exchanged_are_those_of_real_ranks(way: str) -> None:
    real = on_ranks(RANKS, really, way)
    assert [received for _, received, *_ in real] == [[[3, 4]] * 3, [[5, 1]] * 3, [[0, 1]] * 3]
    for rank in range(RANKS):
        seen: list[Any] = []
        trace = capture(partial(build, way, seen), cluster=Cluster(RANKS, rank))
        assert set(map(repr, seen)) == {repr(real[rank])}
        assert not trace.warnings


def lists_and_rows() -> dict[str, Any]:
    pairs = [torch.empty(2, dtype=torch.long) for _ in range(RANKS)]
    dist.all_to_all(pairs, [torch.tensor([number, 10 + number]) for number in range(RANKS)])
    rows = torch.arange(12).view(6, 2)
    return {
        "lists": [pair.tolist() for pair in pairs],
        "rows": functional.all_to_all_single(rows, None, None, dist.group.WORLD).tolist(),
    }


def captured(function: Any, rank: int) -> tuple[Any, tuple[str, ...]]:
    """Return what a function returns in the first run of a step, and the warnings."""
    found: list[Any] = []

    def step() -> Step:
        dist.init_process_group("gloo")
        model = nn.Linear(4, 4)

        def run() -> None:
            found.append(function())
            model(torch.ones(2, 4)).sum().backward()
            model.zero_grad()

        return Step(model=model, optimizer=None, run=run)

    trace = capture(step, cluster=Cluster(RANKS, rank))
    return found[0], trace.warnings


def test_lists_and_rows_are_exchanged_as_by_real_ranks() -> None:
    real = on_ranks(RANKS, lists_and_rows)
    assert real[2]["lists"] == [[2, 12]] * 3
    for rank in range(RANKS):
        assert captured(lists_and_rows, rank) == (real[rank], ())


def uneven() -> list[int]:
    received = torch.empty(6, dtype=torch.long)
    dist.all_to_all_single(received, torch.arange(1, 7), [1, 2, 3], [1, 2, 3])
    values: list[int] = received.tolist()
    return values


def test_parts_of_different_sizes_stay_unknown() -> None:
    """Ranks that have the same sizes would not fit together, so the ranks are not alike."""
    values, warnings = captured(uneven, 0)
    assert values == [0] * 6
    assert any("assumed to be zero" in warning for warning in warnings)
