"""What a reader sees of the largest size, and of several steps side by side, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainfit.costs.estimates import Estimate
from trainfit.planning.plan_results import PlanResult
from trainfit.report.data import EstimateData, PlanData, Subject
from trainfit.report.reading import estimate_data, plan_data, subject_of
from trainfit.sizing.size_results import Limit, MaxSize, SizeName, SizeRow


@dataclass(frozen=True)
class SizeData:
    """The largest size: what it needs, why no larger one, and throughput over sizes."""

    subject: Subject
    size_name: SizeName
    size: int
    multiple_of: int
    with_plan: bool
    budget_bytes: int
    margin_bytes: int
    """What the budget leaves free of the device's memory; 0 if the budget was named."""
    limit: Limit
    limit_text: str
    peak_bytes: int
    smallest_memory_bytes: int
    step_seconds: float | None
    samples_per_second: float | None
    tokens_per_second: float | None
    plan_adds: float | None
    """What the plan adds to the step's time, as a share of the step as it is."""
    next: SizeRow | None
    """The next size."""
    best_size: int | None
    """The one of these with the most tokens or samples per second."""
    captured_sizes: tuple[int, ...]
    sizes: tuple[SizeRow, ...]


def size_data(found: MaxSize) -> SizeData:
    """Return what a reader sees of the largest size."""
    answer, best = found.answer, found.best
    return SizeData(
        subject=subject_of(found.result.trace, found.device, found.seconds, found.warnings),
        size_name=found.name,
        size=found.size,
        multiple_of=found.multiple_of,
        with_plan=found.with_plan,
        budget_bytes=found.budget_bytes,
        margin_bytes=found.margin_bytes,
        limit=found.limit,
        limit_text=found.limit_text,
        peak_bytes=answer.peak_bytes,
        smallest_memory_bytes=answer.smallest_memory_bytes,
        step_seconds=answer.step_seconds,
        samples_per_second=answer.samples_per_second,
        tokens_per_second=answer.tokens_per_second,
        plan_adds=answer.plan_adds,
        next=found.next,
        best_size=None if best is None else best.size,
        captured_sizes=found.captures,
        sizes=found.rows,
    )


@dataclass(frozen=True)
class AskedRow:
    """One step of several, as a row."""

    target: str
    device: str
    batch: int | None
    seq: int | None
    fits: bool
    peak_bytes: int
    smallest_memory_bytes: int
    budget_bytes: int
    """What it has to run in, to fit."""
    step_seconds: float | None
    samples_per_second: float | None
    tokens_per_second: float | None
    plan_adds: float | None


@dataclass(frozen=True)
class SeveralSteps:
    """Several steps, and what a reader sees of each."""

    rows: tuple[AskedRow, ...]
    results: tuple[EstimateData | PlanData, ...]
    planned: bool
    warnings: tuple[str, ...]


def several_steps(results: Sequence[Estimate | PlanResult]) -> SeveralSteps:
    """Return what a reader sees of several results."""
    data = tuple(estimate_data(one) if isinstance(one, Estimate) else plan_data(one) for one in results)
    rows = tuple(_row(one, seen) for one, seen in zip(results, data))
    warnings = dict.fromkeys(warning for one in results for warning in one.warnings)
    return SeveralSteps(rows, data, any(isinstance(one, PlanResult) for one in results), tuple(warnings))


def _row(result: Estimate | PlanResult, seen: EstimateData | PlanData) -> AskedRow:
    settings, trace = result.trace.settings, result.trace
    if isinstance(result, Estimate):
        seconds = None if result.time is None else result.time.step_seconds
        fits, budget, adds = result.fits, result.device.default_budget_bytes, None
    else:
        assert isinstance(seen, PlanData)
        seconds, fits = result.plan.step_seconds, result.feasible
        budget, adds = result.plan.budget_bytes, seen.added
    # A function of the user's own may not say how many samples its step has.
    counts: tuple[Any, ...] = (trace.samples or settings.batch, trace.tokens)
    rates = [count / seconds if count and seconds else None for count in counts]
    return AskedRow(
        target=trace.target,
        device=result.device.name,
        batch=settings.batch,
        seq=settings.seq,
        fits=fits,
        peak_bytes=seen.peak_bytes,
        smallest_memory_bytes=seen.smallest_memory_bytes,
        budget_bytes=budget,
        step_seconds=seconds,
        samples_per_second=rates[0],
        tokens_per_second=rates[1],
        plan_adds=adds,
    )
