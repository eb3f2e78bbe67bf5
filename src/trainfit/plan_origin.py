"""What a plan was made for, compared with what it is used for: its promise is about the former."""

from __future__ import annotations

from trainfit.plans import Plan
from trainfit.settings import Difference, differences
from trainfit.store import operators_hash
from trainfit.trace import Trace
from trainfit.units import format_count

_WORDS = {"model_class": "model", "seq": "sequence", "image_size": "image size"}
_COUNTS = ("parameters", "trainable_parameters", "modules")


def plan_differences(plan: Plan, trace: Trace, device: str) -> tuple[Difference, ...]:
    """Return in what a step is not the one that a plan was made for; empty if its promise is about this."""
    found = differences(plan.settings, trace.settings)
    here = operators_hash(trace)
    if not found and plan.device == device and plan.trace_hash != here:
        found = (Difference("operators", plan.trace_hash[:12], here[:12]),)
    if plan.device != device:
        found = (*found, Difference("device", plan.device, device))
    return found


def other_step(found: tuple[Difference, ...]) -> str:
    """Say what a plan was made for where that is something else, and what that means for its figures."""
    if not found:
        return ""
    if [difference.name for difference in found] == ["operators"]:
        return (
            "The plan was made for a step with the same settings that runs other operators: the code has "
            "changed since, or chooses by chance. Its promised peak and time are of that step; plan again."
        )
    planned = ", ".join(_words(d.name, d.planned) for d in found)
    here = ", ".join(_words(d.name, d.here) for d in found)
    meaning = "The promised peak and time are for that; the comparison of results is of this step."
    return f"The plan was made for {planned}; this is {here}. {meaning}"


def other_model(plan: Plan, parameters: int, modules: int) -> str:
    """Say that a model is not of the size that a plan was made for; empty if it is, or if nobody knows."""
    settings = plan.settings
    if not settings.parameters or (parameters, modules) == (settings.parameters, settings.modules):
        return ""
    return (
        f"the plan was made for a {settings.model_class} with {format_count(settings.parameters)} parameters "
        f"in {format_count(settings.modules)} modules, and this one has {format_count(parameters)} in "
        f"{format_count(modules)}. Results stay the same, but only what the plan names is computed again, "
        "and the peak and time that it promises do not hold: plan again for this model."
    )


def _words(name: str, value: int | str | None) -> str:
    label = _WORDS.get(name, name.replace("_", " "))
    if value is None:
        return f"no {label}"
    if name in _COUNTS:
        return f"{format_count(int(value))} {label}"
    if name == "device":
        return f"on {value}"
    return str(value) if name == "optimizer" else f"{label} {value}"
