"""What a plan was made for, compared with what it is used for: its promise is about the former."""

from __future__ import annotations

from trainfit.basics.units import format_bytes, format_count
from trainfit.devices.device_table import known_devices
from trainfit.plans.plan import ModulePart, Plan
from trainfit.traces.ranks import Cluster
from trainfit.traces.settings import Difference, Settings, differences
from trainfit.traces.trace import Trace
from trainfit.traces.trace_store import operators_hash

_WORDS = {"model_class": "model", "seq": "sequence", "image_size": "image size"}
_ANOTHER_SHARDING = (
    "Results stay the same, but the peak and time that the plan promises do not hold: plan again with "
    "trainfit plan --world-size or --mesh, as the model is divided now."
)
_COUNTS = ("parameters", "trainable_parameters", "modules")


def plan_differences(plan: Plan, trace: Trace, device: str) -> tuple[Difference, ...]:
    """Return in what a step is not the one that a plan was made for; empty if its promise is about this."""
    found = _other_clusters(plan.cluster, trace.cluster) + differences(plan.settings, trace.settings)
    here = operators_hash(trace)
    if not found and plan.device == device and plan.trace_hash != here:
        found = (Difference("operators", plan.trace_hash[:12], here[:12]),)
    if plan.device != device:
        found = (*found, Difference("device", plan.device, device))
    return found


def _other_clusters(planned: Cluster | None, here: Cluster | None) -> tuple[Difference, ...]:
    """Return in what the processes differ; which of them it is makes no difference."""
    one, other = planned or Cluster(), here or Cluster()
    found = [
        Difference("world_size", one.world_size, other.world_size),
        Difference("mesh", _mesh(one), _mesh(other)),
    ]
    return tuple(pair for pair in found if pair.planned != pair.here)


def _mesh(cluster: Cluster) -> str | None:
    return ",".join(f"{name}={size}" for name, size in cluster.mesh) or None


def other_step(found: tuple[Difference, ...], *, replayed: bool = False) -> str:
    """Say what a plan was made for where that is something else, and what that means for its figures.

    `replayed`: what is predicted is not what the plan promises, but its decisions on this step.
    """
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
    if replayed:
        meaning = "Its promised peak and time are for that; what is predicted here is for this step."
    return f"The plan was made for {planned}; this is {here}. {meaning}"


def other_model(plan: Plan, here: Settings) -> str:
    """Say that a model is not the one that a plan was made for; empty if it is, or if nobody knows."""
    there = plan.settings
    planned, found = [], []
    if there.parameters and (there.parameters, there.modules) != (here.parameters, here.modules):
        planned.append(_size(there))
        found.append(_size(here))
    stored = _stored(there.dtype)
    if stored and here.dtype and set(stored.split("+")) != set(here.dtype.split("+")):
        planned.append(f"parameters in {stored}")
        found.append(f"parameters in {here.dtype}")
    if not there.model_class or (not planned and there.model_class == here.model_class):
        return ""
    return (
        f"the plan was made for {_model(there, planned)}, and this is {_model(here, found)}. Results stay "
        "the same, but only what the plan names is recomputed, and the peak and time that it promises do "
        "not hold: plan again for this model."
    )


def _model(settings: Settings, what: list[str]) -> str:
    with_what = f" with {' and '.join(what)}" if what else ""
    article = "an" if settings.model_class[:1] in "AEIOU" else "a"
    return f"{article} {settings.model_class}{with_what}"


def _size(settings: Settings) -> str:
    return f"{format_count(settings.parameters)} parameters in {format_count(settings.modules)} modules"


def _stored(dtype: str | None) -> str:
    """Return what parameters are stored in, without what autocast computes in."""
    stored, _, computed = (dtype or "").rpartition("/")
    return (stored or "fp32") if computed.endswith("-autocast") else dtype or ""


def other_world(planned: Cluster | None, processes: int) -> str:
    """Say that a model runs among another number of processes than its plan was made for; empty if not."""
    if planned is None or planned.world_size == processes:
        return ""
    here = f"one of {processes} processes" if processes > 1 else "one process alone"
    return f"the plan was made for {planned.words}, and this is {here}. {_ANOTHER_SHARDING}"


def other_part(planned: Cluster, part: ModulePart, here_bytes: int) -> str:
    """Say that a rank has another part of a module than the one that its plan was made for."""
    return (
        f"the plan was made for {planned.words}, which has {format_bytes(part.bytes)} of the parameters of "
        f"{part.module}, and here it has {format_bytes(here_bytes)}. {_ANOTHER_SHARDING}"
    )


def sharded_since() -> str:
    """Say that a model is divided among processes, and its plan was made for one of them alone."""
    return (
        "the plan was made for a step of one process, and this model is divided among several. "
        + _ANOTHER_SHARDING
    )


def device_kind(plan: Plan) -> str | None:
    """Return what torch calls the kind of device that a plan was made for; None if nobody knows it."""
    if plan.device == "cpu":
        return "cpu"
    return next((device.kind for device in known_devices() if device.name == plan.device), None)


def other_device(planned: str, kind: str) -> str:
    """Say that a model runs on another kind of device than its plan was made for."""
    return (
        f"the plan was made for {planned}, and the model runs on {kind}. Results stay the same, but the peak "
        f"and time that the plan promises are of {planned}: plan again for this device."
    )


def other_sizes(name: str, difference: str, batch: int | None) -> str:
    """Say that a region works on larger tensors than its plan was made for."""
    made_for = f"smaller inputs (batch {batch})" if batch else "smaller inputs"
    return (
        f"the plan was made for {made_for} than {name} gets: {difference}. Results stay the same, but the "
        "peak that the plan promises is of the smaller ones: plan again for these."
    )


def _words(name: str, value: int | str | None) -> str:
    label = _WORDS.get(name, name.replace("_", " "))
    if value is None:
        return f"no {label}"
    if name in _COUNTS:
        return f"{format_count(int(value))} {label}"
    if name == "mesh" and value is None:
        return "no mesh"
    if name == "device":
        return f"on {value}"
    return str(value) if name == "optimizer" else f"{label} {value}"
