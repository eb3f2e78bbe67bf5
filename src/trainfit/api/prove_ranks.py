"""`verify` where torchrun has started several processes: every rank predicted and measured, and compared."""

from __future__ import annotations

import os

from trainfit.api.rank_prediction import trace_in_child
from trainfit.api.request import Request
from trainfit.basics.doing import doing
from trainfit.errors import OptionError, PlanDoesNotFit, PlanError, StepError, TrainfitError
from trainfit.plans.plan import Plan
from trainfit.plans.plan_origin import plan_differences
from trainfit.traces.simulate import simulate
from trainfit.traces.trace import Trace
from trainfit.verifying.rank_control import RankControl
from trainfit.verifying.rank_measuring import RankMemory, planned_memory, predicted_memory
from trainfit.verifying.rank_verification import RankFound, RankVerification, run_rank
from trainfit.verifying.silent_backend import silent_groups
from trainfit.verifying.verification import guard_memory, needed_bytes, said_of_real_runs


def verify_ranks(
    request: Request, *, plan: Plan | None = None, force: bool = False, eager: bool = False
) -> RankVerification:
    """Predict and measure the rank that this process is, and return what all of them have found.

    Every process of the run has to call this. Time is not compared: the exchange between the processes is
    made so that it takes no memory of torch's, and not so that it is fast.
    """
    _check(request)
    control = RankControl.from_environment()
    try:
        return _verified(request, control, plan, force, eager)
    except TrainfitError as error:
        control.failed(str(error))
        raise
    except BaseException as error:
        control.failed(f"{type(error).__name__}: {error}")
        raise


def _verified(
    request: Request, control: RankControl, plan: Plan | None, force: bool, eager: bool
) -> RankVerification:
    doing("predicting")
    trace = trace_in_child(request, control.cluster)
    request.watch.lap("capture")
    timeline = simulate(trace)
    if not force:
        together = {
            f"{what} of {control.cluster.local_world_size} ranks": control.cluster.local_world_size * needed
            for what, needed in needed_bytes(timeline, plan).items()
        }
        guard_memory(request.device, together)
    warnings = said_of_real_runs(trace.assumptions)
    predicted = predicted_memory(timeline) if plan is None else _planned(plan, trace)
    with silent_groups():
        found = run_rank(
            request.resolved.build,
            predicted,
            trace.steps,
            control,
            plan=plan,
            eager=eager,
            warnings=warnings,
        )
        everyone = [RankFound.from_data(data) for data in control.gathered(found.as_data())]
    control.leave()
    request.watch.lap("measure")
    return RankVerification(
        target=trace.target,
        device=request.device,
        trace=trace,
        rank=control.cluster.rank,
        ranks=tuple(everyone),
        plan=plan,
        plan_differences=plan_differences(plan, trace, request.device.name) if plan is not None else (),
        seconds=request.watch.seconds,
    )


def _planned(plan: Plan, trace: Trace) -> RankMemory:
    """Return what the rank needs with the plan: its decisions, on the step that this rank runs."""
    try:
        return planned_memory(plan, trace)
    except PlanDoesNotFit as error:
        rank = trace.cluster.rank if trace.cluster is not None else 0
        made_for = "one process" if plan.cluster is None else plan.cluster.words
        raise PlanError(
            f"the plan was made for {made_for} and does not fit rank {rank}: {error} If the step has "
            "changed, plan again. If ranks run different models, as stages of a pipeline do, make a plan for "
            "each with trainfit plan --rank, and name them by rank: --plan plan-{rank}.json."
        ) from None


def _check(request: Request) -> None:
    if request.device.kind != "cpu":
        raise OptionError(
            "ranks are measured on the CPU for now: hide the GPUs, as in CUDA_VISIBLE_DEVICES= torchrun ... "
            "-m trainfit verify."
        )
    if int(os.environ["WORLD_SIZE"]) < 1:
        raise StepError(f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, which makes no sense.")
