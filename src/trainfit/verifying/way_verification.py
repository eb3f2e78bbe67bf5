"""A way that `fit` has found, carried out for real: all of its changes are made, measured and compared."""

from __future__ import annotations

import functools
from collections.abc import Callable

from trainfit.applying import attach_plan
from trainfit.applying.way_changes import make_changes
from trainfit.basics.doing import as_part_of, doing
from trainfit.comparing import Match
from trainfit.plans.ways import BIT_EQUAL, SAME_ARITHMETIC, Way
from trainfit.steps.step import Step
from trainfit.timing.load import LoadMeter
from trainfit.traces.trace import Trace
from trainfit.verifying.measuring import Measurement, measure_step
from trainfit.verifying.plan_comparison import CHANGED_RUNS, SameResults, compare_builds
from trainfit.verifying.verification import Comparison, errors_of_real_runs

_ROUNDING, _SHORT_ROUNDING = 1e-3, 5e-2
"""How far apart results that are the same in exact arithmetic may be, as a share of the largest: of numbers
in 32 bits, and in 16."""
_OTHER_NUMBERS = "the way changes the numbers themselves, and promises nothing about results"
_OTHER_DATA = "the way takes smaller batches, and those that the target makes are not parts of the larger one"


def carry_out(step: Step, way: Way) -> Step:
    """Make what `trainfit.apply` makes of a way, the plan too, and return the step."""
    make_changes(step.model, way, step.optimizers)
    if way.plan is not None:
        attach_plan(step.model, way.plan)
    return step


def run_way_for_real(
    build: Callable[[], Step],
    changed: Callable[[], Step],
    way: Way,
    kind: str,
    traces: tuple[Trace, Trace],
    *,
    timed: int,
    eager: bool,
    meter: LoadMeter | None,
) -> tuple[Measurement, Comparison]:
    """Measure the changed step and the unchanged one, of which the traces are, and compare their results."""
    measure = functools.partial(measure_step, kind=kind, timed=timed, eager=eager, meter=meter)
    unchanged_trace, changed_trace = traces
    with errors_of_real_runs():
        with as_part_of("the real step with the way"):
            measured = measure(changed, steps=changed_trace.steps)
        with as_part_of("the real step without the way"):
            baseline = measure(build, steps=unchanged_trace.steps)
        doing("comparing the results of both")
        results, tolerance = _compared(build, changed, way, unchanged_trace)
    return measured, Comparison(None, baseline, results, way, tolerance)


def _compared(
    build: Callable[[], Step], changed: Callable[[], Step], way: Way, trace: Trace
) -> tuple[SameResults, float | None]:
    """Return how results compare, and how far apart they may be by what the way promises."""
    if way.exactness not in (BIT_EQUAL, SAME_ARITHMETIC):
        return _not_compared(_OTHER_NUMBERS), None
    if any(change.kind == "batch" for change in way.changes):
        return _not_compared(_OTHER_DATA), None
    # What is on the host is fetched from the second step on; but where sums are taken in another order, the
    # first update may already take another direction where a gradient is nearly zero.
    steps = 2 if way.exactness == BIT_EQUAL else 1
    results = compare_builds(build, changed, steps, names=CHANGED_RUNS, what="the way")
    if way.exactness == BIT_EQUAL:
        return results, 0.0
    return results, _ROUNDING if trace.settings.dtype == "fp32" else _SHORT_ROUNDING


def _not_compared(why: str) -> SameResults:
    nothing = Match(0, (), ())
    return SameResults(Match(0, (), (why,)), nothing, nothing, 1.0, 0)
