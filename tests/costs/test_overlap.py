"""Which communication is waited for and what hides the rest, on steps that are laid out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainfit.costs.overlap import unit_communication
from trainfit.costs.schedule import Schedule, schedule
from trainfit.costs.summary import summarise
from trainfit.costs.table import CostTable, Host, OpCost
from trainfit.devices.device_table import Device
from trainfit.traces.ranks import Cluster, Collective
from trainfit.traces.trace import Module, Op, Signature, Trace

DEVICE = Device("tiny", "cuda", 1 << 30, 1e9, {"fp32": 1e12}, sm_count=4)
HOST = Host(False, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
MODULES = (
    Module("Net", "Net", -1, (), (), unit=True),
    Module("Net.a", "A", 0, (), (), unit=True),
    Module("Net.a.inner", "Inner", 1, (), ()),
    Module("Net.b", "B", 0, (), (), unit=True),
)
ROOT, A, INNER, B = range(4)

Line = tuple[str, int, str, float, tuple[int, ...]]
"""What an op is, its module, its queue, its seconds and what it waits for."""


def step(lines: list[Line], taken_share: float = 0.0, node_use: float = 0.0) -> Schedule:
    """Schedule a step; ops named `gather` or `reduce` are collectives of eight ranks."""
    signatures, ops, costs = [], [], []
    for number, (name, module, queue, seconds, waits) in enumerate(lines):
        exchanged = Collective("all_gather", 8, queue, 1 << 20) if name in ("gather", "reduce") else None
        signatures.append(Signature(f"aten.{name}", (), (), "[[],{}]", False, False, False, exchanged))
        ops.append(Op(number, "forward", module, -1, False, -1, (), (), (), queue, waits))
        used = seconds * node_use if exchanged else 0.0
        costs.append(OpCost(seconds, "formula", node_seconds=used))
    trace = Trace("t", "cuda", "2", tuple(signatures), tuple(ops), (), MODULES, (), (), (), (), 0)
    trace = replace(trace, cluster=Cluster(8, mesh=(("dp", 4), ("tp", 2))), tokens=100, samples=10)
    table = CostTable(DEVICE, HOST, tuple(costs), uncertainty=0.1, taken_share=taken_share)
    return schedule(trace, table)


def test_a_gather_is_hidden_by_the_unit_before_and_the_rest_is_waited_for() -> None:
    """`b` is gathered, 8 s, while `a` computes for 5 s: 3 s are waited for."""
    found = step(
        [
            ("gather", A, "group dp", 2.0, (-1,)),
            ("mm", INNER, "compute", 5.0, (0,)),
            ("gather", B, "group dp", 8.0, (0,)),
            ("mm", B, "compute", 4.0, (2,)),
        ]
    )
    # The first gather waits for the step before, as FSDP's does for the optimizer: 2 + max(5, 8) + 4.
    assert found.step_seconds == pytest.approx(14.0)
    rows = {row.unit: row for row in unit_communication(found)}
    assert rows["Net.a"].exposed_seconds == pytest.approx(2.0)
    assert rows["Net.b"].exposed_seconds == pytest.approx(3.0)
    assert rows["Net.b"].seconds == pytest.approx(8.0)
    assert (rows["Net.b"].hidden_behind, rows["Net.b"].hidden_seconds) == ("Net.a (forward)", 5.0)
    assert sum(row.exposed_seconds for row in rows.values()) == pytest.approx(
        found.exposed_communication_seconds
    )


def test_a_wait_is_followed_through_other_streams() -> None:
    """Compute waits for a copy, which waits for a collective."""
    found = step(
        [
            ("mm", A, "compute", 1.0, ()),
            ("reduce", A, "group dp", 6.0, (0,)),
            ("copy", A, "reduce-scatter", 0.0, (1,)),
            ("step", ROOT, "compute", 1.0, (2,)),
        ]
    )
    (row,) = unit_communication(found)
    assert (row.unit, row.collectives, row.bytes) == ("Net.a", 1, 1 << 20)
    assert row.exposed_seconds == pytest.approx(6.0)


def test_collectives_of_two_groups_share_the_link_of_the_node() -> None:
    """Two of 10 s at once, each of which wants all of the link, take 20 s each."""
    lines: list[Line] = [
        ("gather", A, "group dp", 10.0, (-1,)),
        ("gather", A, "group tp", 10.0, (-1,)),
        ("mm", A, "compute", 1.0, (0, 1)),
    ]
    assert step(lines).step_seconds == pytest.approx(11.0)
    assert step(lines, node_use=1.0).step_seconds == pytest.approx(21.0)
    assert step(lines, node_use=0.5).step_seconds == pytest.approx(11.0)


def test_computing_beside_a_collective_is_slower_and_that_is_exposed_too() -> None:
    lines: list[Line] = [("gather", A, "group dp", 8.0, ()), ("mm", A, "compute", 16.0, ())]
    found = step(lines, taken_share=0.2)
    # Eight of its seconds run on 4 / 5 of the device: two more.
    assert found.step_seconds == pytest.approx(18.0)
    assert found.exposed_communication_seconds == pytest.approx(2.0)


def test_tokens_for_each_device_and_in_all() -> None:
    """Four copies of the model on eight devices, each trains on 100 tokens and 10 samples in 2 s."""
    time = summarise(step([("mm", A, "compute", 2.0, ())]))
    assert (time.world_size, time.copies) == (8, 4)
    assert time.tokens_per_second == 50
    assert (time.total_tokens_per_second, time.tokens_per_second_per_device) == (200, 25)
    assert time.total_samples_per_second == 20
    assert time.units == ()
