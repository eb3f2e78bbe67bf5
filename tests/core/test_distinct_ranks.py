"""Which ranks are looked at for the worst one: few, whatever the size of the cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest
from trace_text import trace

from trainfit.devices.distinct_ranks import MOST_CAPTURES, distinct_ranks
from trainfit.traces.ranks import Cluster, Collective
from trainfit.traces.trace import Trace

STEP = trace("""
    x              : 100 held
    a = mm(x, x)   : 100
    y = sum(a)     :   1 output
""")


def of_mesh(**sizes: int) -> tuple[int, ...]:
    ranks = 1
    for size in sizes.values():
        ranks *= size
    return distinct_ranks(Cluster(ranks, mesh=tuple(sizes.items())), STEP)


def exchanging(*collectives: Collective) -> Trace:
    signatures = [replace(STEP.signatures[0], collective=collective) for collective in collectives]
    return replace(STEP, signatures=(*STEP.signatures, *signatures))


def test_of_what_is_divided_the_first_and_the_last() -> None:
    assert of_mesh(dp=8) == (7,)
    assert of_mesh(dp=2048, tp=8) == (16_383,)


def test_every_stage_of_a_pipeline() -> None:
    assert of_mesh(pp=4) == (1, 2, 3)
    # Stage s begins at 8 s; the last rank of each is 7 further.
    assert of_mesh(pp=3, dp=4, tp=2) == (7, 8, 15, 16, 23)


def test_where_stages_are_too_many_the_outer_ones() -> None:
    found = of_mesh(pp=128)
    assert len(found) == MOST_CAPTURES - 1
    assert {1, 2, 126, 127} <= set(found)


def test_without_a_mesh_the_groups_of_the_first_rank_say_what_there_is() -> None:
    world = Cluster(16)
    assert distinct_ranks(world, STEP) == (15,)
    tensor, data = Collective("all_reduce", 4, "1", 8, ((0, 3, 1),)), ((0, 12, 4),)
    assert distinct_ranks(world, exchanging(tensor, Collective("all_gather", 4, "2", 8, data))) == (3, 12, 15)
    # Every stage, with its first rank and its last.
    stages = Collective("send", 4, "2", 8, data)
    assert distinct_ranks(world, exchanging(tensor, stages)) == (3, 4, 7, 8, 11, 12, 15)


def test_without_a_mesh_a_world_around_the_groups_is_no_dimension() -> None:
    """Stages 0 and 8; of each the first and the last of 2 x 4 ranks, as with --mesh pp=2,dp=2,tp=4."""
    tensor = Collective("all_reduce", 4, "tp", 8, ((0, 3, 1),))
    data = Collective("all_gather", 2, "dp", 8, ((0, 4, 4),))
    world = Collective("all_reduce", 16, "world", 8, ((0, 15, 1),))
    stages = Collective("send", 2, "pp", 8, ((0, 8, 8),))
    found = distinct_ranks(Cluster(16), exchanging(world, tensor, data, stages))
    assert {0, *found} >= {0, *of_mesh(pp=2, dp=2, tp=4)} == {0, 7, 8, 15}
    assert found == (3, 4, 7, 8, 15)  # and the last of each group of rank 0


def test_without_a_mesh_other_ranks_may_show_more() -> None:
    """Rank 4, a stage of rank 0's pipeline, communicates with 5 to 7, which rank 0 has nothing to do with."""
    first = exchanging(Collective("send", 2, "pp", 8, ((0, 4, 4),)))
    second = exchanging(Collective("all_reduce", 4, "tail", 8, ((4, 6, 1),)))
    assert distinct_ranks(Cluster(16), first) == (4, 15)
    assert distinct_ranks(Cluster(16), first, second) == (4, 6, 15)


@pytest.mark.parametrize("world_size", [1, 2])
def test_small_worlds(world_size: int) -> None:
    assert distinct_ranks(Cluster(world_size), STEP) == tuple(range(1, world_size))
