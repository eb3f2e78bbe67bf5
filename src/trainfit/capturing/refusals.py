"""Steps that cannot be captured, or about which there is nothing to say: one clear error for each."""

from __future__ import annotations

from typing import Any

from trainfit.capturing.left_as_found import FoundState
from trainfit.capturing.steps import Runs
from trainfit.errors import StepError
from trainfit.steps.step import Step
from trainfit.traces.trace import Trace
from trainfit.traces.trace_check import LARGEST_TOTAL_BYTES, largest_total_bytes


def refuse_unusable(step: Any, found: FoundState) -> None:
    """Refuse what cannot be captured, before it runs."""
    if not isinstance(step, Step):
        raise StepError(f"the function must return a trainfit.Step, but it returned a {type(step).__name__}.")
    parameters = list(step.model.parameters())
    if any(map(found.has, parameters)):
        raise StepError(
            "the model was made before the capture, so its tensors are real and the step would train them; "
            "make the model inside the function that builds the step."
        )
    if not parameters:
        raise StepError(
            f"the model ({type(step.model).__name__}) has no parameters: there is nothing to train."
        )
    if any(parameter.is_meta for parameter in parameters):
        raise StepError(
            "the model is on the meta device; build it on an ordinary one: capture allocates nothing anyway."
        )
    if not any(parameter.requires_grad for parameter in parameters):
        raise StepError("no parameter of the model requires a gradient: there is nothing to train.")


def refuse_uncountable(trace: Trace) -> None:
    """Refuse sizes that no machine has and 64 bits cannot count."""
    total = largest_total_bytes(trace)
    if total > LARGEST_TOTAL_BYTES:
        largest = max(storage.bytes for storage in trace.storages)
        raise StepError(
            f"the tensors of the step have {total:.3g} bytes in all, the largest {largest:.3g}: more than "
            "can be counted. Is one of its sizes a mistake?"
        )


def refuse_nothing_counted(trace: Trace) -> None:
    """Refuse a step that needs no memory: it does not run on the device that it was captured for."""
    if trace.observed_peak_bytes:
        return
    if trace.device == "cuda":
        raise StepError(
            "nothing of the step is on the GPU: it puts its model and its inputs on the CPU itself. Give the "
            "function that builds the step a parameter named device, which gets 'cuda', or leave the device "
            "out of it."
        )
    raise StepError("the step allocates nothing on the CPU, so there is no memory to predict.")


def refuse_without_counted_backward(runs: Runs) -> None:
    """Refuse a step that trains in its first run alone."""
    if not runs.backward_counted:
        raise StepError(
            "run() trains when it is called first, and no more: later calls run no backward. If its data has "
            "ended, let it begin again, as itertools.cycle does, or take more of it; if it trains only now "
            "and then, --steps says how many runs to look at."
        )


def refuse_without_backward(runs: Runs) -> None:
    """Refuse a step that does not train."""
    if not runs.backward_seen:
        raise StepError(
            "the step runs no backward: run() must call loss.backward() (or torch.autograd.grad)."
        )
