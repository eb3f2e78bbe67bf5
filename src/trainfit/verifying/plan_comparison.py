"""Run a step with and without its plan from the same seed, and compare what both made, bit by bit."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trainfit.applying import attach_plan
from trainfit.capturing.random_stream import seeded
from trainfit.comparing import Contents, Match, compare, contents_of, largest_element
from trainfit.plans.plan import Plan
from trainfit.steps.step import Step

_RUNS = ("unplanned", "planned")
CHANGED_RUNS = ("unchanged", "changed")
"""What the two runs are called in lines about their differences."""
_EXTRA_RUNS = 2
"""How often at most the step runs again without the plan, to see what differs by itself. Twice, because data
that alternates between two batches is the same again in every other run."""


@dataclass(frozen=True)
class SameResults:
    """How the results of a planned step compare with those of the same step without its plan."""

    loss: Match
    """What `run` returned."""
    gradients: Match
    """Every gradient of the model's parameters and of whatever the optimizers train, as backward left it."""
    state: Match
    """Parameters and buffers when the step was done."""
    gradient_scale: float
    """The largest element of any gradient, to compare a difference with."""
    runs: int
    """How often `run` was called for this."""
    loss_scale: float = 1.0
    """The largest number in what `run` returned, for the same."""

    @property
    def differences(self) -> tuple[str, ...]:
        """One line for everything that is not the same."""
        return self.loss.differences + self.gradients.differences + self.state.differences

    @property
    def not_compared(self) -> tuple[str, ...]:
        """One line for everything that could not be compared."""
        return self.loss.not_compared + self.gradients.not_compared + self.state.not_compared


_Results = tuple[Contents, Contents, Contents]
"""What one run of a step made: what `run` returned, the gradients, parameters and buffers."""


def planned(build: Callable[[], Step], plan: Plan | None) -> Callable[[], Step]:
    """Return a function that builds the same step, whose model runs the plan."""

    def build_with_plan() -> Step:
        step = build()
        if plan is not None:
            attach_plan(step.model, plan)
        return step

    return build_with_plan


def compare_results(
    build: Callable[[], Step], plan: Plan, agreed: Callable[[bool], bool] = bool
) -> SameResults:
    """Run the first step with and without the plan, from the same seed, and compare their results.

    Both run eagerly: a compiler rounds differently by itself, and the question is what the plan does. A
    region that is recomputed as a whole is still followed op by op in the first step, and no longer in
    the second: then that one is compared, which begins with what the first has made of the weights.

    Where something differs, the step runs once more without the plan: what differs then as well is not the
    plan's doing, and is listed as not compared.

    Where several processes run the step together, `agreed` tells all of them whether any has found that.
    """
    steps = 2 if any(region.whole for region in plan.regions) else 1
    return compare_builds(build, planned(build, plan), steps, agreed=agreed)


def compare_builds(
    build: Callable[[], Step],
    changed: Callable[[], Step],
    steps: int,
    *,
    names: tuple[str, str] = _RUNS,
    what: str = "the plan",
    agreed: Callable[[bool], bool] = bool,
    eager: bool = True,
) -> SameResults:
    """Run a step and what was made of it from the same seed, and compare the results of the last of `steps`.

    `compare_results` says what is done about results that differ by themselves; `names` is what the two are
    called, and `what` makes the difference between them. What they compile runs eagerly, unless not `eager`.
    """
    first = _results(build, steps, eager=eager)
    found = _compared(first, _results(changed, steps, eager=eager), names)
    builds = 2
    while builds < 2 + _EXTRA_RUNS and agreed(any(match.different for match in found)):
        by_itself = _compared(first, _results(build, steps, eager=eager), ("first", "second"))
        why = f"two runs without {what} differ too"
        found = [match.apart_from(other, why) for match, other in zip(found, by_itself)]
        builds += 1
    loss, gradients, state = found
    scales = largest_element(first[1]), builds * steps, largest_element(first[0])
    return SameResults(loss, gradients, state, *scales)


def _compared(first: _Results, second: _Results, names: tuple[str, str]) -> list[Match]:
    """Compare the loss, the gradients and the state of two runs."""
    return [compare(one, other, names) for one, other in zip(first, second)]


def _results(build: Callable[[], Step], steps: int, *, eager: bool) -> _Results:
    """Run so many steps; return what the last one made."""
    gradients: dict[str, Contents] = {}
    stance = torch.compiler.set_stance("force_eager") if eager else contextlib.nullcontext()
    with stance, seeded():
        step = build()
        names = parameter_names(step)
        for parameter, name in names.items():
            if parameter.requires_grad:
                _call_first(parameter, functools.partial(_keep, gradients, name))
        # For all optimizers: what the step has may be a wrapper around one, as in Accelerate.
        hook = register_optimizer_step_pre_hook(functools.partial(_keep_all, gradients, names))
        try:
            for _ in range(steps):
                gradients.clear()
                result = step.run()
        finally:
            hook.remove()
        loss = contents_of(result)
    state: Contents = {}
    buffers = {buffer: name for name, buffer in step.model.named_buffers()}
    for tensor, name in (names | buffers).items():
        # The step is done, and nothing writes to them any more.
        state |= contents_of(tensor, name, copies=False)
    parts = {path: part for contents in gradients.values() for path, part in contents.items()}
    return loss, parts, state


def parameter_names(step: Step) -> dict[torch.Tensor, str]:
    """Return the parameters of the model, and those of other models that the step's optimizers train."""
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in step.model.named_parameters()}
    for number, optimizer in enumerate(step.optimizers):
        for group, settings in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(settings["params"]):
                names.setdefault(parameter, f"optimizer {number}, group {group}, parameter {position}")
    return names


def _call_first(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Let the hook see a gradient before the user's own hooks, which may use it up and set it to None."""
    handle = parameter.register_post_accumulate_grad_hook(hook)
    hooks: dict[int, Any] = parameter._post_accumulate_grad_hooks
    others = {number: other for number, other in hooks.items() if number != handle.id}
    for number in others:
        del hooks[number]
    hooks.update(others)


def _keep(gradients: dict[str, Contents], name: str, parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        gradients[name] = contents_of(parameter.grad, name)


def _keep_all(
    gradients: dict[str, Contents], names: dict[torch.Tensor, str], optimizer: Any, *_: object
) -> None:
    """Keep the gradients that backward did not accumulate: the step has put them there itself."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names.setdefault(parameter, f"parameter {len(names)}, which was added later")
            if name not in gradients:
                _keep(gradients, name, parameter)
