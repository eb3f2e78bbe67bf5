"""`verify` of a compiled step: with and without a plan, and beside torch's own budget."""

from __future__ import annotations

from dataclasses import replace

from torch._functorch import config as functorch_config

from trainfit.api.compiled_steps import CompileMode, compiled_step, too_small_for
from trainfit.api.request import Request
from trainfit.compiling.compiled_step import CompiledPrediction, CompiledStep
from trainfit.compiling.graph_planner import Backend
from trainfit.errors import OptionError
from trainfit.planning.requests import bytes_of_budget
from trainfit.plans.compiled_plan import CompiledPlan
from trainfit.timing.load import LoadMeter
from trainfit.traces.settings import differences
from trainfit.verifying.compiled_verification import CompiledRuns, CompiledVerification
from trainfit.verifying.measuring import TIMED_RUNS
from trainfit.verifying.verification import guard_memory

_FRACTIONS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Of torch's `activation_memory_budget`, of which the nearest is run."""


def verify_compiled_step(
    request: Request,
    *,
    plan: CompiledPlan | None = None,
    budget: int | str | None = None,
    backend: Backend = "inductor",
    mode: CompileMode = "default",
    force: bool = False,
    runs: int | None = None,
    meter: LoadMeter | None = None,
) -> CompiledVerification:
    """Predict, then run the compiled step for real; with a plan or a budget also without it."""
    if plan is not None and budget is not None:
        raise OptionError("--plan has its budget: leave --budget out.")
    if budget is not None:
        bytes_of_budget(budget, request.device)  # refused before anything is captured
    backend = backend if plan is None else _known(plan.backend)
    trace, step = compiled_step(request, backend=backend, mode=mode)
    if budget is not None:
        plan = _planned(step, bytes_of_budget(budget, request.device), trace.target)
    unplanned = step.as_torch_divides_it()
    request.watch.lap("solve")
    if not force:
        guard_memory(request.device, {"the compiled step": unplanned.memory_bytes})
    real = CompiledRuns(request.build, request.device.kind, backend, runs or TIMED_RUNS, meter)
    measured = real.measured(plan)
    notes = trace.warnings + step.warnings + measured.notes
    if plan is not None and differences(plan.settings, trace.settings):
        notes += ("the plan was made for another step: its promise is about that one",)
    found = CompiledVerification(
        target=trace.target,
        device=request.device,
        trace=unplanned.trace,
        backend=backend,
        predicted_peak_bytes=unplanned.timeline.peak_bytes if plan is None else plan.peak_bytes,
        predicted_seconds=unplanned.times.step_seconds if plan is None else plan.step_seconds,
        measured=measured,
        plan=plan,
        warnings=notes,
    )
    if plan is not None:
        fraction = _nearest(step, plan.peak_bytes)
        found = replace(
            found,
            baseline=real.measured(),
            fraction=fraction,
            with_fraction=real.measured(fraction=fraction),
            results=real.results(plan),
        )
    request.watch.lap("measure")
    return replace(found, seconds=request.watch.seconds)


def _planned(step: CompiledStep, budget_bytes: int, target: str) -> CompiledPlan:
    """Return a plan within a budget; `BudgetTooSmall` if there is none."""
    found = step.planned(budget_bytes, target)
    if not found.feasible:
        raise too_small_for(found.plan)
    return found.plan


def _nearest(step: CompiledStep, peak_bytes: int) -> float:
    """Return the fraction with which torch's own partitioner comes nearest to a peak, as predicted."""

    def with_fraction(fraction: float) -> CompiledPrediction:
        with functorch_config.patch(activation_memory_budget=fraction):
            return step.as_torch_divides_it()

    return min(_FRACTIONS, key=lambda f: abs(with_fraction(f).timeline.peak_bytes - peak_bytes))


def _known(backend: str) -> Backend:
    if backend not in ("inductor", "aot_eager"):
        raise OptionError(f"the plan was made for {backend!r}, which is no backend that is planned for.")
    return "inductor" if backend == "inductor" else "aot_eager"
