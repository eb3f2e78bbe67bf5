"""`verify` of a compiled step: with and without a plan, and beside torch's own budget."""

from __future__ import annotations

from torch._functorch import config as functorch_config

from trainfit.api.compiled_steps import CompileMode, compiled_step
from trainfit.api.request import Request
from trainfit.compiling.compiled_step import CompiledPrediction, CompiledStep
from trainfit.compiling.graph_planner import Backend
from trainfit.errors import BudgetTooSmall, OptionError
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
        bytes_of_budget(budget, request.device)
    backend = backend if plan is None else _known(plan.backend)
    trace, step = compiled_step(request, backend=backend, mode=mode)
    notes = trace.warnings
    if plan is not None and differences(plan.settings, trace.settings):
        notes += ("the plan was made for another step: its promise is about that one",)
    if budget is not None:
        found = step.planned(bytes_of_budget(budget, request.device), trace.target)
        if not found.feasible:
            raise BudgetTooSmall(
                f"no plan of the compiled step fits; the smallest that was found needs "
                f"{found.plan.memory_bytes:,} bytes (predicted).",
                found.plan.memory_bytes,
            )
        plan = found.plan
    unplanned = step.as_torch_divides_it()
    request.watch.lap("solve")
    if not force:
        guard_memory(request.device, {"the compiled step": unplanned.memory_bytes})
    real = CompiledRuns(request.build, request.device.kind, backend, runs or TIMED_RUNS, meter)
    measured = real.measured(plan)
    common = {
        "target": trace.target,
        "device": request.device,
        "trace": unplanned.trace,
        "backend": backend,
        "measured": measured,
        "warnings": notes + step.warnings + measured.notes,
    }
    if plan is None:
        request.watch.lap("measure")
        return CompiledVerification(
            predicted_peak_bytes=unplanned.timeline.peak_bytes,
            predicted_seconds=unplanned.times.step_seconds,
            seconds=request.watch.seconds,
            **common,  # type: ignore[arg-type]
        )
    fraction = _nearest(step, plan.peak_bytes)
    found_results = CompiledVerification(
        predicted_peak_bytes=plan.peak_bytes,
        predicted_seconds=plan.step_seconds,
        plan=plan,
        baseline=real.measured(),
        fraction=fraction,
        with_fraction=real.measured(fraction=fraction),
        results=real.results(plan),
        seconds=request.watch.seconds,
        **common,  # type: ignore[arg-type]
    )
    request.watch.lap("measure")
    return found_results


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
