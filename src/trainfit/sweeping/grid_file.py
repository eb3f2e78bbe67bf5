"""A grid as a TOML file says it: each key has one value, or a list of values, which is an axis of the grid.

Every value is checked here, before anything is captured: a mistake in a file of a thousand rows is one
message that names the key, not a thousand rows that fail.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainfit.allocator.named_options import named_options
from trainfit.basics.sealed_files import reason_of
from trainfit.basics.units import parse_size
from trainfit.devices.cluster_text import parse_mesh, parse_network, parse_rank
from trainfit.devices.device_table import find_device
from trainfit.errors import OptionError, TrainfitError
from trainfit.models.recipe import StepOptions

NONE = "none"
DEVICE = "device"
"""A budget: no plan, and a plan for what the device has."""
MOST_ROWS = 100_000
_EVERY_DEVICE = 1 << 60
"""Bytes; a share of it is a share of any device."""


@dataclass(frozen=True)
class Grid:
    """The values of each axis. The order of the keys is that of the table's columns and of its rows."""

    axes: dict[str, tuple[Any, ...]]
    settings: dict[str, tuple[Any, ...]]
    """The axes of `[set]`: parameters of a function, settings of a model."""

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return math.prod(len(values) for values in (*self.axes.values(), *self.settings.values()))


def read_grid(path: str | Path) -> Grid:
    """Read a grid from a file."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise OptionError(f"the grid {str(path)!r:.200} cannot be read: it is not text.") from None
    except (OSError, ValueError) as error:
        raise OptionError(f"the grid {str(path)!r:.200} cannot be read: {reason_of(error)}.") from None
    except RuntimeError as error:  # a home folder of nobody
        raise OptionError(f"the grid {str(path)!r:.200} cannot be read: {error}.") from None
    try:
        found = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise OptionError(f"{path!s:.200} is not TOML: {error or 'nested too deeply'}.") from None
    return check_grid(found, str(path))


_OTHER_NAMES = {"model": "target", "models": "target", "gpu": "device", "gpus": "device"}
"""What people call some of the keys."""


def check_grid(given: Mapping[str, Any], place: str = "the grid") -> Grid:
    """Check a grid; `place` begins the message that says what is wrong with it."""
    for name in given:
        if name not in _CHECKS and name != "set":
            meant = _OTHER_NAMES.get(str(name).lower(), str(name))
            close = difflib.get_close_matches(meant, [*_CHECKS, "set"], n=1)
            hint = f"Did you mean {close[0]}?" if close else f"The keys are {', '.join([*_CHECKS, 'set'])}."
            raise OptionError(f"{place:.200}: there is no key {name!r:.60}. {hint}")
    missing = next((name for name in ("target", "device") if name not in given), None)
    if missing is not None:
        example = (
            "target = ['gpt2', 'train.py:build']" if missing == "target" else "device = ['h100', 'l40s']"
        )
        raise OptionError(f"{place:.200} has no {missing}; add one, or several: {example}.")
    axes = {name: _axis(name, given[name], place) for name in _CHECKS if name in given}
    settings = given.get("set", {})
    if not isinstance(settings, Mapping):
        raise OptionError(f"{place:.200}: set is a table, as in [set] with layers = [2, 4] below it.")
    grid = Grid(axes, {name: _values(f"set.{name}", one, place) for name, one in settings.items()})
    for name, values in grid.settings.items():
        for value in values:
            _check_setting(value, f"{place:.200}: set.{name:.60}")
    if grid.rows > MOST_ROWS:
        sizes = " × ".join(f"{len(one)} {name}" for name, one in grid.axes.items() if len(one) > 1)
        raise OptionError(
            f"{place:.200} has {grid.rows:,} rows, more than {MOST_ROWS:,}: {sizes[:300]}. Divide it."
        )
    return grid


def _values(name: str, given: Any, place: str) -> tuple[Any, ...]:
    """Return the values of an axis: one, or those of a list, each once."""
    values = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not values:
        raise OptionError(f"{place:.200}: {name} is an empty list, so that the grid has no rows.")
    for number, value in enumerate(values):
        if any(value == other and type(value) is type(other) for other in values[:number]):
            raise OptionError(f"{place:.200}: {name} has {value!r:.60} twice.")
    return values


def _axis(name: str, given: Any, place: str) -> tuple[Any, ...]:
    values = _values(name, given, place)
    for value in values:
        try:
            _CHECKS[name](value)
        except TrainfitError as error:
            raise OptionError(f"{place:.200}: {name}: {error}") from None
    return values


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise OptionError(f"expected text, got {value!r:.80}.")
    return value


def _option(name: str) -> Callable[[Any], object]:
    def check(value: Any) -> object:
        if value == NONE and name != "optimizer":
            return None
        return StepOptions(**{name: value})

    return check


def _budget(value: Any) -> object:
    if isinstance(value, str):
        return value in (NONE, DEVICE) or parse_size(value, _EVERY_DEVICE)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(
            f"expected a size such as '24GiB' or '80%', 'device' for what the device has, or 'none' for no "
            f"plan, got {value!r:.80}."
        )
    return value


def _mesh(value: Any) -> object:
    return _text(value) == NONE or parse_mesh(value)


def _rank(value: Any) -> object:
    return parse_rank(str(value) if type(value) is int else _text(value))


def _whole(value: Any) -> object:
    if type(value) is not int or value < 1:
        raise OptionError(f"expected a whole number from 1 on, got {value!r:.80}.")
    return value


def _seconds(value: Any) -> object:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1e6:
        raise OptionError(f"expected seconds above zero, got {value!r:.80}.")
    return value


def _check_setting(value: Any, place: str) -> None:
    """Refuse what is no value of a parameter: a table, a date, a number that is none."""
    if isinstance(value, list):
        for item in value:
            _check_setting(item, place)
    elif not isinstance(value, str | int | float) or (isinstance(value, float) and not math.isfinite(value)):
        raise OptionError(f"{place}: expected a number, a text, true or false, got {value!r:.80}.")


_CHECKS: dict[str, Callable[[Any], object]] = {
    "target": _text,
    "task": _text,
    **{name: _option(name) for name in ("batch", "seq", "image_size", "dtype", "optimizer")},
    "steps": _whole,
    "mesh": _mesh,
    "world_size": _whole,
    "rank": _rank,
    "gpus_per_node": _whole,
    "network": lambda value: parse_network(_text(value)),
    "device": lambda value: find_device(_text(value)),
    "allocator": lambda value: named_options(_text(value)),
    "budget": _budget,
    "plan_seconds": _seconds,
}
"""The keys, and what refuses a wrong value. What does not change the capture comes last, so that rows which
share one follow each other."""
KEYS = tuple(_CHECKS)
