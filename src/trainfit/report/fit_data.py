"""What a reader sees of `fit`, as plain data (`data.py` has the rest)."""

from __future__ import annotations

from dataclasses import dataclass

from trainfit.fitting.fit_results import FitResult
from trainfit.plans.ways import Way
from trainfit.report.data import Subject
from trainfit.report.reading import subject_of


@dataclass(frozen=True)
class ChangeRow:
    """One change of a way."""

    kind: str
    value: str
    exactness: str
    code: str


@dataclass(frozen=True)
class WayRow:
    """One way to run the step, with what it promises."""

    name: str
    changes: tuple[ChangeRow, ...]
    regions: int
    """Of its plan; 0 if nothing is recomputed."""
    peak_bytes: int
    smallest_memory_bytes: int
    step_seconds: float
    samples_per_second: float | None
    tokens_per_second: float | None
    results: str
    """What becomes of the results."""
    code: tuple[str, ...]
    speed: float
    """How many times as fast as the step as it is."""


@dataclass(frozen=True)
class FitData:
    """Ways to make a step fit: the fastest first, none of them beaten by another."""

    subject: Subject
    budget_bytes: int
    fits: bool
    """As it is."""
    as_it_is: WayRow
    ways_found: tuple[WayRow, ...]
    impossible: tuple[dict[str, str], ...]
    looked_at: int
    complete: bool


def fit_data(result: FitResult) -> FitData:
    """Return what a reader sees of a search for ways."""
    base = result.as_it_is.step_seconds
    return FitData(
        subject=subject_of(result.trace, result.device, result.seconds, result.warnings),
        budget_bytes=result.budget_bytes,
        fits=result.fits,
        as_it_is=_row(result.as_it_is, base),
        ways_found=tuple(_row(way, base) for way in result.ways),
        impossible=tuple({"change": name, "reason": reason} for name, reason in result.impossible),
        looked_at=result.looked_at,
        complete=result.complete,
    )


def _row(way: Way, base_seconds: float) -> WayRow:
    return WayRow(
        name=way.words,
        changes=tuple(ChangeRow(one.kind, one.value, one.exactness, one.code) for one in way.changes),
        regions=len(way.plan.regions) if way.plan is not None else 0,
        peak_bytes=way.peak_bytes,
        smallest_memory_bytes=way.memory_bytes,
        step_seconds=way.step_seconds,
        samples_per_second=way.samples_per_second,
        tokens_per_second=way.tokens_per_second,
        results=way.exactness,
        code=way.code,
        speed=base_seconds / way.step_seconds if way.step_seconds else 0.0,
    )
