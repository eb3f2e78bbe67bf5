"""`plan` and `frontier`: which plan makes a step fit, and what each peak costs in time."""

from __future__ import annotations

import time
from collections.abc import Sequence

from trainfit.api.predict import Build, Progress, traced
from trainfit.costs.pricing import CostSource, Measuring, check_source, price_trace
from trainfit.devices import Device, find_device
from trainfit.errors import BudgetTooSmall, OptionError
from trainfit.models.recipe import StepOptions
from trainfit.planning.baselines import baselines
from trainfit.planning.certify import host_warnings
from trainfit.planning.infeasible import too_small
from trainfit.planning.module_planner import ModulePlanner
from trainfit.planning.requests import Solver, bytes_of_budget, check_solver
from trainfit.planning.results import Frontier, FrontierPoint, PlanResult
from trainfit.planning.solve import Infeasible, Planner
from trainfit.plans import Plan
from trainfit.trace import Trace


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
    trace = traced(target, found, options, task, steps, progress)
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
    trace = traced(target, found, options, task, steps, progress)
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
