"""The fields of a device in a JSON file: each is checked, and an error says which is wrong and why."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

from trainfit.errors import DeviceError, OptionError
from trainfit.units import parse_size

Kind = Literal["cuda", "cpu"]

DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8")

_LARGEST_SHARE = 1.5


def checked_fields(entry: Any, place: str, allowed: Sequence[str]) -> dict[str, Any]:
    """Return the values of a device's fields out of a JSON object, or say which field is wrong."""
    if not isinstance(entry, dict):
        raise DeviceError(f"{place}: a device is a JSON object, got {type(entry).__name__}.")
    for key in entry:
        if key not in allowed:
            close = difflib.get_close_matches(key, allowed, n=1)
            meant = f" Did you mean {close[0]!r}?" if close else f" The fields are {', '.join(allowed)}."
            raise DeviceError(f"{place}: a device has no field {key!r}.{meant}")
    for required in ("name", "memory_bytes"):
        if required not in entry:
            raise DeviceError(f"{place}: the field {required!r} is missing.")
    values = {"kind": "cuda", "source": place, **entry}
    return {key: _CHECKS[key](value, f"{place}: {key!r}") for key, value in values.items()}


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or (what.endswith("'name'") and not value.strip()):
        raise DeviceError(f"{what} must be a text, got {value!r:.80}.")
    return value


def _kind(value: Any, what: str) -> str:
    if value not in get_args(Kind):
        raise DeviceError(f"{what} must be one of {', '.join(get_args(Kind))}, got {value!r:.80}.")
    return str(value)


def _size(value: Any, what: str) -> int:
    if isinstance(value, str):
        try:
            return parse_size(value)
        except OptionError as error:
            raise DeviceError(f"{what}: {error}") from None
    return _whole(value, what)


def _whole(value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**63:
        raise DeviceError(f"{what} must be a whole number above zero, got {value!r:.80}.")
    return value


def _rate(value: Any, what: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # NaN fails both comparisons; no device does 10^30 of anything in a second.
    if not is_number or not 0 < value < 1e30:
        raise DeviceError(f"{what} must be a number above zero, got {value!r:.80}.")
    return float(value)


def _share(value: Any, what: str) -> float:
    if _rate(value, what) > _LARGEST_SHARE:
        raise DeviceError(f"{what} is a share of the peak, at most {_LARGEST_SHARE}, got {value!r:.80}.")
    return float(value)


def _flag(value: Any, what: str) -> bool:
    if not isinstance(value, bool):
        raise DeviceError(f"{what} must be true or false, got {value!r:.80}.")
    return value


def _flops(value: Any, what: str) -> dict[str, float]:
    if not isinstance(value, dict):
        raise DeviceError(f"{what} must be an object of dtype: FLOP/s, got {value!r:.80}.")
    for dtype in value:
        if dtype not in DTYPES:
            raise DeviceError(f"{what}: {dtype!r} is no dtype; they are {', '.join(DTYPES)}.")
    return {dtype: _rate(rate, f"{what}: {dtype!r}") for dtype, rate in value.items()}


def _aliases(value: Any, what: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(alias, str) for alias in value):
        raise DeviceError(f"{what} must be a list of texts, got {value!r:.80}.")
    return tuple(value)


def _or_unknown(check: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    return lambda value, what: None if value is None else check(value, what)


_CHECKS: dict[str, Callable[[Any, str], Any]] = {
    "name": _text,
    "kind": _kind,
    "memory_bytes": _size,
    "bandwidth_bytes_per_second": _or_unknown(_rate),
    "flops": _flops,
    "matmul_share": _or_unknown(_share),
    "cache_bytes": _or_unknown(_size),
    "calibrated": _flag,
    "sm_count": _or_unknown(_whole),
    "architecture": _text,
    "nvlink_bytes_per_second": _or_unknown(_rate),
    "pcie_bytes_per_second": _or_unknown(_rate),
    "source": _text,
    "aliases": _aliases,
}
