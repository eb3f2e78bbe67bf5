"""The meshes of a number of ranks, and how a batch is divided among them."""

from __future__ import annotations

import math

import pytest

from trainfit.scaling.mesh_candidates import Division, MeshSizes, divisions, divisors, meshes


def test_every_mesh_has_all_ranks_and_occurs_once() -> None:
    found = list(meshes(48, ("replicate",), (1, 2, 4, 8), (1, 2), (1, 2, 4)))
    assert len(found) == len(set(found))
    assert all(one.ranks == 48 for one in found)
    # As often as 48 can be written as such a product, counted another way.
    pairs = [
        (tp, cp, pp) for tp in (1, 2, 4, 8) for cp in (1, 2) for pp in (1, 2, 4) if 48 % (tp * cp * pp) == 0
    ]
    assert len(found) == sum(len(divisors(48 // math.prod(pair))) for pair in pairs)


def test_without_replicate_fsdp_has_what_is_left() -> None:
    assert [one.words for one in meshes(16, ("fsdp",), (1, 4), (1,), (1,))] == ["fsdp=16", "fsdp=4,tp=4"]


def test_the_mesh_as_it_is_written() -> None:
    sizes = MeshSizes(pp=2, replicate=2, fsdp=4, cp=2, tp=8)
    assert sizes.words == "pp=2,replicate=2,fsdp=4,cp=2,tp=8"
    assert (sizes.ranks, sizes.copies, sizes.shards) == (256, 8, 8)
    assert MeshSizes().words == "fsdp=1"


@pytest.mark.parametrize(
    ("sizes", "batch", "expected"),
    [
        (MeshSizes(fsdp=8), 32, [(1, 4), (2, 2), (4, 1)]),
        (MeshSizes(fsdp=8), 24, [(1, 3)]),
        (MeshSizes(fsdp=8), 12, []),
        (MeshSizes(pp=4, fsdp=2), 32, [(1, 16)]),
        (MeshSizes(pp=4, fsdp=2), 4, []),
    ],
)
def test_divisions_of_a_global_batch(sizes: MeshSizes, batch: int, expected: list[tuple[int, int]]) -> None:
    found = divisions(sizes, batch)
    assert [(one.micro_batch, one.accumulation) for one in found] == expected
    assert all(one.samples * sizes.copies == batch for one in found)


def test_without_a_global_batch_nothing_is_accumulated() -> None:
    assert divisions(MeshSizes(fsdp=8), None)[:3] == [Division(1), Division(2), Division(4)]
    assert divisions(MeshSizes(pp=4), None) == [Division(1, 16)]
