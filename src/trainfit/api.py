"""The Python API: `capture`, `price`, `estimate`, `verify`, with typed results; the command line calls it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from trainfit import capturing
from trainfit.architectures import same_kernels
from trainfit.costs.pricing import CostSource, Measuring, check_source, price_trace
from trainfit.costs.schedule import schedule
from trainfit.costs.summary import summarise
from trainfit.costs.table import CostTable
from trainfit.devices import Device, find_device
from trainfit.errors import BudgetTooSmall, OptionError, PlanError, StepError
from trainfit.estimates import Estimate, peak_of
from trainfit.measuring import TIMED_RUNS
from trainfit.models.recipe import StepOptions
from trainfit.module_stats import module_stats
from trainfit.plan_store import load_plan
from trainfit.planning.baselines import baselines
from trainfit.planning.certify import host_warnings
from trainfit.planning.infeasible import too_small
from trainfit.planning.module_planner import ModulePlanner
from trainfit.planning.requests import Solver, bytes_of_budget, check_solver
from trainfit.planning.results import Frontier, FrontierPoint, PlanResult
from trainfit.planning.solve import Infeasible, Planner
from trainfit.plans import Plan
from trainfit.simulate import simulate
from trainfit.step import Step
from trainfit.targets import Target, load
from trainfit.trace import Trace
from trainfit.verification import Verification, verify_step

Build = Callable[..., Step]
Progress = Callable[[str], None]
"""Called with the name of each stage as it begins."""


def capture(
    target: str | Build,
    *,
    device: str | Device = "cpu",
    options: StepOptions | None = None,
    task: str | None = None,
    steps: int | None = None,
    progress: Progress | None = None,
) -> Trace:
    """Capture one steady step of `target` for a device.

    `target` is a name as on the command line, or the function that builds the `Step`. It and the step's `run`
    are executed a few times on tensors without memory. What they do besides computing (files, sockets,
    logging) happens, except that no tensors are written to disk and no older files are removed.

    `steps` is how many runs of the step are looked at once it is steady; the one with the largest peak is
    recorded. Without it there are as many as it takes: one, or more where something in Python changes from
    run to run.
    """
    _check_steps(steps)
    found = device if isinstance(device, Device) else find_device(device)
    resolved = _resolve(target, found, options, task)
    return capturing.capture(
        resolved.build,
        device=found,
        target=resolved.name,
        settings=resolved.settings,
        steps=steps,
        progress=progress,
    )


_MOST_STEPS = 10_000


def _check_steps(steps: int | None) -> None:
    if steps is not None and (type(steps) is not int or not 1 <= steps <= _MOST_STEPS):
        raise OptionError(f"--steps must be a whole number from 1 to {_MOST_STEPS:,}, got {steps!r}.")


def price(
    trace: Trace,
    device: str | Device = "cpu",
    *,
    costs: CostSource = "roofline",
    refresh: bool = False,
    progress: Measuring | None = None,
) -> CostTable:
    """Return what every distinct operator of a trace costs on a device.

    `roofline` prices by formulas, on any device. `measured` runs each operator on this machine, which has to
    be the device, and remembers the result on disk; `refresh` measures again.
    """
    found = device if isinstance(device, Device) else find_device(device)
    _refuse_other_kind(trace, found)
    return price_trace(trace, found, costs=costs, refresh=refresh, progress=progress)


def estimate(
    target: str | Build | Trace,
    *,
    device: str | Device = "cpu",
    options: StepOptions | None = None,
    task: str | None = None,
    steps: int | None = None,
    costs: CostSource = "roofline",
    refresh: bool = False,
    progress: Progress | None = None,
    measuring: Measuring | None = None,
) -> Estimate:
    """Predict the peak memory of a step on a device and its time, what they consist of and where they go."""
    begin = time.perf_counter()
    found = device if isinstance(device, Device) else find_device(device)
    check_source(costs, found)
    if isinstance(target, Trace):
        trace = target
    else:
        trace = capture(target, device=found, options=options, task=task, steps=steps, progress=progress)
    _refuse_other_kind(trace, found)
    captured = time.perf_counter()
    timeline = simulate(trace)
    stats = module_stats(timeline)
    simulated = time.perf_counter()
    table = None
    step_time = None
    if found.has_speed or costs == "measured":
        table = price_trace(trace, found, costs=costs, refresh=refresh, progress=measuring)
        step_time = summarise(schedule(trace, table))
        stats = tuple(
            replace(module, forward_seconds=forward, backward_seconds=backward)
            for module, (forward, backward) in zip(stats, step_time.module_seconds)
        )
    end = time.perf_counter()
    return Estimate(
        target=trace.target,
        device=found,
        trace=trace,
        timeline=timeline,
        peak=peak_of(timeline),
        modules=stats,
        costs=table,
        time=step_time,
        seconds={
            "capture": captured - begin,
            "simulate": simulated - captured,
            "price": end - simulated,
            "total": end - begin,
        },
    )


def plan(
    target: str | Build | Trace,
    *,
    budget: int | str | None = None,
    device: str | Device = "cpu",
    options: StepOptions | None = None,
    task: str | None = None,
    steps: int | None = None,
    costs: CostSource = "roofline",
    seconds_limit: float = 30.0,
    solver: Solver = "regions",
    ac_units: Sequence[str] | None = None,
    fsdp_units: Sequence[str] = (),
    world_size: int = 1,
) -> Plan:
    """Return the fastest plan whose peak is within the budget; `BudgetTooSmall` if there is none.

    `budget` is bytes or text such as `24GiB` or `80%` (of the device), and taken literally. Without it, it is
    what the device has for tensors less its margin (`Device.margin_bytes`).

    The solver `modules` is PyTorch's formulation: it takes the names of modules that may be checkpointed
    (`ac_units`), of those that FSDP shards (`fsdp_units`: no AC unit lies around one), and a `world_size`
    that divides parameters, gradients and optimizer state. In names `*` is any one part, as in `blocks.*`.
    """
    result = plan_step(
        target,
        budget=budget,
        device=device,
        options=options,
        task=task,
        steps=steps,
        costs=costs,
        seconds_limit=seconds_limit,
        solver=solver,
        ac_units=ac_units,
        fsdp_units=fsdp_units,
        world_size=world_size,
    )
    if not result.feasible:
        raise BudgetTooSmall(too_small(result), result.plan.peak_bytes)
    return result.plan


def plan_step(
    target: str | Build | Trace,
    *,
    budget: int | str | None = None,
    device: str | Device = "cpu",
    options: StepOptions | None = None,
    task: str | None = None,
    steps: int | None = None,
    costs: CostSource = "roofline",
    refresh: bool = False,
    seconds_limit: float = 30.0,
    solver: Solver = "regions",
    ac_units: Sequence[str] | None = None,
    fsdp_units: Sequence[str] = (),
    world_size: int = 1,
    progress: Progress | None = None,
    measuring: Measuring | None = None,
) -> PlanResult:
    """Plan, and return the plan with its timeline and the usual alternatives beside it."""
    begin = time.perf_counter()
    report = progress or (lambda stage: None)
    found = device if isinstance(device, Device) else find_device(device)
    check_source(costs, found)
    budget_bytes = bytes_of_budget(budget, found)
    check_solver(solver, ac_units, fsdp_units, world_size)
    trace = (
        target
        if isinstance(target, Trace)
        else capture(target, device=found, options=options, task=task, steps=steps, progress=progress)
    )
    _refuse_other_kind(trace, found)
    captured = time.perf_counter()
    table = price_trace(trace, found, costs=costs, refresh=refresh, progress=measuring)
    priced = time.perf_counter()
    report("trade-offs of every region")
    planner: Planner | ModulePlanner
    if solver == "modules":
        planner = ModulePlanner(trace, table, ac_units, fsdp_units, world_size)
    else:
        planner = Planner(trace, table)
    report("solving")
    answer = planner.plan(budget_bytes, seconds_limit=seconds_limit)
    solved = time.perf_counter()
    report("comparing")
    chosen = answer.smallest if isinstance(answer, Infeasible) else answer
    compared = baselines(planner.trace, table, budget_bytes)
    end = time.perf_counter()
    return PlanResult(
        plan=chosen,
        feasible=not isinstance(answer, Infeasible),
        device=found,
        trace=trace,
        costs=table,
        timeline=planner.timeline_of(chosen),
        margin_bytes=found.margin_bytes if budget is None else 0,
        baselines=compared,
        warnings=trace.warnings + table.warnings + planner.warnings + host_warnings(chosen, table),
        seconds={
            "capture": captured - begin,
            "price": priced - captured,
            "solve": solved - priced,
            "compare": end - solved,
            "total": end - begin,
        },
    )


def frontier(
    target: str | Build | Trace,
    *,
    device: str | Device = "cpu",
    options: StepOptions | None = None,
    task: str | None = None,
    steps: int | None = None,
    costs: CostSource = "roofline",
    refresh: bool = False,
    points: int = 16,
    progress: Progress | None = None,
    measuring: Measuring | None = None,
) -> Frontier:
    """Return the plans between the smallest reachable peak and no plan at all that no other plan beats."""
    if not 1 <= points <= _MOST_POINTS:
        raise OptionError(f"--points must be from 1 to {_MOST_POINTS}, got {points}.")
    begin = time.perf_counter()
    report = progress or (lambda stage: None)
    found = device if isinstance(device, Device) else find_device(device)
    check_source(costs, found)
    trace = (
        target
        if isinstance(target, Trace)
        else capture(target, device=found, options=options, task=task, steps=steps, progress=progress)
    )
    _refuse_other_kind(trace, found)
    captured = time.perf_counter()
    table = price_trace(trace, found, costs=costs, refresh=refresh, progress=measuring)
    report("trade-offs of every region")
    planner = Planner(trace, table)
    report("solving")
    plans = planner.frontier(points)
    end = time.perf_counter()
    return Frontier(
        device=found,
        trace=trace,
        points=tuple(FrontierPoint(plan.peak_bytes, plan.step_seconds, plan) for plan in plans),
        baselines=baselines(trace, table, found.default_budget_bytes),
        seconds={"capture": captured - begin, "solve": end - captured, "total": end - begin},
    )


_MOST_POINTS = 200


def _refuse_other_kind(trace: Trace, device: Device) -> None:
    if trace.device != device.kind:
        raise StepError(
            f"the trace was captured for {trace.device}, but {device.name} is a {device.kind} device; "
            "capture again for this device."
        )
    if trace.architecture and not same_kernels(trace.architecture, device.architecture):
        raise StepError(
            f"the trace was captured for {trace.architecture}, and the step chooses other kernels on "
            f"{device.name} ({device.architecture or 'unknown architecture'}); capture again for this device."
        )


def verify(
    target: str | Build,
    *,
    options: StepOptions | None = None,
    task: str | None = None,
    steps: int | None = None,
    plan: Plan | str | None = None,
    costs: CostSource = "measured",
    force: bool = False,
    eager: bool = False,
    runs: int | None = None,
    progress: Progress | None = None,
    measuring: Measuring | None = None,
) -> Verification:
    """Run the real step on this machine and compare its measured peak and time with the predicted ones.

    With a plan (or the name of its file) the step runs with and without it, and loss and gradients are
    compared too. What the step compiles runs compiled, unless `eager`. At most `runs` steps are timed.
    """
    if runs is not None and (type(runs) is not int or not 1 <= runs <= _MOST_RUNS):
        raise OptionError(f"--runs must be a whole number from 1 to {_MOST_RUNS}, got {runs!r}.")
    device = find_device("cuda" if _cuda_is_present() else "cpu")
    _check_steps(steps)
    check_source(costs, device)
    if isinstance(plan, str):
        plan = load_plan(plan)
    if plan is not None and plan.world_size > 1:
        raise PlanError(
            f"the plan's figures are for one of {plan.world_size} processes that divide the model, but "
            "verify runs a step in one process; plan without a world size to compare them with it."
        )
    resolved = _resolve(target, device, options, task)
    return verify_step(
        resolved.build,
        device,
        target=resolved.name,
        settings=resolved.settings,
        plan=plan,
        costs=costs,
        steps=steps,
        force=force,
        eager=eager,
        timed_runs=runs or TIMED_RUNS,
        progress=progress,
        measuring=measuring,
    )


_MOST_RUNS = 1000


def _resolve(target: str | Build, device: Device, options: StepOptions | None, task: str | None) -> Target:
    return load(target, replace(options or StepOptions(), device=device.kind), task)


def _cuda_is_present() -> bool:
    import torch

    return torch.cuda.is_available()
