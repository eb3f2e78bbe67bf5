"""Which ranks of a cluster can need more or less than others, without a look at each of them.

Along a dimension that divides tensors, torch gives the first ranks the larger parts: where parts are uneven,
they get smaller from rank to rank, so that the first and the last are the two extremes. Every stage of a
pipeline is different from the others. So, of each stage, the rank that is first in every other dimension and
the one that is last in all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainfit.traces.ranks import Cluster
from trainfit.traces.trace import Trace

MOST_CAPTURES = 64
"""Beyond these, stages of a pipeline are left out, those in the middle first."""
_PIPELINE = "pp"
_POINT_TO_POINT = ("send", "recv")


@dataclass(frozen=True)
class RankPeak:
    """A rank that was captured, and the most bytes that it has alive at once."""

    rank: int
    peak_bytes: int


Mesh = Sequence[tuple[str, int]]


def distinct_ranks(cluster: Cluster, first_trace: Trace) -> tuple[int, ...]:
    """Return the ranks to look at beside rank 0, whose trace is given, in ascending order.

    With a mesh, its dimension `pp` is the pipeline. Without one, the groups that rank 0 communicates in say
    what there is: a pipeline is a group in which it sends or receives.
    """
    found = _of_mesh(cluster.mesh) if cluster.mesh else _of_groups(cluster, first_trace)
    return tuple(rank for rank in _fewer(sorted(found)) if rank)


def _of_mesh(mesh: Mesh) -> set[int]:
    strides, stride = {}, 1
    for name, size in reversed(mesh):
        strides[name] = stride
        stride *= size
    last_elsewhere = sum(strides[name] * (size - 1) for name, size in mesh if name != _PIPELINE)
    stages = next((size for name, size in mesh if name == _PIPELINE), 1)
    step = strides.get(_PIPELINE, 0)
    return {stage * step + elsewhere for stage in range(stages) for elsewhere in (0, last_elsewhere)}


def _of_groups(cluster: Cluster, trace: Trace) -> set[int]:
    collectives = [signature.collective for signature in trace.signatures if signature.collective is not None]
    stages = {rank for one in collectives if one.kind in _POINT_TO_POINT for rank in one.members}
    ends = {max(one.members) for one in collectives if one.ranks and one.kind not in _POINT_TO_POINT}
    return stages | ends | {cluster.world_size - 1}


def _fewer(ranks: Sequence[int]) -> Iterable[int]:
    half = MOST_CAPTURES // 2
    return ranks if len(ranks) <= MOST_CAPTURES else (*ranks[:half], *ranks[-half:])
