"""A compiled step run for real: with a plan, without it, and with torch's own budget; and what it computes.

All runs are compiled by the same backend. Where results are not equal bit by bit (a compiler fuses another
backward differently, and rounds differently for it), they are compared with the gradients of a float64 run
without a compiler: those with the plan may be no further from it than twice those without, or `CLOSE`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch._functorch import config as functorch_config

from trainfit.basics.doing import as_part_of, doing
from trainfit.basics.in_notebooks import ShownInNotebooks
from trainfit.capturing.random_stream import seeded
from trainfit.compiling.carried_plan import apply_compiled_plan, remove_compiled_plan
from trainfit.compiling.step_graphs import compiled_call, is_compiled
from trainfit.devices.device_table import Device
from trainfit.plans.compiled_plan import CompiledPlan
from trainfit.steps.step import Step
from trainfit.timing.load import LoadMeter
from trainfit.traces.trace import Trace
from trainfit.verifying.measuring import Measurement, measure_step
from trainfit.verifying.plan_comparison import SameResults, compare_builds
from trainfit.verifying.verification import errors_of_real_runs

Build = Callable[[], Step]
CLOSE = 1e-5
"""How far gradients may be from those in float64 whatever the others are, as a share of the largest."""


@dataclass(frozen=True)
class CompiledResults:
    """What the step computes with the plan, compared with the compiled step without it."""

    same: SameResults
    planned_error: float | None
    """How far the gradients with the plan are from a float64 run, as a share of the largest; None if equal,
    or if the step does not run in float64."""
    unplanned_error: float | None
    why_no_reference: str = ""
    """Why the step does not run in float64: the error."""

    @property
    def equal(self) -> bool | None:
        """Whether loss, gradients and state are equal bit by bit; None if nothing could be compared."""
        found = [self.same.loss.equal, self.same.gradients.equal, self.same.state.equal]
        known = [equal for equal in found if equal is not None]
        return all(known) if known else None

    @property
    def hold(self) -> bool | None:
        """Whether results are as they should be; None if nothing says so."""
        if self.equal or self.planned_error is None or self.unplanned_error is None:
            return True if self.equal else None
        return self.planned_error <= max(2 * self.unplanned_error, CLOSE)


@dataclass(frozen=True)
class CompiledVerification(ShownInNotebooks):
    """Predicted against measured. `baseline` and what follows it are there if there is a plan."""

    target: str
    device: Device
    trace: Trace
    backend: str
    predicted_peak_bytes: int
    predicted_seconds: float
    measured: Measurement
    plan: CompiledPlan | None = None
    baseline: Measurement | None = None
    fraction: float | None = None
    """The `activation_memory_budget` that was predicted to come nearest to the plan's peak."""
    with_fraction: Measurement | None = None
    results: CompiledResults | None = None
    warnings: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def error(self) -> float:
        """Relative error of the predicted peak."""
        return (self.predicted_peak_bytes - self.measured.peak_bytes) / max(self.measured.peak_bytes, 1)


@dataclass(frozen=True)
class CompiledRuns:
    """Runs a compiled step for real."""

    build: Build
    kind: str
    backend: str
    timed: int
    meter: LoadMeter | None = None

    def measured(self, plan: CompiledPlan | None = None, fraction: float | None = None) -> Measurement:
        """Measure the step with a plan, with torch's budget, or as it is."""
        what = (
            "with the plan" if plan else f"with torch's budget {fraction}" if fraction else "without a plan"
        )
        budget = 1.0 if fraction is None else fraction
        patched = functorch_config.patch(activation_memory_budget=budget)
        part = as_part_of(f"the compiled step {what}")
        with errors_of_real_runs(), part, patched, _anew(), self._built(plan) as build:
            return measure_step(build, self.kind, timed=self.timed, meter=self.meter)

    def results(self, plan: CompiledPlan) -> CompiledResults:
        """Compare what the step computes with and without the plan."""
        doing("comparing the results of both")
        with errors_of_real_runs(), _anew(), self._built(None) as without, self._built(plan) as with_plan:
            same = compare_builds(without, with_plan, 1, eager=False)
            found = same.loss.equal, same.gradients.equal, same.state.equal
            if False not in found:
                return CompiledResults(same, None, None)
            reference = self._in_float64()
            if isinstance(reference, str):
                return CompiledResults(same, None, None, reference)
            return CompiledResults(
                same,
                _apart(_gradients(with_plan, eager=False), reference),
                _apart(_gradients(without, eager=False), reference),
            )

    @contextlib.contextmanager
    def _built(self, plan: CompiledPlan | None) -> Iterator[Build]:
        """Return what builds the compiled step; its models run the plan while the block lasts."""
        models: list[nn.Module] = []

        def build() -> Step:
            step = self.build()
            if plan is not None:
                apply_compiled_plan(step.model, plan)
                models.append(step.model)
            if not any(is_compiled(part) for part in step.model.modules()):
                step.model._compiled_call_impl = compiled_call(step.model, self.backend)
            return step

        try:
            yield build
        finally:
            for model in models:
                remove_compiled_plan(model)

    def _in_float64(self) -> dict[str, torch.Tensor] | str:
        """Return the gradients of a run in float64 without a compiler; the error if it does not run so."""

        def build() -> Step:
            step = self.build()
            step.model.double()
            return step

        try:
            with warnings.catch_warnings(action="ignore"):
                return _gradients(build, eager=True)
        except Exception as error:
            # The step's own code, for which float64 was never meant: its data may be float32, say.
            return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


@contextlib.contextmanager
def _anew() -> Iterator[None]:
    """Compile everything again, before and after."""
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()


def _gradients(build: Build, *, eager: bool) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    stance = torch.compiler.set_stance("force_eager") if eager else contextlib.nullcontext()
    with stance, seeded():
        step = build()
        for name, parameter in step.model.named_parameters():
            if parameter.requires_grad:

                def keep(tensor: torch.Tensor, name: str = name) -> None:
                    assert tensor.grad is not None, "it was just accumulated"
                    found[name] = tensor.grad.detach().double().clone()

                parameter.register_post_accumulate_grad_hook(keep)
        step.run()
    return found


def _apart(found: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """Return the largest difference, as a share of the largest gradient."""
    largest = max((float(tensor.abs().max()) for tensor in reference.values()), default=0.0)
    differences = (float((found[n] - reference[n]).abs().max()) for n in reference if n in found)
    return max(differences, default=0.0) / (largest or 1.0)
