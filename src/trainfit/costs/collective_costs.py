"""Seconds of a collective on GPUs: latency + bytes / bandwidth, the least over algorithms and protocols.

NCCL itself chooses so, and the latencies are those of its tuner (`src/graph/tuning.cc` of NVIDIA/nccl); they
were not measured here. A group of n ranks on N nodes, p = n / N on each:

- Ring: n - 1 steps for an all-gather or reduce-scatter, of which N - 1 cross the network, and twice as many
  for an all-reduce. Each rank sends (n - 1) / n of the bytes, twice for an all-reduce.
- Tree, for an all-reduce: up and down again, p - 1 steps within a node and log2(N) between nodes.
- NVLS, for groups on Hopper or newer: the switch of a node adds up and distributes. Between nodes an
  all-reduce goes along a tree; gathers and scatters use it within one node only.
- PAT, for all-gather and reduce-scatter with one rank per node: log2(N) steps.

The bandwidth is that of the slowest link: within a node NVLink, or PCIe where NVLink does not connect all
ranks of the group (bridges connect two), and between nodes the adapters of the p ranks together. Other groups
of a node do the same at the same time, each with the adapters of its own ranks: so none has more than its
part of the node's network. What a rank's own groups do at once, and what NCCL's kernels take from computing,
is in `contention.py`. What is not here: topologies of more than two levels, and congestion between switches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from trainfit.costs.table import OpCost
from trainfit.devices.device_table import Device
from trainfit.devices.efficiency import Constants
from trainfit.traces.ranks import Cluster, Collective
from trainfit.traces.trace import Signature

COMMUNICATION = "communication"
"""The kind of collectives, as far as speed goes."""
USUAL_NETWORK = 50e9
"""Bytes per second of each GPU between nodes where nobody says: one adapter of 400 Gbit/s per GPU."""
_SLOWEST_PCIE = 16e9
_NVLS_SHARE = 0.85
_NVLS_SECONDS = 25e-6
_PAT_SHARE = 0.75
_PAT_SECONDS = 8e-6
_BRIDGED = 2
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
    islands: int = 0
    """On how many sets of GPUs that NVLink connects; 0: one for each node."""

    @property
    def bridged(self) -> bool:
        """Whether NVLink connects all ranks that are on one node."""
        return self.islands <= self.nodes

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
    pcie: float = _SLOWEST_PCIE
    """To those of its node that NVLink does not connect it with."""
    nvlink_gpus: int = 0
    """How many GPUs NVLink connects, side by side; 0: all of a node."""
    link_share: float = Constants.link_share
    """What a ring gets of the links within a node."""
    network_share: float = Constants.network_share
    """What it gets of the network."""

    @staticmethod
    def of(device: Device, cluster: Cluster | None, constants: Constants | None = None) -> Links:
        """Return the links of a cluster of these devices: what the user says, or what such nodes have."""
        constants = constants or Constants()
        nvlink, pcie = device.nvlink_bytes_per_second, device.pcie_bytes_per_second or _SLOWEST_PCIE
        said = cluster.network_bytes_per_second if cluster is not None else None
        network = said or device.network_bytes_per_second or USUAL_NETWORK
        generation = device.architecture.removeprefix("sm_")
        hopper = generation.isdecimal() and int(generation) >= 90
        connected = device.nvlink_gpus or 0
        # A bridge between two cards has no switch.
        switched = hopper and nvlink is not None and connected != _BRIDGED
        shares = constants.link_share, constants.network_share
        return Links(nvlink or pcie, network, nvlink is not None, switched, pcie, connected, *shares)

    def bandwidth(self, reach: Reach) -> float:
        """Return what a ring through the group carries."""
        return min(self.within_node(reach), self.between_nodes(reach))

    def within_node(self, reach: Reach) -> float:
        """Return what one GPU gets to the others of its node; infinite if there are none of the group."""
        if reach.per_node <= 1:
            return math.inf
        return (self.inside if reach.bridged else min(self.inside, self.pcie)) * self.link_share

    def between_nodes(self, reach: Reach) -> float:
        """Return what the adapters of the group's ranks on a node carry; infinite on one node."""
        if reach.nodes <= 1:
            return math.inf
        return max(reach.per_node, 1.0) * self.network * self.network_share

    def step(self, protocol: Protocol, reach: Reach) -> float:
        """Return the latency of a step within a node."""
        alone = protocol.nvlink if self.nvlink and reach.bridged else protocol.pcie
        return alone * (protocol.beside_network if reach.nodes > 1 else 1.0)


def reach_of(collective: Collective, cluster: Cluster | None, nvlink_gpus: int = 0) -> Reach:
    """Return on how many nodes a group is; where its ranks are not known, they are side by side.

    `nvlink_gpus` is how many GPUs NVLink connects; 0: all of a node.
    """
    size, per_node = collective.group_size, cluster.gpus_per_node if cluster is not None else 8
    bridged = nvlink_gpus if 0 < nvlink_gpus < per_node else 0
    if not collective.ranks:
        return Reach(size, -(-size // per_node), -(-size // bridged) if bridged else 0)
    nodes = len({rank // per_node for rank in collective.members})
    if not bridged:
        return Reach(size, nodes)
    islands = {(rank // per_node, rank % per_node // bridged) for rank in collective.members}
    return Reach(size, nodes, len(islands))


def collective_cost(signature: Signature, links: Links, cluster: Cluster | None) -> OpCost | None:
    """Return what a collective costs; None for operators that exchange nothing."""
    collective = signature.collective
    if collective is None:
        return None
    reach = reach_of(collective, cluster, links.nvlink_gpus)
    seconds = collective_seconds(collective.kind, collective.bytes, reach, links)
    waiting = collective_seconds(collective.kind, 0, reach, links)
    used = link_seconds(collective.kind, collective.bytes, reach, links)
    return OpCost(
        seconds,
        "formula",
        "latency" if waiting > seconds / 2 else "network",
        kernels=1 if seconds else 0,
        kind=COMMUNICATION,
        node_seconds=min(used.node, seconds),
        network_seconds=min(used.network, seconds),
    )


class LinkSeconds(NamedTuple):
    """How long a collective keeps a rank's link to its node and its part of the network busy."""

    node: float
    network: float


def link_seconds(kind: str, size: int, reach: Reach, links: Links) -> LinkSeconds:
    """Return how long each link would be busy if a collective had it alone, at full speed."""
    if reach.ranks <= 1:
        return LinkSeconds(0.0, 0.0)
    others = (reach.ranks - 1) / reach.ranks
    sent = {"all_reduce": 2 * size * others, "all_gather": size * others, "reduce_scatter": size * others}
    if kind in sent:
        return LinkSeconds(sent[kind] / links.within_node(reach), sent[kind] / links.between_nodes(reach))
    seconds = collective_seconds(kind, size, reach, links) - collective_seconds(kind, 0, reach, links)
    return LinkSeconds(0.0, seconds) if reach.nodes > 1 else LinkSeconds(seconds, 0.0)


def collective_seconds(kind: str, size: int, reach: Reach, links: Links) -> float:
    """Return how long a collective takes; `size` is the larger of what a rank puts in and gets out."""
    if reach.ranks <= 1:
        return 0.0
    others = (reach.ranks - 1) / reach.ranks
    match kind:
        case "all_gather" | "reduce_scatter":
            sent = size * others
            return min(
                _ring(1, sent, reach, links), _switched(sent, reach, links), _by_halves(sent, reach, links)
            )
        case "all_reduce" | "barrier":
            return min(
                _ring(2, 2 * size * others, reach, links),
                _tree(2 * size, reach, links),
                _switched(2 * size * others, reach, links),
                _switched_tree(2 * size, reach, links),
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
    if not links.switch_adds or reach.nodes > 1 or not reach.bridged:
        return math.inf
    return _NVLS_SECONDS + sent / (links.inside * _NVLS_SHARE)


def _switched_tree(sent: float, reach: Reach, links: Links) -> float:
    """Add up in each node by its switch, and between the nodes along a tree."""
    if not links.switch_adds or reach.nodes == 1 or reach.per_node <= 1 or not reach.bridged:
        return math.inf
    slowest = min(links.inside * _NVLS_SHARE, links.between_nodes(reach))
    levels = math.floor(math.log2(reach.nodes))
    return _NVLS_SECONDS + 2 * levels * TREE[-1].network + sent / slowest


def _by_halves(sent: float, reach: Reach, links: Links) -> float:
    """Exchange twice as much in each step (PAT), which NCCL does with one rank per node."""
    if reach.nodes < reach.ranks or reach.nodes == 1:
        return math.inf
    steps = math.ceil(math.log2(reach.ranks))
    return _PAT_SECONDS + steps * RING[-1].network + sent / (links.bandwidth(reach) * _PAT_SHARE)


def _exchange(size: int, reach: Reach, links: Links) -> float:
    """Every rank sends a part to every other: those of other nodes get theirs through its own adapter."""
    outside = size * (reach.ranks - reach.per_node) / reach.ranks / (links.network * links.network_share)
    inside = size * (reach.per_node - 1) / reach.ranks / links.within_node(reach)
    return _one_way(0, reach, links) + max(inside, outside)


def _one_way(size: int, reach: Reach, links: Links) -> float:
    """From one rank to another; in a group on several nodes, to another node."""
    protocol = RING[-1]
    if reach.nodes > 1:
        return protocol.base + protocol.network + size / (links.network * links.network_share)
    return protocol.base + links.step(protocol, reach) + size / links.within_node(reach)
