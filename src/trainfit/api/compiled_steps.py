"""`estimate` and `plan` of a step that torch.compile compiles: what both begin with, and their results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from trainfit.api.request import Build, Request
from trainfit.basics.doing import doing
from trainfit.basics.units import format_bytes
from trainfit.compiling.compiled_step import CompiledPrediction, CompiledStep
from trainfit.compiling.graph_planner import Backend
from trainfit.compiling.step_graphs import step_graphs
from trainfit.costs.estimates import Estimate, peak_of
from trainfit.costs.summary import summarise
from trainfit.devices.device_table import Device
from trainfit.errors import BudgetTooSmall, OptionError
from trainfit.memory.module_stats import with_seconds
from trainfit.models.recipe import StepOptions
from trainfit.planning.requests import bytes_of_budget
from trainfit.plans.compiled_plan import CompiledPlan
from trainfit.traces.trace import Trace

CompileMode = Literal["default", "reduce-overhead"]
_FUSED_AS_ON_CPU = (
    "kernels are those that inductor makes for a CPU: what it fuses for a GPU differs in places, and its "
    "Triton kernels are taken to reach the usual share of the memory's bandwidth"
)


@dataclass(frozen=True)
class CompiledPlanResult:
    """A plan for torch.compile and what it is compared with. Bytes and seconds are predicted."""

    plan: CompiledPlan
    feasible: bool
    device: Device
    step: CompiledPrediction
    """The step with the plan."""
    baseline: CompiledPrediction
    """The step as torch's own partitioner divides it."""
    margin_bytes: int = 0
    warnings: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)

    def check(self) -> None:
        """Raise `BudgetTooSmall` if the plan does not fit."""
        if not self.feasible:
            raise too_small_for(self.plan)


def too_small_for(plan: CompiledPlan) -> BudgetTooSmall:
    """Return the error for a budget that no plan keeps; `plan` is the smallest that was found."""
    return BudgetTooSmall(
        f"no plan of the compiled step fits {format_bytes(plan.budget_bytes)}; the smallest that was found "
        f"needs {format_bytes(plan.memory_bytes)} (predicted). Give a larger budget or a smaller batch.",
        plan.memory_bytes,
    )


def plan_compiled(
    target: str | Build,
    *,
    budget: int | str | None = None,
    device: str | Device = "cpu",
    options: StepOptions | None = None,
    task: str | None = None,
    backend: Backend = "inductor",
    mode: CompileMode = "default",
) -> CompiledPlan:
    """Return the fastest plan for torch.compile within the budget; `BudgetTooSmall` if there is none.

    `trainfit.apply` hands it to the compiler. `budget`, `device` and the rest are as in `trainfit.plan`;
    `mode` as in torch.compile.
    """
    found = plan_compiled_step(Request(target, device, options, task), budget, backend=backend, mode=mode)
    found.check()
    return found.plan


def compiled_step(
    request: Request, *, backend: Backend = "inductor", mode: CompileMode = "default"
) -> tuple[Trace, CompiledStep]:
    """Capture a step, trace its graphs as torch.compile does, and return what predicts it."""
    _refuse(request, backend, mode)
    trace = request.trace()
    first = next((n for n, op in enumerate(trace.ops) if op.phase == "backward"), len(trace.ops))
    own = [call for call in trace.calls if call.module == trace.model and not call.recompute]
    calls = sum(call.forward_start < first for call in own)
    if not calls:
        raise OptionError(
            "--compile: the step does not call its model, as in model(batch), so that nothing is compiled."
        )
    graphs = step_graphs(request.on_processor().build, backend=backend, model_calls=calls)
    request.watch.lap("compile")
    return trace, CompiledStep(
        trace,
        graphs,
        request.device,
        request.price,
        backend=backend,
        allocator=request.allocator,
        cuda_graphs=mode == "reduce-overhead",
    )


def estimate_compiled_step(
    request: Request, *, backend: Backend = "inductor", mode: CompileMode = "default"
) -> Estimate:
    """Predict what the compiled step needs and takes, as torch divides its graphs."""
    _, step = compiled_step(request, backend=backend, mode=mode)
    found = step.as_torch_divides_it()
    request.watch.lap("simulate")
    timeline, times = found.timeline, found.times
    step_time = summarise(times)
    expandable = found.memory.with_expandable_segments()
    doing("replaying the allocator")
    figures = found.memory.figures
    request.watch.lap("simulate")
    return Estimate(
        target=found.trace.target,
        device=request.device,
        trace=found.trace,
        timeline=timeline,
        memory=figures,
        allocator=request.allocator,
        expandable_bytes=None if expandable is None else expandable.smallest_bytes,
        peak=peak_of(timeline),
        modules=with_seconds(timeline, step_time.module_seconds),
        costs=times.costs,
        time=step_time,
        notes=_notes(request, step),
        seconds=request.watch.seconds,
    )


def plan_compiled_step(
    request: Request,
    budget: int | str | None = None,
    *,
    backend: Backend = "inductor",
    mode: CompileMode = "default",
) -> CompiledPlanResult:
    """Plan a compiled step, and return the plan with what it is compared with."""
    bytes_of_budget(budget, request.device)  # refused before anything is captured
    trace, step = compiled_step(request, backend=backend, mode=mode)
    budget_bytes = bytes_of_budget(budget, request.device)
    found = step.planned(budget_bytes, trace.target)
    request.watch.lap("solve")
    return CompiledPlanResult(
        plan=found.plan,
        feasible=found.feasible,
        device=request.device,
        step=found.step,
        baseline=found.baseline,
        margin_bytes=request.device.margin_bytes if budget is None else 0,
        warnings=trace.warnings + found.step.times.costs.warnings + _notes(request, step),
        seconds=request.watch.seconds,
    )


def _notes(request: Request, step: CompiledStep) -> tuple[str, ...]:
    return step.warnings + ((_FUSED_AS_ON_CPU,) if request.device.kind == "cuda" else ())


def _refuse(request: Request, backend: str, mode: str) -> None:
    if backend not in get_args(Backend):
        raise OptionError(
            f"--compile-backend must be one of {', '.join(get_args(Backend))}, got {backend!r}."
        )
    if mode not in get_args(CompileMode):
        raise OptionError(f"--compile-mode must be one of {', '.join(get_args(CompileMode))}, got {mode!r}.")
    if isinstance(request.target, Trace):
        raise OptionError("--compile traces the step again: name a target, a trace has no graphs.")
    if request.cluster is not None:
        raise OptionError("--compile is about a step of one process; leave --world-size and --mesh out.")
    if request.costs != "roofline":
        raise OptionError("--compile prices kernels by formulas; leave --costs measured out.")
