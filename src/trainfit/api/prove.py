"""`verify`: predicted against measured, on this machine."""

from __future__ import annotations

import os

from trainfit.api.prove_compiled import verify_compiled_step
from trainfit.api.prove_ranks import verify_ranks
from trainfit.api.prove_ways import verify_way
from trainfit.api.ranks_compared import refuse_other_world
from trainfit.api.request import Build, Request, default_device
from trainfit.basics.doing import Measuring, Progress, heard_by
from trainfit.costs.pricing import CostSource
from trainfit.costs.schedule import schedule
from trainfit.devices.library_handles import library_workspaces
from trainfit.errors import OptionError, PlanError
from trainfit.models.recipe import StepOptions
from trainfit.plans.compiled_plan import CompiledPlan
from trainfit.plans.plan import Plan
from trainfit.plans.plan_origin import plan_differences
from trainfit.plans.plan_store import load_eager_plan, load_plan
from trainfit.plans.ways import Way
from trainfit.timing.load import LoadMeter
from trainfit.traces.ranks import Cluster
from trainfit.traces.simulate import simulate
from trainfit.verifying.compiled_verification import CompiledVerification
from trainfit.verifying.measuring import TIMED_RUNS
from trainfit.verifying.rank_control import started_by_torchrun
from trainfit.verifying.rank_verification import RankVerification
from trainfit.verifying.verification import (
    Verification,
    guard_memory,
    needed_bytes,
    notes_on,
    run_for_real,
    said_of_real_runs,
)
from trainfit.workspace.measured import THOROUGH

_MOST_RUNS = 1000


def verify(
    target: str | Build,
    *,
    options: StepOptions | None = None,
    task: str | None = None,
    steps: int | None = None,
    plan: Plan | CompiledPlan | str | None = None,
    way: Way | str | None = None,
    costs: CostSource = "measured",
    refresh: bool = False,
    force: bool = False,
    eager: bool = False,
    runs: int | None = None,
    cluster: Cluster | None = None,
    progress: Progress | None = None,
    measuring: Measuring | None = None,
) -> Verification | RankVerification | CompiledVerification:
    """Run the real step on this machine and compare its measured peak and time with the predicted ones.

    With a plan (or the name of its file) the step runs with and without it, and loss and gradients are
    compared too. With a way that `trainfit.fit` has found, all of its changes are made, and results are
    compared as exactly as it promises. What the step compiles runs compiled, unless `eager`. At most `runs`
    steps are timed. With `refresh`, operators whose time is remembered are measured again. A plan for
    torch.compile is compared with the compiled step, and with torch's own `activation_memory_budget`.

    In a process that torchrun has started, every rank is predicted and measured, on the CPU, and compared:
    then the result has the `ranks`, and no time. There a `cluster` says by which mesh they share the work.
    """
    if isinstance(plan, str) and "{rank}" not in plan:
        plan = load_plan(plan)
    with heard_by(progress, measuring):
        if isinstance(plan, CompiledPlan):
            if way is not None or eager or refresh:
                raise PlanError(
                    "a plan for torch.compile is verified alone: leave way=, eager=, refresh= out."
                )
            request = Request(target, default_device(), options, task, steps, cluster=cluster)
            return verify_compiled_step(request, plan=plan, force=force, runs=runs)
        request = Request(target, default_device(), options, task, steps, costs, refresh, cluster=cluster)
        return verify_step(request, plan=plan, way=way, force=force, eager=eager, runs=runs)


def verify_step(
    request: Request,
    *,
    plan: Plan | str | None = None,
    way: Way | str | None = None,
    force: bool = False,
    eager: bool = False,
    runs: int | None = None,
    meter: LoadMeter | None = None,
) -> Verification | RankVerification:
    """Predict, then measure; refuses to run what this machine's memory cannot hold, unless forced.

    `verify` says what the arguments mean. With a plan, the promise is the plan's.
    """
    if runs is not None and (type(runs) is not int or not 1 <= runs <= _MOST_RUNS):
        raise OptionError(f"--runs must be a whole number from 1 to {_MOST_RUNS}, got {runs!r}.")
    if plan is not None and way is not None:
        raise OptionError("--way has its own plan, if it needs one: leave --plan out.")
    refuse_other_world(request.cluster)
    if way is not None:
        if started_by_torchrun():
            raise OptionError("a way is verified in one process; of several, --plan verifies its plan.")
        return verify_way(request, way, force=force, eager=eager, runs=runs, meter=meter)
    if started_by_torchrun():
        if runs is not None:
            raise OptionError("--runs says how many steps are timed; of several processes none is.")
        return verify_ranks(request, plan=_loaded(_of_rank(plan)), force=force, eager=eager)
    plan = _usable(plan)
    device = request.device
    guard = None if force else lambda needed: guard_memory(device, {"the real step": needed})
    trace = request.trace(limits=THOROUGH, guard=guard)
    timeline = simulate(trace)
    if not force:
        guard_memory(device, needed_bytes(timeline, plan))
    table = request.price(trace)
    measured, comparison = run_for_real(
        request.resolved.build,
        device.kind,
        trace.steps,
        plan=plan,
        timed=runs or TIMED_RUNS,
        eager=eager,
        meter=meter,
    )
    request.watch.lap("measure")
    # torch's statistics count what libraries keep as well.
    kept_bytes = sum(library.bytes for library in library_workspaces(trace, device))
    return Verification(
        target=trace.target,
        device=device,
        trace=trace,
        predicted_peak_bytes=kept_bytes + (timeline.peak_bytes if plan is None else plan.peak_bytes),
        predicted_persistent_bytes=kept_bytes + timeline.persistent_bytes,
        predicted_seconds=schedule(trace, table).step_seconds if plan is None else plan.step_seconds,
        measured=measured,
        warnings=said_of_real_runs(trace.assumptions) + table.warnings + notes_on(measured, comparison),
        comparison=comparison,
        plan_differences=plan_differences(plan, trace, device.name) if plan is not None else (),
        seconds=request.watch.seconds,
    )


def _of_rank(plan: Plan | str | None) -> Plan | str | None:
    """Return the plan of this rank, where files are named by rank: stages of a pipeline have one each."""
    return plan.replace("{rank}", os.environ["RANK"]) if isinstance(plan, str) else plan


def _loaded(plan: Plan | str | None) -> Plan | None:
    return load_eager_plan(plan) if isinstance(plan, str) else plan


def _usable(plan: Plan | str | None) -> Plan | None:
    """Return the plan, read from its file if need be; refuse one whose figures are for several processes."""
    plan = _loaded(plan)
    if plan is not None and plan.cluster is not None and plan.cluster.world_size > 1:
        size = plan.cluster.world_size
        raise PlanError(
            f"the plan was made for {plan.cluster.words}, and this is one process: write torchrun "
            f"--nproc-per-node {size} -m trainfit verify to run it on as many."
        )
    if plan is not None and plan.world_size > 1:
        raise PlanError(
            f"the plan's figures are for one of {plan.world_size} processes that divide the model, but "
            "verify runs a step in one process; plan without a world size to compare them with it."
        )
    return plan
