"""Memory that NCCL keeps for itself on a GPU: outside of torch's allocator, for each communicator. Assumed.

A rank keeps buffers for each channel and each rank that it is connected with: 10 MiB to receive (4 MiB, 4.7
MiB and 0.5 MiB for its three protocols, in pages of 2 MiB) and 2 MiB to send; allocations of these sizes are
in the log of https://github.com/NVIDIA/nccl/issues/1685. Collectives run along rings, which connect a rank
with the one before it and the one behind it, whatever the size of the group; since NCCL 2.22 trees and others
are connected when they are used first. There are 24 channels where NVLink connects all ranks, 16 across
nodes, 2 over PCIe: what NCCL prints when it starts on such machines. An all-to-all connects a rank with every
other, by 32 channels within a node.

How far off that is: on 8 H100 an all-to-all was seen to take 3.1 GiB, for which this says 2.6 (the same
issue); before 2.22, with trees connected, a group of A100 took 544 to 688 MiB
(https://github.com/NVIDIA/nccl/issues/964), for which this says 288. Left out are ranks on other nodes that
an all-to-all or a pipeline connects, for which NCCL shares buffers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainfit.devices.architectures import is_amd
from trainfit.devices.device_table import Device
from trainfit.traces.ranks import Cluster, Collective
from trainfit.traces.trace import Trace

CONNECTION_BYTES = 12 << 20
"""Of one channel: to receive from one rank, and to send to one."""
_NVLINK_CHANNELS, _NETWORK_CHANNELS, _PCIE_CHANNELS, _PAIR_CHANNELS = 24, 16, 2, 32
_PAIRS = ("all_to_all", "send", "recv")
"""What connects ranks in pairs; everything else goes along rings."""


@dataclass(frozen=True)
class Communicator:
    """A communication group, and what NCCL is assumed to keep for it on each of its GPUs."""

    group: str
    ranks: int
    bytes: int


def communicators(trace: Trace, device: Device) -> tuple[Communicator, ...]:
    """Return the groups that a step communicates in on a GPU of NVIDIA; nothing for other devices."""
    if trace.cluster is None or device.kind != "cuda" or is_amd(device.architecture):
        return ()
    used: dict[str, list[Collective]] = {}
    for signature in trace.signatures:
        if signature.collective is not None and signature.collective.group_size > 1:
            used.setdefault(signature.collective.group, []).append(signature.collective)
    return tuple(
        Communicator(name, found[0].group_size, _bytes(found, trace.cluster, device))
        for name, found in used.items()
    )


def with_communicators(device: Device, trace: Trace) -> Device:
    """Return the device with what NCCL takes of it in this step, unless somebody has said what it takes."""
    if device.communicator_bytes is not None:
        return device
    found = sum(one.bytes for one in communicators(trace, device))
    return replace(device, communicator_bytes=found) if found else device


def _bytes(collectives: list[Collective], cluster: Cluster, device: Device) -> int:
    near = _on_node(collectives[0], cluster)
    size = collectives[0].group_size
    linked = bool(device.nvlink_bytes_per_second)
    kinds = {one.kind for one in collectives}
    rings = pairs = 0
    if kinds - {*_PAIRS, "barrier"}:
        rings = _NETWORK_CHANNELS if near < size else _NVLINK_CHANNELS if linked else _PCIE_CHANNELS
    if kinds & {*_PAIRS}:
        # A pipeline sends to the stage behind it and gets from the one before; back come gradients.
        peers = near - 1 if "all_to_all" in kinds else min(near - 1, 2)
        pairs = peers * (_PAIR_CHANNELS if linked else _PCIE_CHANNELS)
    return (rings + pairs) * CONNECTION_BYTES


def _on_node(collective: Collective, cluster: Cluster) -> int:
    """Return how many ranks of a group are on the rank's node."""
    if not collective.ranks:
        return min(collective.group_size, cluster.local_world_size)
    first = cluster.node * cluster.gpus_per_node
    last = first + cluster.gpus_per_node - 1
    return sum(_within(*part, first, last) for part in collective.ranks)


def _within(start: int, stop: int, step: int, first: int, last: int) -> int:
    """Count the numbers of a range that are from `first` to `last`."""
    low = max(first, start)
    low += (start - low) % step
    return len(range(low, min(last, stop) + 1, step))
