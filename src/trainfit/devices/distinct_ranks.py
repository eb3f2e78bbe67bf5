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


def distinct_ranks(cluster: Cluster, *traces: Trace) -> tuple[int, ...]:
    """Return the ranks to look at beside rank 0, in ascending order; `traces` are of some, rank 0 first.

    With a mesh, its dimension `pp` is the pipeline. Without one, the groups that these ranks communicate in
    say what there is: a pipeline is a group in which they send or receive, and every other group a dimension.
    """
    found = _of_mesh(cluster.mesh) if cluster.mesh else _of_groups(cluster, traces)
    return tuple(rank for rank in _fewer(sorted(found)) if rank)


def pipeline_ranks(trace: Trace) -> tuple[int, ...]:
    """Return the ranks of the pipeline that a captured rank sends or receives in; empty if it does not."""
    found = {
        rank
        for signature in trace.signatures
        if (one := signature.collective) is not None and one.kind in _POINT_TO_POINT
        for rank in one.members
    }
    return tuple(sorted(found))


def _of_mesh(mesh: Mesh) -> set[int]:
    strides, stride = {}, 1
    for name, size in reversed(mesh):
        strides[name] = stride
        stride *= size
    last_elsewhere = sum(strides[name] * (size - 1) for name, size in mesh if name != _PIPELINE)
    stages = next((size for name, size in mesh if name == _PIPELINE), 1)
    step = strides.get(_PIPELINE, 0)
    return {stage * step + elsewhere for stage in range(stages) for elsewhere in (0, last_elsewhere)}


def _of_groups(cluster: Cluster, traces: Sequence[Trace]) -> set[int]:
    """Return the last rank of each group of rank 0, and of each stage the first rank and the last."""
    stages, ends = {0}, {cluster.world_size - 1}
    for trace in traces:
        collectives = [one for signature in trace.signatures if (one := signature.collective) and one.ranks]
        stages |= {rank for one in collectives if one.kind in _POINT_TO_POINT for rank in one.members}
        ends |= {one.ranks[-1][1] for one in collectives if one.kind not in _POINT_TO_POINT}
    elsewhere = _last_elsewhere(traces[0]) if traces else 0
    lasts = {stage + elsewhere for stage in stages}
    return stages | ends | {rank for rank in lasts if rank < cluster.world_size}


def _last_elsewhere(first_trace: Trace) -> int:
    """Return how far the rank that is last in all groups but a pipeline's is from the one that is first.

    Groups of rank 0 with equal steps lie within each other, as a world does around all: the smallest is a
    dimension.
    """
    dimensions: dict[int, int] = {}
    for signature in first_trace.signatures:
        one = signature.collective
        if one is not None and len(one.ranks) == 1 and one.kind not in _POINT_TO_POINT:
            _, last, step = one.ranks[0]
            dimensions[step] = min(last, dimensions.get(step, last))
    return sum(dimensions.values())


def _fewer(ranks: Sequence[int]) -> Iterable[int]:
    half = MOST_CAPTURES // 2
    return ranks if len(ranks) <= MOST_CAPTURES else (*ranks[:half], *ranks[-half:])
