"""`verify`: predicted against measured, on this machine."""

from __future__ import annotations

import torch

from trainfit.api.predict import Build, Progress, check_steps, resolve
from trainfit.costs.pricing import CostSource, Measuring, check_source
from trainfit.devices import find_device
from trainfit.errors import OptionError, PlanError
from trainfit.measuring import TIMED_RUNS
from trainfit.models.recipe import StepOptions
from trainfit.plan_store import load_plan
from trainfit.plans import Plan
from trainfit.verification import Verification, verify_step


def verify(
    target: str | Build,
    *,
    options: StepOptions | None = None,
    task: str | None = None,
    steps: int | None = None,
    plan: Plan | str | None = None,
    costs: CostSource = "measured",
    refresh: bool = False,
    force: bool = False,
    eager: bool = False,
    runs: int | None = None,
    progress: Progress | None = None,
    measuring: Measuring | None = None,
) -> Verification:
    """Run the real step on this machine and compare its measured peak and time with the predicted ones.

    With a plan (or the name of its file) the step runs with and without it, and loss and gradients are
    compared too. What the step compiles runs compiled, unless `eager`. At most `runs` steps are timed.
    With `refresh`, operators whose time is remembered are measured again.
    """
    if runs is not None and (type(runs) is not int or not 1 <= runs <= _MOST_RUNS):
        raise OptionError(f"--runs must be a whole number from 1 to {_MOST_RUNS}, got {runs!r}.")
    device = find_device("cuda" if torch.cuda.is_available() else "cpu")
    check_steps(steps)
    check_source(costs, device)
    if isinstance(plan, str):
        plan = load_plan(plan)
    if plan is not None and plan.world_size > 1:
        raise PlanError(
            f"the plan's figures are for one of {plan.world_size} processes that divide the model, but "
            "verify runs a step in one process; plan without a world size to compare them with it."
        )
    resolved = resolve(target, device, options, task)
    return verify_step(
        resolved.build,
        device,
        target=resolved.name,
        settings=resolved.settings,
        plan=plan,
        costs=costs,
        refresh=refresh,
        steps=steps,
        force=force,
        eager=eager,
        timed_runs=runs or TIMED_RUNS,
        progress=progress,
        measuring=measuring,
    )


_MOST_RUNS = 1000
