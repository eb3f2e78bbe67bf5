"""One rank of a cluster, or the worst of those that can differ."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trainfit.basics.doing import as_part_of
from trainfit.devices.distinct_ranks import MOST_CAPTURES, RankPeak, distinct_ranks
from trainfit.errors import OptionError
from trainfit.traces.ranks import Cluster
from trainfit.traces.simulate import simulate
from trainfit.traces.trace import Trace


def check_cluster(target: Any, cluster: Cluster | None, worst_rank: bool) -> None:
    """Refuse a cluster that makes no sense, before anything is captured."""
    if cluster is None:
        if worst_rank:
            raise OptionError("the worst rank is one of a cluster; pass cluster=trainfit.Cluster(...).")
        return
    if not isinstance(cluster, Cluster):
        raise OptionError(
            "cluster is a trainfit.Cluster, as in cluster=trainfit.Cluster(world_size=64), "
            f"got {type(cluster).__name__}."
        )
    cluster.check()
    if isinstance(target, Trace):
        raise OptionError(
            "a trace is of one rank already: its cluster was said when it was captured, and stays."
        )


def worst_of(cluster: Cluster, captured: Callable[[Cluster], Trace]) -> tuple[Trace, tuple[RankPeak, ...]]:
    """Capture every rank that can differ; return the one with the largest peak, and all peaks.

    Without a mesh, what a rank communicates in may show ranks that no other has shown.
    """
    traces = {0: captured(replace(cluster, rank=0))}
    while len(traces) < MOST_CAPTURES:
        ranks = {0, *distinct_ranks(cluster, *traces.values())}
        rank = min(ranks - {*traces}, default=None)
        if rank is None:
            break
        with as_part_of(f"rank {rank} ({len(traces) + 1} of {len(ranks | {*traces})})"):
            traces[rank] = captured(replace(cluster, rank=rank))
    peaks = {rank: simulate(trace).peak_bytes for rank, trace in traces.items()}
    worst = max(peaks, key=lambda rank: peaks[rank])
    return traces[worst], tuple(RankPeak(rank, peak) for rank, peak in peaks.items())


def refuse_other_world(cluster: Cluster | None) -> None:
    """Refuse to run a step for real on another number of processes than there are."""
    there = int(os.environ.get("WORLD_SIZE") or 1)
    if cluster is None or cluster.world_size == there:
        return
    mesh = ",".join(f"{name}={size}" for name, size in cluster.mesh)
    said = f"--mesh {mesh}" if mesh else f"a world size of {cluster.world_size}"
    started = f"torchrun has started {there}" if there > 1 else "this is one process"
    raise OptionError(
        f"{said} takes {cluster.world_size} real processes to verify, and {started}: write torchrun "
        f"--nproc-per-node {cluster.world_size} -m trainfit verify."
    )
