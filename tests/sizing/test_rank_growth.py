"""A rank among more ranks, worked out from captures of few, is what a capture of it says."""

from __future__ import annotations

import math

import pytest

from trainfit import Cluster, StepOptions, capture, price
from trainfit.costs.schedule import schedule
from trainfit.devices.device_table import find_device
from trainfit.sizing.rank_growth import Corner, Mesh, RankGrowth, group_dimensions, regrouped
from trainfit.traces.ranks import Collective
from trainfit.traces.trace import Trace
from trainfit.workspace.gpu_workspaces import with_gpu_workspaces


def captured(mesh: Mesh, batch: int = 2, model: str = "llama-tiny") -> Trace:
    cluster = Cluster(world_size=math.prod(size for _, size in mesh), mesh=mesh)
    options = StepOptions(batch=batch, seq=64, dtype="bf16", set={"layers": 2})
    return capture(model, device="h100", options=options, cluster=cluster)


def grown_mesh(fsdp: int, replicate: int) -> Mesh:
    copies = (("replicate", replicate),) if replicate > 1 else ()
    return (*copies, ("fsdp", fsdp), ("tp", 2))


@pytest.mark.parametrize("replicate", [1, 4])
def test_more_ranks_and_a_larger_batch(replicate: int) -> None:
    few = 2 if replicate > 1 else 1
    base = Corner(2, 2, captured(grown_mesh(2, few)))
    others = [Corner(4, 2, captured(grown_mesh(4, few))), Corner(2, 4, captured(grown_mesh(2, few), batch=4))]
    mesh = grown_mesh(16, replicate)
    found = RankGrowth(base, others).at(16, 8, mesh)
    truth = captured(mesh, batch=8)
    assert found is not None
    assert found.storages == truth.storages
    assert found.cluster == truth.cluster
    assert (found.samples, found.tokens) == (truth.samples, truth.tokens)
    found = with_gpu_workspaces(found, find_device("h100"))
    for number, op in enumerate(truth.ops):
        one, other = found.signatures[found.ops[number].signature], truth.signatures[op.signature]
        assert one.collective == other.collective
        assert (one.flops, one.moved_bytes, one.outputs) == (other.flops, other.moved_bytes, other.outputs)
    seconds = [schedule(trace, price(trace, "h100")).step_seconds for trace in (found, truth)]
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-12)


def test_more_ranks_than_rows_are_padded_and_a_row_off() -> None:
    """128 rows over 96 ranks: torch gives two to each of the first, the line says one and a third."""
    corners = [Corner(size, 2, captured((("fsdp", size),))) for size in (2, 64)]
    found = RankGrowth(corners[0], corners[1:]).at(96, 2, (("fsdp", 96),))
    truth = captured((("fsdp", 96),))
    assert found is not None
    off = [abs(one.bytes - other.bytes) for one, other in zip(found.storages, truth.storages)]
    assert 0 < max(off) < max(storage.bytes for storage in truth.storages)


def test_what_takes_another_course_is_not_worked_out() -> None:
    one, several = captured(grown_mesh(2, 1), batch=1), captured(grown_mesh(2, 1), batch=2)
    growth = RankGrowth(Corner(2, 1, one), [Corner(2, 2, several)])
    assert growth.at(2, 4, grown_mesh(2, 1)) is None
    assert growth.at(4, 1, grown_mesh(4, 1)) is None
    same = growth.at(2, 1, grown_mesh(2, 1))
    assert same is not None
    assert (same.storages, same.signatures, same.ops) == (one.storages, one.signatures, one.ops)


def test_groups_of_a_mesh() -> None:
    mesh = (("replicate", 2), ("fsdp", 4), ("cp", 2), ("tp", 2))

    def group(name: str) -> Collective:
        return Collective("all_gather", 2, name, 8)

    assert group_dimensions(group("fsdp_cp"), mesh) == ("fsdp", "cp")
    assert group_dimensions(group("world"), mesh) == ("replicate", "fsdp", "cp", "tp")
    assert group_dimensions(group("first and last stage"), mesh) == ()
    trace = captured((("fsdp", 2), ("tp", 2)))
    wider = regrouped(trace, (("fsdp", 8), ("tp", 2)))
    groups = {(c.group, c.group_size, c.ranks) for s in wider.signatures if (c := s.collective) is not None}
    assert groups == {("fsdp", 8, ((0, 14, 2),)), ("tp", 2, ((0, 1, 1),))}
