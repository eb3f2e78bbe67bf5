"""A cluster as people write it: `dp=8,tp=4` for a mesh, `50GB/s` for a network, `worst` for a rank."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Literal

from trainfit.basics.units import parse_size
from trainfit.errors import OptionError
from trainfit.traces.ranks import MOST_RANKS, Cluster

Worst = Literal["worst"]
WORST: Worst = "worst"
_MESH = "write it like dp=8,tp=4: names and sizes, the last of them within a node"
_NETWORK = (
    "write it like 50GB/s (bytes) or 400Gbit/s (bits): what one GPU gets of the network between nodes, in "
    "one direction"
)
_SPEED = re.compile(r"(?P<number>[0-9]{1,15}(?:\.[0-9]{1,15})?)\s*(?P<prefix>[kKMGTP]i?|)(?P<unit>B|bit)/s")
_LONGEST = 200


def parse_mesh(text: str) -> tuple[tuple[str, int], ...]:
    """Read the dimensions of a mesh, outermost first."""
    shown = f"--mesh {text[:_LONGEST]!r}"
    dimensions = []
    for part in text.split(","):
        name, equals, size = (piece.strip() for piece in part.partition("="))
        if not equals or not name.isidentifier():
            raise OptionError(f"{shown}: {part.strip()[:_LONGEST]!r} is not a dimension; {_MESH}.")
        if not re.fullmatch(r"[0-9]{1,9}", size) or not 1 <= int(size) <= MOST_RANKS:
            raise OptionError(
                f"{shown}: the size of {name} must be a whole number from 1 to {MOST_RANKS:,}, "
                f"got {size[:_LONGEST]!r}; {_MESH}."
            )
        dimensions.append((name, int(size)))
    return tuple(dimensions)


def parse_network(text: str) -> float:
    """Read bytes per second: `50GB/s`, or bits as those who sell networks count them, `400Gbit/s`.

    A small `b` is refused: whether it is a bit or a byte is a factor of eight.
    """
    found = _SPEED.fullmatch(text.strip())
    if found is None:
        raise OptionError(f"--network {text[:_LONGEST]!r} is not a speed: {_NETWORK}.")
    one = parse_size(f"1{found['prefix']}B")
    speed = float(found["number"]) * one / (1 if found["unit"] == "B" else 8)
    if speed < 1:
        raise OptionError(f"--network {text[:_LONGEST]!r} is less than a byte per second: {_NETWORK}.")
    return speed


def parse_rank(text: str) -> int | Worst:
    """Read a rank, or `worst`."""
    stripped = text.strip()
    if stripped.lower() == WORST:
        return WORST
    if not re.fullmatch(r"[0-9]{1,9}", stripped):
        raise OptionError(f"--rank {text[:_LONGEST]!r} is neither a rank (0, 1, 2, ...) nor worst.")
    return int(stripped)


def read_cluster(
    world_size: int | None,
    rank: str | None,
    gpus_per_node: int | None,
    mesh: str | None,
    network: str | None,
) -> tuple[Cluster | None, bool]:
    """Return the cluster that flags describe, and whether its worst rank is asked for; None without any.

    A mesh says the world size. Nothing else does: a rank, a node or a network of one process means nothing.
    """
    dimensions = parse_mesh(mesh) if mesh is not None else ()
    if world_size is None and not dimensions:
        given = {"--rank": rank, "--gpus-per-node": gpus_per_node, "--network": network}
        flag = next((flag for flag, value in given.items() if value is not None), None)
        if flag is not None:
            raise OptionError(
                f"{flag} is about one of several processes: say how many there are by --world-size 64, or "
                "how they share the work by --mesh dp=16,tp=4."
            )
        return None, False
    ranks = math.prod(size for _, size in dimensions) if world_size is None else world_size
    chosen = parse_rank(rank) if rank is not None else 0
    cluster = Cluster(
        world_size=ranks,
        rank=0 if chosen == WORST else chosen,
        mesh=dimensions,
        network_bytes_per_second=parse_network(network) if network is not None else None,
    )
    if gpus_per_node is not None:
        cluster = replace(cluster, gpus_per_node=gpus_per_node)
    cluster.check()
    return cluster, chosen == WORST
