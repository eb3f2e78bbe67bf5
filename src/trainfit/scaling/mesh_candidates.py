"""The meshes that a number of ranks can form, and how a batch is divided among them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

Mesh = tuple[tuple[str, int], ...]
_ORDER = ("pp", "replicate", "fsdp", "cp", "ep", "tp")
EXCHANGING = ("fsdp", "replicate", "cp", "ep", "tp")
"""Dimensions along which every micro-batch, or the step, has collectives."""
_LARGEST_MICRO_BATCH = 64


@dataclass(frozen=True, order=True)
class MeshSizes:
    """The sizes of a mesh by what they divide; 1 where nothing is."""

    pp: int = 1
    replicate: int = 1
    fsdp: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.pp * self.replicate * self.fsdp * self.cp * self.ep * self.tp

    @property
    def copies(self) -> int:
        """How many copies of the model train at once, each on data of its own."""
        return self.replicate * self.fsdp * self.ep

    @property
    def shards(self) -> int:
        """Among how many ranks parameters, gradients and optimizer state are divided by FSDP."""
        return self.fsdp * self.cp * self.ep

    @property
    def mesh(self) -> Mesh:
        """As `--mesh` takes it, without what divides nothing."""
        found = tuple((name, getattr(self, name)) for name in _ORDER if getattr(self, name) > 1)
        return found or (("fsdp", 1),)

    @property
    def words(self) -> str:
        """As `--mesh` is written."""
        return ",".join(f"{name}={size}" for name, size in self.mesh)


@dataclass(frozen=True)
class Division:
    """How a step's batch is divided: what a copy takes at once, and how often before the optimizer's step."""

    micro_batch: int
    accumulation: int = 1

    @property
    def samples(self) -> int:
        """Of one copy of the model, in a step."""
        return self.micro_batch * self.accumulation


def meshes(
    ranks: int,
    dimensions: Sequence[str],
    tensor: Sequence[int],
    context: Sequence[int],
    stages: Sequence[int],
    experts: Sequence[int] = (1,),
) -> Iterator[MeshSizes]:
    """Yield every mesh of so many ranks; the last four are the sizes that the model can be divided by.

    Whole experts are divided where neither layers nor stages are: experts in parts are not exchanged, and
    those of stages are not worked out.
    """
    for tp, cp, pp, ep in itertools.product(tensor, context, stages, experts):
        inner = MeshSizes(pp=pp, cp=cp, ep=ep, tp=tp)
        if ranks % inner.ranks == 0 and (ep == 1 or (tp == 1 and pp == 1)):
            yield from _copies(ranks // inner.ranks, inner, "replicate" in dimensions)


def _copies(left: int, inner: MeshSizes, replicated: bool) -> Iterator[MeshSizes]:
    """Yield the ways in which copies share: FSDP over all of them, copies of groups, copies alone."""
    yield replace(inner, fsdp=left)
    if replicated:
        for fsdp in divisors(left)[:-1]:
            yield replace(inner, replicate=left // fsdp, fsdp=fsdp)


def divisors(number: int) -> list[int]:
    """Return the numbers that divide a number, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def powers_of_two(most: int) -> list[int]:
    """Return 1, 2, 4 and so on, up to the most."""
    return [1 << exponent for exponent in range(most.bit_length()) if 1 << exponent <= most]


def divisions(sizes: MeshSizes, global_batch: int | None) -> list[Division]:
    """Return how a batch can be divided, the smallest micro-batches first; none if it cannot.

    Without a global batch there is no accumulation. Micro-batches are powers of two, or all that a copy has;
    in a pipeline they are single samples, and accumulation is how many pass through it.
    """
    if global_batch is None:
        if sizes.pp > 1:
            return [Division(1, 4 * sizes.pp)]
        return [Division(size) for size in powers_of_two(_LARGEST_MICRO_BATCH)]
    if global_batch % sizes.copies:
        return []
    own = global_batch // sizes.copies
    if sizes.pp > 1:
        return [Division(1, own)] if own >= sizes.pp else []
    found = [size for size in powers_of_two(min(own, _LARGEST_MICRO_BATCH)) if own % size == 0]
    return [Division(size, own // size) for size in found]
