"""What a function of the user's own is called with: options of that name, the device, `--set` values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from trainfit.errors import OptionError, SizeNotTaken, TargetError
from trainfit.models.recipe import FLAGS, StepOptions, flag_of
from trainfit.targets.given_values import converted, refuse_unknown
from trainfit.traces.ranks import Cluster
from trainfit.traces.settings import Settings, named

_SIZES = ("batch", "seq", "image_size")
_PLAIN = (bool, int, float, str, type(None))

Parameters = Mapping[str, inspect.Parameter]


def arguments_of(function: Callable[..., Any], label: str, options: StepOptions) -> dict[str, Any]:
    """Choose the keyword arguments: every option the user gave, and the device if there is a parameter.

    The mesh is still its names and sizes: torch can make it only when the function is called.
    """
    parameters = _parameters(function)
    by_keyword = [
        name
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    arguments: dict[str, Any] = options.given()
    for name in arguments:
        if name not in by_keyword and not takes_any:
            raise SizeNotTaken(
                f"{flag_of(name)} cannot be passed on: {label} has no parameter named {name}. "
                f"Add one, or leave {flag_of(name)} out.",
                label,
            )
    if not takes_any:
        refuse_unknown(options.set, [name for name in by_keyword if name != "device"], label)
    for name, value in options.set.items():
        if name in arguments:
            raise OptionError(f"{flag_of(name)} and --set {name} are the same; give one of them.")
        if name == "device":
            raise OptionError("--set device: what the step is predicted for is said by --device.")
        arguments[name] = converted(name, value, _kind(parameters.get(name)))
    if "device" in by_keyword:
        arguments["device"] = options.device
    if options.cluster is not None and options.cluster.mesh:
        _refuse_mesh(arguments, "mesh" in by_keyword or takes_any, label, options.cluster)
        arguments["mesh"] = options.cluster.mesh
    _refuse_missing(parameters, arguments, label)
    return arguments


def _refuse_mesh(arguments: Mapping[str, Any], takes_mesh: bool, label: str, cluster: Cluster) -> None:
    if "mesh" in arguments:
        raise OptionError("--mesh and --set mesh are the same; give one of them.")
    if not takes_mesh:
        raise OptionError(
            f"--mesh cannot be passed on: {label} has no parameter named mesh. Add one, which gets the "
            f"DeviceMesh, or write --world-size {cluster.world_size} instead, if it makes its own mesh."
        )


def settings_of(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Settings:
    """Return what the arguments say about the step, defaults that the function takes included."""
    taken = {
        name: parameter.default
        for name, parameter in _parameters(function).items()
        if name not in arguments and _is_plain(parameter.default)
    }
    said_elsewhere = ("device", "mesh")
    values = {
        name: value for name, value in (*taken.items(), *arguments.items()) if name not in said_elsewhere
    }
    sizes = {
        name: values[name] for name in _SIZES if type(values.get(name)) is int and values.get(name, 0) > 0
    }
    return Settings(**sizes, arguments=named(values))


def _parameters(function: Callable[..., Any]) -> Parameters:
    for as_types in (True, False):
        try:
            return inspect.signature(function, eval_str=as_types).parameters
        except Exception:  # annotations that only a type checker can read; functions written in C
            continue
    return inspect.signature(lambda: None).parameters


def _kind(parameter: inspect.Parameter | None) -> Any:
    """Return the type of a parameter: what it is annotated with, else its default's."""
    if parameter is None:
        return None
    if parameter.annotation is not parameter.empty and not isinstance(parameter.annotation, str):
        return parameter.annotation
    has_type = parameter.default is not parameter.empty and parameter.default is not None
    return type(parameter.default) if has_type else None


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return type(value) in _PLAIN


def _refuse_missing(parameters: Parameters, arguments: Mapping[str, Any], label: str) -> None:
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and name not in arguments
    ]
    if not missing:
        return
    positional = [name for name in missing if parameters[name].kind is inspect.Parameter.POSITIONAL_ONLY]
    if positional:
        raise TargetError(
            f"{label} needs {', '.join(positional)}, but parameters before a / cannot be passed by name; "
            "give a default, or move them behind it."
        )
    flags = [flag_of(name) if name in (*FLAGS, "mesh") else f"--set {name}=VALUE" for name in missing]
    flags = ["--mesh dp=8,tp=4" if flag == "--mesh" else flag for flag in flags]
    raise TargetError(f"{label} needs {', '.join(missing)}; pass {' '.join(flags)}, or give a default.")
