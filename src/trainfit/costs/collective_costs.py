"""Seconds of a collective on GPUs: latency + bytes / bandwidth, the least over algorithms and protocols.

NCCL itself chooses so, and the latencies are those of its tuner (`src/graph/tuning.cc` of NVIDIA/nccl); they
were not measured here. A group of n ranks on N nodes, p = n / N on each:

- Ring: n - 1 steps for an all-gather or reduce-scatter, of which N - 1 cross the network, and twice as many
  for an all-reduce. Each rank sends (n - 1) / n of the bytes, twice for an all-reduce.
- Tree, for an all-reduce: up and down again, p - 1 steps within a node and log2(N) between nodes.
- NVLS, for groups within one node of Hopper or newer: the switch adds up and distributes.

The bandwidth is that of the slowest link: NVLink (without it PCIe) within a node, and between nodes the
adapters of the p ranks together. What is not here: contention between groups, topologies of more than two
levels, and the cycles that NCCL's kernels take from compute.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainfit.costs.table import OpCost
from trainfit.devices.device_table import Device
from trainfit.traces.ranks import Cluster, Collective
from trainfit.traces.trace import Signature

COMMUNICATION = "communication"
"""The kind of collectives, as far as speed goes."""
USUAL_NETWORK = 50e9
"""Bytes per second of each GPU between nodes where nobody says: one adapter of 400 Gbit/s per GPU."""
_SLOWEST_PCIE = 16e9
_LINK_SHARE = 0.8
"""What a ring gets of NVLink or PCIe: NCCL's own tuner expects 235 of an A100's 300 GB/s."""
_NETWORK_SHARE = 0.9
_NVLS_SHARE = 0.85
_NVLS_SECONDS = 25e-6
_MICROSECOND = 1e-6


@dataclass(frozen=True)
class Protocol:
    """One way to move data: latencies in seconds, and the share of the bandwidth that is left."""

    base: float
    nvlink: float
    pcie: float
    network: float
    share: float
    beside_network: float = 1.0
    """How many times longer a step within a node takes where the ring also leaves it."""


def _protocol(
    base: float, nvlink: float, pcie: float, network: float, share: float, beside: float = 1.0
) -> Protocol:
    """Return a protocol whose latencies are given in microseconds."""
    us = _MICROSECOND
    return Protocol(base * us, nvlink * us, pcie * us, network * us, share, beside)


# With flags beside every 4 bytes, beside every 120 bytes, and with whole buffers.
RING = (
    _protocol(6.6, 0.6, 1.0, 2.7, 0.25, beside=1.8),
    _protocol(14.0, 1.9, 2.5, 4.0, 0.92),
    _protocol(8.4, 3.4, 5.7, 14.0, 1.0),
)
TREE = (
    _protocol(6.8, 0.6, 1.0, 5.0, 0.9 / 3.8, beside=1.8),
    _protocol(14.0, 1.25, 1.9, 8.5, 0.9 * 0.915),
    _protocol(8.4, 4.0, 4.0, 14.0, 0.9),
)


@dataclass(frozen=True)
class Reach:
    """How many ranks a group has, and on how many nodes."""

    ranks: int
    nodes: int

    @property
    def per_node(self) -> float:
        """Ranks on each node, on average."""
        return self.ranks / self.nodes


@dataclass(frozen=True)
class Links:
    """What connects the GPUs of a cluster, in bytes per second and direction, for each GPU."""

    inside: float
    """To the others of its node."""
    network: float
    """To other nodes."""
    nvlink: bool = True
    switch_adds: bool = False
    """Whether the switch of a node adds up what passes it (NVLS)."""

    @staticmethod
    def of(device: Device, cluster: Cluster | None) -> Links:
        """Return the links of a cluster of these devices."""
        nvlink = device.nvlink_bytes_per_second
        network = cluster.network_bytes_per_second if cluster is not None else None
        inside = nvlink or device.pcie_bytes_per_second or _SLOWEST_PCIE
        generation = device.architecture.removeprefix("sm_")
        hopper = generation.isdecimal() and int(generation) >= 90
        return Links(inside, network or USUAL_NETWORK, nvlink is not None, hopper and nvlink is not None)

    def bandwidth(self, reach: Reach) -> float:
        """Return what a ring through the group carries."""
        inside = self.inside * _LINK_SHARE if reach.per_node > 1 else math.inf
        outside = max(reach.per_node, 1.0) * self.network * _NETWORK_SHARE if reach.nodes > 1 else math.inf
        return min(inside, outside)

    def step(self, protocol: Protocol, reach: Reach) -> float:
        """Return the latency of a step within a node."""
        alone = protocol.nvlink if self.nvlink else protocol.pcie
        return alone * (protocol.beside_network if reach.nodes > 1 else 1.0)


def reach_of(collective: Collective, cluster: Cluster | None) -> Reach:
    """Return on how many nodes a group is; where its ranks are not known, they are side by side."""
    per_node = cluster.gpus_per_node if cluster is not None else 8
    if not collective.ranks:
        return Reach(collective.group_size, -(-collective.group_size // per_node))
    return Reach(collective.group_size, len({rank // per_node for rank in collective.members}))


def collective_cost(signature: Signature, links: Links, cluster: Cluster | None) -> OpCost | None:
    """Return what a collective costs; None for operators that exchange nothing."""
    collective = signature.collective
    if collective is None:
        return None
    reach = reach_of(collective, cluster)
    seconds = collective_seconds(collective.kind, collective.bytes, reach, links)
    waiting = collective_seconds(collective.kind, 0, reach, links)
    bound = "latency" if waiting > seconds / 2 else "network"
    return OpCost(seconds, "formula", bound, kernels=1 if seconds else 0, kind=COMMUNICATION)


def collective_seconds(kind: str, size: int, reach: Reach, links: Links) -> float:
    """Return how long a collective takes; `size` is the larger of what a rank puts in and gets out."""
    if reach.ranks <= 1:
        return 0.0
    others = (reach.ranks - 1) / reach.ranks
    match kind:
        case "all_gather" | "reduce_scatter":
            return min(_ring(1, size * others, reach, links), _switched(size * others, reach, links))
        case "all_reduce" | "barrier":
            return min(
                _ring(2, 2 * size * others, reach, links),
                _tree(2 * size, reach, links),
                _switched(2 * size * others, reach, links),
            )
        case "all_to_all":
            return _exchange(size, reach, links)
        case "send" | "recv" | "permute":
            return _one_way(size, reach, links)
        case _:  # one to all, or all to one: through the ring, piece by piece
            return _ring(1, size, reach, links)


def _ring(rounds: int, sent: float, reach: Reach, links: Links) -> float:
    across = rounds * (reach.nodes - 1)
    within = rounds * (reach.ranks - 1) - across
    return min(
        protocol.base
        + within * links.step(protocol, reach)
        + across * protocol.network
        + sent / (links.bandwidth(reach) * protocol.share)
        for protocol in RING
    )


def _tree(sent: float, reach: Reach, links: Links) -> float:
    levels = math.floor(math.log2(reach.nodes))
    return min(
        protocol.base
        + 2 * ((reach.per_node - 1) * links.step(protocol, reach) + levels * protocol.network)
        + sent / (links.bandwidth(reach) * protocol.share)
        for protocol in TREE
    )


def _switched(sent: float, reach: Reach, links: Links) -> float:
    if not links.switch_adds or reach.nodes > 1:
        return math.inf
    return _NVLS_SECONDS + sent / (links.inside * _NVLS_SHARE)


def _exchange(size: int, reach: Reach, links: Links) -> float:
    """Every rank sends a part to every other: those of other nodes get theirs through its own adapter."""
    outside = size * (reach.ranks - reach.per_node) / reach.ranks / (links.network * _NETWORK_SHARE)
    inside = size * (reach.per_node - 1) / reach.ranks / (links.inside * _LINK_SHARE)
    return _one_way(0, reach, links) + max(inside, outside)


def _one_way(size: int, reach: Reach, links: Links) -> float:
    """From one rank to another; in a group on several nodes, to another node."""
    protocol = RING[-1]
    if reach.nodes > 1:
        return protocol.base + protocol.network + size / (links.network * _NETWORK_SHARE)
    return protocol.base + links.step(protocol, reach) + size / (links.inside * _LINK_SHARE)
