"""Which rank of how many processes a step belongs to (`Cluster`), and what they exchange (`Collective`)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from trainfit.errors import OptionError

MOST_RANKS = 1 << 20
COPIES = frozenset({"dp", "fsdp", "replicate", "ddp", "data", "dp_replicate", "dp_shard", "ep"})
"""Dimensions of a mesh along which each rank, or group of ranks, has data of its own."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Which rank of how many processes a step is captured for, and how they are connected."""

    world_size: int = 1
    rank: int = 0
    gpus_per_node: int = 8
    """Ranks per node; the last node has fewer if they do not divide the world."""
    mesh: tuple[tuple[str, int], ...] = ()
    """Names and sizes of the dimensions, outermost first: `(("dp", 8), ("tp", 4))`."""
    network_bytes_per_second: float | None = None
    """What one GPU gets of the network between nodes; None: what the device says."""
    own_mesh: tuple[tuple[str, int], ...] = ()
    """Of a captured step without `mesh`: the first mesh of all ranks that its own code made."""

    @property
    def node(self) -> int:
        """The node that the rank is on."""
        return self.rank // self.gpus_per_node

    @property
    def local_rank(self) -> int:
        """The rank's number on its node, as `LOCAL_RANK` says."""
        return self.rank % self.gpus_per_node

    @property
    def local_world_size(self) -> int:
        """How many ranks the rank's node has, as `LOCAL_WORLD_SIZE` says."""
        return min(self.gpus_per_node, self.world_size - self.node * self.gpus_per_node)

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return -(-self.world_size // self.gpus_per_node)

    @property
    def copies(self) -> int:
        """How many copies of the model train at once, each on data of its own; without a mesh every rank."""
        mesh = self.mesh or self.own_mesh
        return math.prod(size for name, size in mesh if name in COPIES) if mesh else self.world_size

    @property
    def words(self) -> str:
        """The rank and the mesh as people say them: `rank 3 of 8 (dp=4, tp=2)`."""
        mesh = ", ".join(f"{name}={size}" for name, size in self.mesh or self.own_mesh)
        return f"rank {self.rank} of {self.world_size}" + (f" ({mesh})" if mesh else "")

    def check(self) -> None:
        """Raise one `OptionError` that says what makes no sense."""
        for name, number in (
            ("world size", self.world_size),
            ("number of GPUs per node", self.gpus_per_node),
        ):
            if type(number) is not int or not 1 <= number <= MOST_RANKS:
                raise OptionError(
                    f"the {name} must be a whole number from 1 to {MOST_RANKS:,}, got {number!r}."
                )
        if type(self.rank) is not int or not 0 <= self.rank < self.world_size:
            raise OptionError(
                f"there is no rank {self.rank!r} in a world of {self.world_size}: ranks go from 0 to "
                f"{self.world_size - 1}."
            )
        speed = self.network_bytes_per_second
        if speed is not None and not (speed > 0 and math.isfinite(speed)):
            raise OptionError(f"the speed of the network must be above zero, got {speed!r} bytes per second.")
        self._check_mesh()

    def _check_mesh(self) -> None:
        text = ",".join(f"{name}={size}" for name, size in self.mesh)
        for name, size in self.mesh:
            if not name or type(size) is not int or size < 1:
                raise OptionError(
                    f"a dimension of a mesh has a name and a size from 1 on, as in dp=8; the mesh is {text}."
                )
        names = [name for name, _ in self.mesh]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise OptionError(f"the mesh {text} has the dimension {twice} twice.")
        ranks = math.prod(size for _, size in self.mesh)
        if self.mesh and ranks != self.world_size:
            raise OptionError(
                f"the mesh {text} has {ranks} ranks, but the world size is {self.world_size}: the sizes of "
                "its dimensions, multiplied, must be the world size."
            )


@dataclass(frozen=True, slots=True)
class Collective:
    """What an operator exchanges with other processes."""

    kind: str
    """`all_gather`, `reduce_scatter`, `all_reduce`, ...; `permute`: each sends all it has to one other."""
    group_size: int
    group: str
    """The communication group; each has a queue of its own."""
    bytes: int
    """The larger of what a process puts in and what it gets out."""
    ranks: tuple[tuple[int, int, int], ...] = ()
    """The ranks of the group, in ascending order, as ranges (first, last, step); empty if nobody knows."""

    @property
    def members(self) -> Iterator[int]:
        """The ranks of the group, one by one."""
        return (rank for first, last, step in self.ranks for rank in range(first, last + 1, step))
