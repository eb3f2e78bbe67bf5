"""What NCCL keeps for itself on a GPU, by group: computed by hand, and beside what was seen."""

from __future__ import annotations

from dataclasses import replace

import pytest
from trace_text import trace

from trainfit.devices.communicator_buffers import communicators, with_communicators
from trainfit.devices.device_table import CONTEXT_BYTES, Device, find_device
from trainfit.traces.ranks import Cluster, Collective
from trainfit.traces.trace import Trace

MIB = 1 << 20
STEP = trace("""
    x            : 400 held
    a = gelu(x)  : 400
    b = relu(a)  : 400
    y = sum(b)   :   4 output
""")
H100 = find_device("h100")


def communicating(*collectives: Collective, world: int = 16, rank: int = 0) -> Trace:
    signatures = [
        replace(signature, collective=collective)
        for signature, collective in zip(STEP.signatures, collectives)
    ]
    signatures += STEP.signatures[len(collectives) :]
    return replace(STEP, device="cuda", signatures=tuple(signatures), cluster=Cluster(world, rank))


def bytes_of(*collectives: Collective, device: Device = H100, rank: int = 0) -> dict[str, int]:
    found = communicators(communicating(*collectives, rank=rank), device)
    return {one.group: one.bytes for one in found}


def test_rings_have_channels_of_12_mib() -> None:
    """24 on a node, 16 between nodes, 2 over PCIe; a group that is used twice counts once."""
    on_node = Collective("all_gather", 8, "tp", 100, ((0, 7, 1),))
    reduce = Collective("reduce_scatter", 8, "tp", 100, ((0, 7, 1),))
    across = Collective("all_gather", 2, "dp", 100, ((0, 8, 8),))
    assert bytes_of(on_node, reduce, across) == {"tp": 288 * MIB, "dp": 192 * MIB}
    assert bytes_of(on_node, device=find_device("rtx-4090")) == {"tp": 24 * MIB}
    assert bytes_of(Collective("all_reduce", 1, "alone", 100, ((0, 0, 1),))) == {}


def test_pairs_have_channels_for_every_rank_of_the_node() -> None:
    """An all-to-all among 8 H100 was seen to take 4.34 - 1.06 GB: NVIDIA/nccl, issue 1685."""
    (found,) = bytes_of(Collective("all_to_all", 8, "experts", 100, ((0, 7, 1),))).values()
    assert found == 7 * 32 * 12 * MIB
    assert found == pytest.approx(4.34e9 - 1.06e9, rel=0.2)
    # A pipeline whose stages are on two nodes: of four ranks, two are here.
    stages = Collective("send", 4, "pp", 100, ((0, 12, 4),))
    assert bytes_of(stages) == {"pp": 32 * 12 * MIB}
    middle = Collective("send", 8, "pp", 100, ((8, 15, 1),))
    assert bytes_of(middle, rank=10) == {"pp": 2 * 32 * 12 * MIB}


def test_what_nccl_takes_is_not_left_for_tensors() -> None:
    step = communicating(Collective("all_gather", 8, "tp", 100, ((0, 7, 1),)))
    device = with_communicators(H100, step)
    assert H100.usable_bytes - device.usable_bytes == 288 * MIB
    assert device.memory_bytes - device.usable_bytes == CONTEXT_BYTES + 288 * MIB
    assert with_communicators(replace(H100, communicator_bytes=MIB), step).communicator_bytes == MIB
    alone = replace(step, cluster=None)
    assert with_communicators(H100, alone) is H100
    assert with_communicators(find_device("cpu"), step) == find_device("cpu")
    assert communicators(step, find_device("mi300x")) == ()  # RCCL is another library
