"""Turn what was found out about meshes into what a reader sees of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trainfit.basics.units import format_bytes
from trainfit.report.scale_data import MeshRow, SizeOfCluster
from trainfit.scaling.mesh_judge import Judged
from trainfit.scaling.mesh_search import LeftOut
from trainfit.scaling.why_slower import reason_for

_MOST_OTHERS = 64
_FULLY = 0.999


def mesh_row(
    judged: Judged, seq: int | None, peak_flops: float | None, best: Judged | None, *, confirmed: bool = False
) -> MeshRow:
    """Return the row of a mesh; `best` is the fastest of its size, None for itself."""
    seconds = judged.seconds if judged.fits else None
    samples = None if seconds is None else judged.samples / seconds
    tokens = None if samples is None or not seq else samples * seq
    share = judged.recomputed_share
    flops = judged.model_flops / seconds / peak_flops if seconds and peak_flops else None
    return MeshRow(
        mesh=dict(judged.sizes.mesh),
        words=judged.sizes.words,
        micro_batch=judged.division.micro_batch,
        accumulation=judged.division.accumulation,
        copies=judged.sizes.copies,
        global_batch=judged.samples,
        fits=judged.fits,
        memory_bytes=judged.memory_bytes,
        budget_bytes=judged.budget_bytes,
        recompute="none" if share <= 0 else "full" if share >= _FULLY else "plan",
        step_seconds=seconds,
        tokens_per_second=tokens,
        tokens_per_second_per_gpu=None if tokens is None else tokens / judged.sizes.ranks,
        samples_per_second=samples,
        model_flops_utilisation=flops,
        parts={} if seconds is None else {name: part for name, part in judged.parts.items() if part},
        source="confirmed" if confirmed else "derived",
        reason="" if judged is best else reason_for(judged, best),
    )


def other_rows(
    found: Sequence[Judged],
    left_out: Sequence[LeftOut],
    best: Judged | None,
    seq: int | None,
    peak_flops: float | None,
) -> tuple[MeshRow, ...]:
    """Return the rows of other meshes: each with its fastest micro-batch, then those that do not fit."""
    fastest: dict[str, Judged] = {}
    for one in sorted(found, key=lambda one: (not one.fits, one.seconds_per_sample)):
        fastest.setdefault(one.sizes.words, one)
    others = [one for words, one in fastest.items() if best is None or words != best.sizes.words]
    rows = [mesh_row(one, seq, peak_flops, best) for one in others[:_MOST_OTHERS]]
    return (*rows, *(_left_out(one) for one in left_out[: _MOST_OTHERS - len(rows)]))


def _left_out(one: LeftOut) -> MeshRow:
    missing = one.least_bytes - one.budget_bytes
    return MeshRow(
        mesh=dict(one.sizes.mesh),
        words=one.sizes.words,
        micro_batch=1,
        accumulation=1,
        copies=one.sizes.copies,
        global_batch=one.sizes.copies,
        fits=False,
        memory_bytes=one.least_bytes,
        budget_bytes=one.budget_bytes,
        recompute="full",
        step_seconds=None,
        tokens_per_second=None,
        tokens_per_second_per_gpu=None,
        samples_per_second=None,
        model_flops_utilisation=None,
        parts={},
        source="derived",
        reason="does not fit: parameters, gradients and optimizer state alone are "
        f"{format_bytes(missing)} too much",
    )


def compared_sizes(sizes: Sequence[SizeOfCluster]) -> tuple[SizeOfCluster, ...]:
    """Return the sizes with how well each uses its GPUs, and whether a smaller one is as fast."""
    rates = {one.world_size: _rate(one) for one in sizes}
    most = max((rate / size for size, rate in rates.items()), default=0.0)
    found, fastest = [], 0.0
    for one in sizes:
        rate = rates[one.world_size]
        share = rate / one.world_size / most if rate and most else None
        found.append(replace(one, efficiency=share, on_frontier=rate > fastest))
        fastest = max(fastest, rate)
    return tuple(found)


def _rate(one: SizeOfCluster) -> float:
    """Return samples per second of the best mesh; tokens are as many times that for all sizes."""
    return 0.0 if one.winner is None else one.winner.samples_per_second or 0.0
