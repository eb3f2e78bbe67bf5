"""`plan` and `frontier`: which plan makes a step fit, and what each peak costs in time."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainfit.allocator.allocator_options import AllocatorOptions
from trainfit.api.request import Build, Request
from trainfit.api.stage_notes import stage_notes
from trainfit.basics.doing import Measuring, Progress, doing, heard_by
from trainfit.basics.units import format_bytes, format_seconds
from trainfit.costs.pricing import CostSource
from trainfit.devices.device_table import Device
from trainfit.errors import BudgetTooSmall, OptionError
from trainfit.models.recipe import StepOptions
from trainfit.planning.baselines import UsualWays, faster_ways
from trainfit.planning.certify import host_warnings
from trainfit.planning.host_copies import HostLink
from trainfit.planning.infeasible import too_small
from trainfit.planning.modules.unit_planner import ModulePlanner
from trainfit.planning.plan_results import Frontier, FrontierPoint, PlanResult
from trainfit.planning.planner import Planner
from trainfit.planning.requests import Solver, budget_notes, bytes_of_budget, check_solver
from trainfit.plans.plan import Plan
from trainfit.traces.ranks import Cluster
from trainfit.traces.trace import Trace

_MOST_POINTS = 200


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
    allocator: str | AllocatorOptions | None = "default",
    cluster: Cluster | None = None,
    worst_rank: bool = False,
    offload: bool = False,
) -> Plan:
    """Return the fastest plan that runs within the budget; `BudgetTooSmall` if there is none.

    `budget` is bytes or text such as `24GiB` or `80%` (of the device), and taken literally: on a GPU it is
    the memory of torch's caching allocator, whose setting is `allocator` (see `trainfit.estimate`). Without
    it, it is what the device has for tensors less its margin (`Device.margin_bytes`).

    The solver `modules` is PyTorch's formulation: it takes the names of modules that may be checkpointed
    (`ac_units`), of those that FSDP shards (`fsdp_units`: no AC unit lies around one), and a `world_size`
    that divides parameters, gradients and optimizer state. In names `*` is any one part, as in `blocks.*`.

    With a `cluster` the step is captured as one of its ranks, with all that it communicates (see
    `trainfit.estimate`). The solver `modules` then has true figures instead of a division: its FSDP units are
    those that were captured, and the world size is left out.

    With `offload` results may also be copied to the host's memory and back, on a GPU beside what it computes.
    """
    request = Request(target, device, options, task, steps, costs, False, allocator, cluster, worst_rank)
    result = plan_step(request, budget, seconds_limit, solver, ac_units, fsdp_units, world_size, offload)
    refuse_infeasible(result)
    return result.plan


def refuse_infeasible(result: PlanResult) -> None:
    """Raise `BudgetTooSmall`, with what the smallest peak consists of, if the plan does not fit."""
    if not result.feasible:
        raise BudgetTooSmall(too_small(result), result.plan.peak_bytes)


def plan_step(
    request: Request,
    budget: int | str | None = None,
    seconds_limit: float = 30.0,
    solver: Solver = "regions",
    ac_units: Sequence[str] | None = None,
    fsdp_units: Sequence[str] = (),
    world_size: int = 1,
    offload: bool = False,
) -> PlanResult:
    """Plan, and return the plan with its timeline and the usual alternatives beside it."""
    watch = request.watch
    bytes_of_budget(budget, request.device)  # refused before anything is captured
    check_solver(solver, ac_units, fsdp_units, world_size)
    check_offload(request, solver, offload=offload)
    trace = request.trace()
    device = request.device
    budget_bytes = bytes_of_budget(budget, device)
    table = request.price(trace)
    doing("finding the trade-offs of every region")
    planner: Planner | ModulePlanner
    if solver == "modules":
        planner = ModulePlanner(trace, table, ac_units, fsdp_units, world_size, request.allocator)
    else:
        planner = Planner(trace, table, request.allocator, HostLink.of(table.device) if offload else None)
    limit = f", for {format_seconds(seconds_limit)} at most" if 0 < seconds_limit < math.inf else ""
    doing(f"solving for the fastest plan{limit}")
    found = planner.plan(budget_bytes, seconds_limit=seconds_limit)
    promised = found.promised()
    expandable = planner.expandable(found) if isinstance(planner, Planner) else None
    watch.lap("solve")
    doing("comparing with the usual ways to checkpoint")
    usual = planner.usual if isinstance(planner, Planner) else UsualWays(planner.step)
    compared = tuple(way.baseline for way in usual.within(budget_bytes))
    watch.lap("compare")
    notes = (
        budget_notes(budget, device) + host_warnings(promised, table) + _host_memory_notes(promised, device)
    )
    notes += stage_notes(request, trace, found.times)
    if found.fits and solver == "regions":
        notes += faster_ways([(budget_bytes, promised.step_seconds)], compared)
    return PlanResult(
        plan=promised,
        feasible=found.fits,
        device=device,
        trace=trace,
        costs=table,
        timeline=found.timeline,
        times=found.times,
        allocator=request.allocator,
        margin_bytes=device.margin_bytes if budget is None else 0,
        baselines=compared,
        expandable=expandable,
        warnings=trace.warnings + table.warnings + planner.warnings + notes,
        seconds=watch.seconds,
    )


def check_offload(request: Request, solver: str = "regions", *, offload: bool) -> None:
    """Refuse to offload where that cannot be planned, before anything is captured."""
    if not offload:
        return
    if solver != "regions":
        raise OptionError("--offload belongs to the solver `regions`; leave --solver out.")
    if request.device.kind != "cpu":
        HostLink.of(request.device)


def _host_memory_notes(plan: Plan, device: Device) -> tuple[str, ...]:
    if not plan.host_bytes or device.kind != "cpu":
        return ()
    return (
        f"{format_bytes(plan.host_bytes)} are copied to the host's memory, which a CPU computes in as well: "
        "torch has them no more, the machine does. Such a plan is for trying out what a GPU would run.",
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
    allocator: str | AllocatorOptions | None = "default",
    cluster: Cluster | None = None,
    worst_rank: bool = False,
    points: int = 16,
    offload: bool = False,
    progress: Progress | None = None,
    measuring: Measuring | None = None,
) -> Frontier:
    """Return the plans between the smallest reachable peak and no plan at all that no other plan beats.

    `offload` is as in `trainfit.plan`.
    """
    with heard_by(progress, measuring):
        request = Request(
            target, device, options, task, steps, costs, refresh, allocator, cluster, worst_rank
        )
        return frontier_step(request, points, offload=offload)


def frontier_step(request: Request, points: int, *, offload: bool = False) -> Frontier:
    """Plan for so many budgets."""
    if not 1 <= points <= _MOST_POINTS:
        raise OptionError(f"--points must be from 1 to {_MOST_POINTS}, got {points}.")
    check_offload(request, offload=offload)
    trace = request.trace()
    table = request.price(trace)
    doing("finding the trade-offs of every region")
    planner = Planner(trace, table, request.allocator, HostLink.of(table.device) if offload else None)
    doing("finding the smallest peak")
    plans = planner.frontier(points)
    request.watch.lap("solve")
    compared = tuple(way.baseline for way in planner.usual.within(request.device.default_budget_bytes))
    notes = faster_ways([(plan.memory_bytes, plan.step_seconds) for plan in plans], compared)
    return Frontier(
        device=request.device,
        trace=trace,
        points=tuple(
            FrontierPoint(plan.peak_bytes, plan.memory_bytes, plan.step_seconds, plan) for plan in plans
        ),
        baselines=compared,
        seconds=request.watch.seconds,
        warnings=trace.warnings + table.warnings + planner.warnings + notes + stage_notes(request, trace),
    )
