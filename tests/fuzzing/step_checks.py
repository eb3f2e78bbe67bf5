"""What must hold for every step: the peak is the one that a run measures, and plans change no result."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from generated_steps import GeneratedStep, generated_steps
from hypothesis import reject
from hypothesis import strategies as st
from results_by_hand import bytes_of_step, same_bytes
from workbench import workbench

from trainfit import Step, Trace, capturing
from trainfit.applying import attach_plan
from trainfit.costs.roofline import roofline_costs
from trainfit.planning.planner import Planner
from trainfit.plans.plan import Plan
from trainfit.traces.simulate import simulate
from trainfit.verifying.measuring import measure_step
from trainfit.verifying.plan_comparison import SameResults, compare_results
from trainfit.workspace.measured import THOROUGH

_NUMBER_BYTES = 8
_TIMES_A_NUMBER = ("aten.mul.Tensor", "aten.div.Tensor", "aten.mul_.Tensor", "aten.div_.Tensor")
_DATA_SHARE = 0.05
"""What is set aside of a step's own memory where it depends on data."""

_MOST_ENTRIES = "indices of a sparse tensor were assumed to be distinct"
"""An assumption that can only be too much."""


@dataclass(frozen=True)
class PlannedStep:
    """A step, a budget between its smallest and its usual peak, and what is done to the second run."""

    step: GeneratedStep
    budget_share: float
    tampering: str


def planned_steps() -> st.SearchStrategy[PlannedStep]:
    """Draw steps with their budgets."""
    shares, tamperings = st.sampled_from((0.0, 0.3, 0.7, 1.0)), st.sampled_from(sorted(TAMPERINGS))
    return st.builds(PlannedStep, generated_steps(), shares, tamperings)


def check_step(case: PlannedStep) -> None:
    """Capture for a CPU and a GPU, measure, plan, compare; a step that torch itself refuses is no input."""
    workbench()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about prototypes and what is slow
        _refuse_impossible(case.step.build)
        trace = capturing.capture(case.step.build, limits=THOROUGH)
        _check_peak(trace, case.step.build)
        on_gpu = capturing.capture(lambda: case.step.build("cuda"), device=workbench().h100)
        assert simulate(on_gpu).peak_bytes > 0
        plan = _check_plan(trace, case.budget_share)
        if plan is not None:
            _check_promise(trace, case.step.build, plan)
            _check_results(case, plan)


def _refuse_impossible(build: Callable[[], Step]) -> None:
    """Leave out what torch itself cannot run on this machine."""
    try:
        step = build()
        for _ in range(2):
            step.run()
    except (RuntimeError, ValueError, NotImplementedError):
        reject()


def _check_peak(trace: Trace, build: Callable[[], Step]) -> None:
    """The peak is exact but for Python numbers, which torch keeps for backward without an operator call."""
    predicted, measured = simulate(trace), measure_step(build, "cpu", steps=trace.steps, timed=0)
    less = more = 0.0
    if trace.depends_on_data:
        less = more = math.ceil(_DATA_SHARE * (predicted.peak_bytes - trace.persistent_bytes))
    if any(_MOST_ENTRIES in warning for warning in trace.warnings):
        less, more = math.inf, 0.0
    apart = measured.peak_bytes - predicted.peak_bytes
    assert -less <= apart <= more + _NUMBER_BYTES * _numbers(trace), (
        f"predicted {predicted.peak_bytes:,}, measured {measured.peak_bytes:,}: {apart:+,}"
    )


def _numbers(trace: Trace) -> int:
    """Return how many Python numbers torch may keep for backward."""
    return sum(
        len(trace.signatures[op.signature].inputs) == 1
        and trace.signatures[op.signature].name in _TIMES_A_NUMBER
        for op in trace.ops
    )


def _check_plan(trace: Trace, share: float) -> Plan | None:
    """Return a plan within the budget; None if even the best that there is takes nothing off."""
    planner = Planner(trace, roofline_costs(trace, workbench().h100))
    smallest = planner.smallest().peak_bytes
    # With what is set aside where memory depends on data, as every plan's peak is.
    baseline = planner.nothing(planner.step.peak_bytes).peak_bytes
    budget = smallest + int(share * (baseline - smallest))
    found = planner.plan(budget, seconds_limit=5.0)
    assert found.fits, f"peak {found.peak_bytes:,} of {budget:,}, above the smallest"
    return found.plan if found.plan.regions else None


def _check_promise(trace: Trace, build: Callable[[], Step], plan: Plan) -> None:
    """The applied plan needs no more than it says, but for the same numbers."""
    measured = measure_step(build, "cpu", plan, steps=trace.steps, timed=0)
    apart = measured.peak_bytes - plan.peak_bytes
    assert apart <= _NUMBER_BYTES * _numbers(trace), (
        f"promised {plan.peak_bytes:,}, measured {measured.peak_bytes:,}: {apart:+,}"
    )


def _check_results(case: PlannedStep, plan: Plan) -> None:
    """The planned step computes the same; what was tampered with is called different if and only if it is."""
    build = case.step.build
    results = compare_results(build, plan)
    steps = results.runs // 2
    unplanned = bytes_of_step(build, steps)
    same = same_bytes(unplanned, bytes_of_step(lambda: _planned(build(), plan), steps))
    assert same, "the plan changes results"
    assert _called_equal(results), results.differences
    again = _Tampering(build, TAMPERINGS[case.tampering])
    results = compare_results(again, plan)
    tampered = bytes_of_step(lambda: _planned(again.tampered(), plan), steps)
    assert _called_equal(results) == same_bytes(unplanned, tampered), results.differences


def _planned(step: Step, plan: Plan) -> Step:
    attach_plan(step.model, plan)
    return step


def _called_equal(results: SameResults) -> bool:
    return not results.differences


class _Tampering:
    """Builds the step, and the second time, when the plan runs it, one that does something else."""

    def __init__(self, build: Callable[[], Step], change: Callable[[Step], Step]) -> None:
        self.build, self.change, self.built = build, change, 0

    def __call__(self) -> Step:
        self.built += 1
        return self.tampered() if self.built == 2 else self.build()

    def tampered(self) -> Step:
        return self.change(self.build())


def _with_result(step: Step, change: Callable[[Any], Any]) -> Step:
    run = step.run
    return Step(model=step.model, optimizer=step.optimizer, run=lambda: change(run()))


def _changed_number(result: Any, number: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Change the first number in a result."""
    if isinstance(result, torch.Tensor):
        return number(result.detach())
    if isinstance(result, float):
        return number(torch.tensor(result, dtype=torch.float64)).item()
    if isinstance(result, tuple):
        return (_changed_number(result[0], number), *result[1:])
    if isinstance(result, dict):
        return result | {"loss": _changed_number(result["loss"], number)}
    return result


def _with_gradient(step: Step, change: Callable[[torch.Tensor], torch.Tensor]) -> Step:
    """Change one gradient on its way to its parameter, where that is not sparse."""
    last = [parameter for parameter in step.model.parameters() if parameter.requires_grad][-1]
    last.register_hook(lambda gradient: gradient if gradient.is_sparse else change(gradient.clone()))
    return step


def _first_to(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return change


def _next(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nextafter(tensor, torch.full_like(tensor, math.inf))


def _with_state(step: Step) -> Step:
    """Change one weight by one bit after every step."""

    def change(result: Any) -> Any:
        with torch.no_grad():
            parameter = next(step.model.parameters())
            parameter.copy_(_next(parameter))
        return result

    return _with_result(step, change)


TAMPERINGS: dict[str, Callable[[Step], Step]] = {
    "nothing": lambda step: step,
    "loss, one bit": lambda step: _with_result(step, lambda found: _changed_number(found, _next)),
    "loss, NaN": lambda step: _with_result(
        step, lambda found: _changed_number(found, lambda t: t * math.nan)
    ),
    "gradient, one bit": lambda step: _with_gradient(step, _next),
    "gradient, one zero": lambda step: _with_gradient(step, _first_to(0.0)),
    "gradient, one NaN": lambda step: _with_gradient(step, _first_to(math.nan)),
    "weight, one bit": _with_state,
}
