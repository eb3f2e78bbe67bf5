"""Collectives: what is exchanged, with whom, and on which queue."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import trainfit
from trainfit.capturing.exchanges import as_ranges
from trainfit.traces.ranks import Collective
from trainfit.traces.trace import COMPUTE, Trace


@pytest.fixture
def four_processes() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def build() -> trainfit.Step:
    model = torch.nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pair = dist.new_group([0, 1])

    def run() -> torch.Tensor:
        loss = model(torch.ones(8, 64)).pow(2).mean()
        loss.backward()
        dist.all_reduce(model.weight.grad)
        dist.all_reduce(model.weight.grad, group=pair)
        dist.all_gather([torch.empty(10) for _ in range(4)], torch.ones(10))
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trainfit.Step(model=model, optimizer=optimizer, run=run)


def collectives(trace: Trace) -> dict[int, Collective]:
    found = {number: trace.signatures[op.signature].collective for number, op in enumerate(trace.ops)}
    return {number: collective for number, collective in found.items() if collective is not None}


@pytest.mark.usefixtures("four_processes")
def test_kind_group_and_bytes_of_each_collective() -> None:
    trace = trainfit.capture(build)
    reduced, reduced_in_pair, gathered = collectives(trace).values()
    assert (reduced.kind, reduced.group_size, reduced.bytes) == ("all_reduce", 4, 64 * 64 * 4)
    assert (reduced_in_pair.kind, reduced_in_pair.group_size) == ("all_reduce", 2)
    assert reduced_in_pair.group != reduced.group
    # What a process gets out: four parts of ten numbers.
    assert gathered == Collective("all_gather", 4, reduced.group, 4 * 10 * 4, ((0, 3, 1),))
    assert [list(one.members) for one in (reduced, reduced_in_pair)] == [[0, 1, 2, 3], [0, 1]]


@pytest.mark.parametrize(
    ("numbers", "ranges"),
    [
        ([], ()),
        ([5], ((5, 5, 1),)),
        ([0, 8, 16, 24], ((0, 24, 8),)),
        ([0, 1, 2, 3, 16, 17, 18, 19], ((0, 3, 1), (16, 19, 1))),
        ([0, 1, 5, 9], ((0, 1, 1), (5, 9, 4))),
    ],
)
def test_ranks_of_a_group_are_few_ranges(
    numbers: list[int], ranges: tuple[tuple[int, int, int], ...]
) -> None:
    assert as_ranges(numbers) == ranges
    assert list(Collective("all_reduce", 1, "", 0, ranges).members) == numbers


@pytest.mark.usefixtures("four_processes")
def test_a_collective_waits_for_what_was_computed_and_the_next_op_waits_for_it() -> None:
    trace = trainfit.capture(build)
    for number, collective in collectives(trace).items():
        op = trace.ops[number]
        assert op.queue == f"group {collective.group}"
        assert COMPUTE in {trace.ops[other].queue for other in op.waits_for}
        after = next(later for later in trace.ops[number:] if later.queue == COMPUTE)
        assert number in after.waits_for


@pytest.mark.usefixtures("four_processes")
def test_two_captures_name_groups_alike() -> None:
    """The handle of a group is another object each time, and must not be part of the trace."""
    first, second = trainfit.capture(build), trainfit.capture(build)
    names = [
        next(trace.signatures[trace.ops[number].signature].arguments for number in collectives(trace))
        for trace in (first, second)
    ]
    assert names[0] == names[1]
    assert "group" in names[0]
