"""`Settings`: which step was captured, in the words that people use. Plain data, kept in traces and plans.

What a target chose by itself (a preset's own sequence length, its dtype) is among them: people do not know it
unless they are told. What can be read off the step itself (parameters, optimizer, autocast) is read there, so
that a function of the user's own says as much as a built-in model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from trainfit.basics.decoding import Malformed, parse_json
from trainfit.basics.units import format_count

Named = tuple[tuple[str, str], ...]
"""Names with values as JSON text."""

_SHORT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
_MOST_SHOWN = 8
_LONGEST_SHOWN = 40


@dataclass(frozen=True)
class Settings:
    """The settings of one step. None is what the step does not say."""

    batch: int | None = None
    """Samples per step."""
    seq: int | None = None
    """Tokens per sample."""
    image_size: int | None = None
    dtype: str | None = None
    """As `--dtype` writes it: `fp32`, `bf16`, `bf16-autocast`; several dtypes of parameters with a `+`."""
    optimizer: str | None = None
    """As `--optimizer` writes it for built-in and `hf:` models, else the class; `none` if there is none."""
    optimizer_class: str | None = None
    optimizer_kernels: str | None = None
    """How it goes over the parameters: `fused`, `foreach` or `for-loop`."""
    task: str | None = None
    parameters: int = 0
    """How many numbers the model trains or keeps frozen; shared ones count once."""
    trainable_parameters: int = 0
    modules: int = 0
    """How many modules the model has, itself included."""
    model_class: str = ""
    model: Named = ()
    """Settings of a preset or of a config."""
    arguments: Named = ()
    """What a function of the user's own was called with, and the defaults that it took."""


UNKNOWN_SETTINGS = Settings()
"""Of a step of which nothing is known."""


def is_sound(settings: Settings) -> bool:
    """Whether settings that were read from a file can be theirs: counts from zero on, values as JSON text."""
    counts = (settings.parameters, settings.trainable_parameters, settings.modules)
    sizes = (settings.batch, settings.seq, settings.image_size)
    if min(counts) < 0 or any(size is not None and size < 1 for size in sizes):
        return False
    try:
        for _, text in (*settings.model, *settings.arguments):
            parse_json(text)
    except Malformed:
        return False
    return True


def named(values: Mapping[str, Any]) -> Named:
    """Write values as data; what JSON does not have is written as Python shows it, not without end."""
    return tuple((str(name), _as_json(value)) for name, value in values.items())


def _as_json(value: Any) -> str:
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        shown = repr(value)[:200]
        # An address would be another one each time.
        text = json.dumps(type(value).__name__ if " at 0x" in shown else shown)
    return text if len(text) <= 1000 else json.dumps(text[:200])


def settings_json(settings: Settings) -> dict[str, Any]:
    """Return the settings as a JSON object."""
    found = {field.name: getattr(settings, field.name) for field in fields(settings)}
    for name in ("model", "arguments"):
        found[name] = {key: json.loads(text) for key, text in found[name]}
    return found


def describe(settings: Settings) -> str:
    """Say in one line what the step is."""
    return ", ".join(part for part in _parts(settings) if part)


def _parts(settings: Settings) -> Iterator[str]:
    for name, label in (("batch", "batch"), ("seq", "sequence"), ("image_size", "image size")):
        value = getattr(settings, name)
        yield f"{label} {value}" if value is not None else ""
    yield dtype_words(settings.dtype)
    yield optimizer_words(settings)
    if settings.parameters:
        yield f"{_count(settings.parameters)} parameters"
        if settings.trainable_parameters != settings.parameters:
            yield f"{_count(settings.trainable_parameters)} of them trained"
    yield f"task {settings.task}" if settings.task else ""
    shown = [
        f"{name}={text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + '...'}"
        for name, text in (*settings.model, *settings.arguments)
        if name not in ("batch", "seq", "image_size", "device")
    ]
    yield from shown[:_MOST_SHOWN]
    if len(shown) > _MOST_SHOWN:
        yield f"{len(shown) - _MOST_SHOWN} more"


def dtype_words(dtype: str | None) -> str:
    """Say what parameters are stored in, and what is computed in where that is something else."""
    if dtype is None:
        return ""
    stored, _, autocast = dtype.rpartition("/")
    if dtype.endswith("-autocast"):
        stored, autocast = stored or "fp32", autocast.removesuffix("-autocast")
        return f"{stored} parameters with {autocast} autocast"
    return f"{dtype} parameters"


def optimizer_words(settings: Settings) -> str:
    """Name the optimizer, with how it goes over the parameters."""
    if settings.optimizer == "none":
        return "no optimizer"
    name = settings.optimizer_class or settings.optimizer or ""
    return f"{name} ({settings.optimizer_kernels})" if name and settings.optimizer_kernels else name


def dtype_name(stored: list[str], autocast: list[str]) -> str | None:
    """Name the dtypes of a step as `--dtype` does: of its parameters, largest part first, and of autocast.

    Autocast over float32 parameters is the usual case and has the short name; over others, both are named.
    """
    if not stored:
        return None
    parameters = "+".join(_SHORT_DTYPES.get(name, name) for name in stored)
    if not autocast:
        return parameters
    lower = "+".join(sorted(_SHORT_DTYPES.get(name, name) for name in autocast))
    return f"{lower}-autocast" if parameters == "fp32" else f"{parameters}/{lower}-autocast"


def is_cast_to(dtype: str | None, name: str) -> bool:
    """Whether autocast is on in a step with these dtypes, for a dtype that is named as torch does."""
    autocast = (dtype or "").rpartition("/")[2]
    lower = autocast.removesuffix("-autocast")
    return lower != autocast and _SHORT_DTYPES.get(name, name) in lower.split("+")


def _count(number: int) -> str:
    """Write a count of parameters as people do: 124.4 M."""
    for factor, unit in ((10**9, "B"), (10**6, "M")):
        if number >= factor:
            return f"{number / factor:.1f} {unit}"
    return format_count(number)


@dataclass(frozen=True)
class Difference:
    """One thing in which a step is not the one that a plan was made for."""

    name: str
    planned: int | str | None
    here: int | str | None


def differences(planned: Settings, here: Settings) -> tuple[Difference, ...]:
    """Return in what two steps differ that decides about their memory, the most telling first."""
    pairs = [Difference(name, getattr(planned, name), getattr(here, name)) for name in _COMPARED]
    pairs.append(Difference("optimizer", optimizer_words(planned), optimizer_words(here)))
    ours = dict((*here.model, *here.arguments))
    for name, text in (*planned.model, *planned.arguments):
        if name not in _SAID_ELSEWHERE:
            pairs.append(Difference(name, text, ours.get(name, text)))
    return tuple(pair for pair in pairs if pair.planned != pair.here)


_COMPARED = (
    *("model_class", "parameters", "trainable_parameters", "modules"),
    *("batch", "seq", "image_size", "dtype"),
)
_SAID_ELSEWHERE = ("batch", "seq", "image_size", "dtype", "optimizer", "device")
