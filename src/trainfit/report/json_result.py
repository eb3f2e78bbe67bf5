"""Results as one JSON object with stable keys. Bytes are integers; times are seconds; unknown is null."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainfit.basics.sealed_files import reason_of, write_whole
from trainfit.errors import OptionError
from trainfit.report.data import Compared, Subject
from trainfit.report.sizes_data import SeveralSteps

if TYPE_CHECKING:
    from trainfit.costs.summary import StepTime

SCHEMA = 1
STANDARD_OUTPUT = "-"
_FOR_PEOPLE = {
    *("description", "captured_for", "shares", "rows", "memory", "added", "groups", "ways", "best"),
    *("relative_gradient_difference", "quality", "saved_bytes", "saved_share"),
}
"""Fields that only people are shown."""
_TIMES = (
    *("step_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds"),
    *("lower_seconds", "upper_seconds", "recompute_seconds", "busy_seconds", "waiting_share"),
    *("communication_seconds", "exposed_communication_seconds", "bubble_seconds", "bubble_share"),
    "uncalibrated_share",
    *("launch_bound", "flops", "model_flops", "flops_per_second", "model_flops_utilisation"),
    *("samples_per_second", "tokens_per_second", "copies", "tokens_per_second_per_device"),
    *("total_tokens_per_second", "total_samples_per_second"),
)


def result_json(data: Any) -> dict[str, Any]:
    """Return what a reader sees of a result (`data.py`) as a JSON object."""
    return {"schema": SCHEMA, **_object(data)}


def whole_json(data: Any) -> dict[str, Any] | list[dict[str, Any]]:
    """Return a result as a JSON object, and several as an array of them."""
    if isinstance(data, SeveralSteps):
        return [result_json(one) for one in data.results]
    return result_json(data)


def _object(data: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in (field.name for field in dataclasses.fields(data) if field.name not in _FOR_PEOPLE):
        value = getattr(data, name)
        if isinstance(value, Subject):
            found |= _object(value)
        elif isinstance(value, Compared):
            found |= {f"predicted_{name}": value.predicted, f"measured_{name}": value.measured}
        elif name == "time":
            found |= _time(value)
        else:
            found[name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return _object(value)
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _time(time: StepTime | None) -> dict[str, Any]:
    """Return the predicted times, with the same keys whether they are known or not."""
    return {
        **{name: None if time is None else getattr(time, name) for name in _TIMES},
        "operators": _plain(time.operators) if time else [],
        "communication_units": _plain(time.units) if time else [],
        "cost_sources": time.sources if time else {},
        "uncalibrated": time.uncalibrated if time else {},
        "unpriced": [operator.name for operator in time.unpriced] if time else [],
    }


def check_destination(path: str, flag: str) -> None:
    """Refuse a file that cannot be written before the work begins, not after it."""
    if path == STANDARD_OUTPUT:
        return
    file = Path(path)
    if not path or os.path.isdir(file):
        raise OptionError(f"{flag} needs the name of a file, got {path!r}.")
    if not os.path.isdir(file.parent):
        raise OptionError(f"{flag} {path}: there is no folder {str(file.parent)!r}.")
    try:
        os.stat(file)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:  # a name that no file can have
        raise OptionError(f"{flag} {path}: {reason_of(error)}.") from None
    # A file is replaced as a whole, for which its folder counts; a device or a pipe is written to.
    written_to = file.parent if file.is_file() or not file.exists() else file
    if not os.access(written_to, os.W_OK):
        raise OptionError(f"{flag} {path}: {str(written_to)!r} cannot be written to.")


def write_json(result: dict[str, Any] | list[dict[str, Any]], path: str) -> None:
    """Write one object or array, whole or not at all; `-` is standard output."""
    text = json.dumps(result, indent=2, allow_nan=False) + "\n"
    if path == STANDARD_OUTPUT:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        write_whole(Path(path), text.encode())
