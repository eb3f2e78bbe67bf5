"""Prices of devices per hour, as the user gives them: `h100=2.99/h`, or a TOML or JSON file.

None is built in. A price is a number without a currency, and so are the costs that come of it.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trainfit.basics.decoding import Malformed, parse_json
from trainfit.basics.sealed_files import reason_of
from trainfit.devices.device_table import Device, find_device
from trainfit.errors import DeviceError, OptionError

Prices = dict[str, float]
"""Per hour and device, by the device's own name."""
_PRICE = re.compile(r"(?P<number>[0-9][0-9_]{0,15}(?:\.[0-9]{1,15})?|\.[0-9]{1,15})\s*(?:/\s*(?:h|hour|hr))?")
_EXAMPLE = 'write it like --price "h100=2.99/h": a device, and what an hour of it costs'
_LARGEST = 1e12


def read_prices(file: str) -> Prices:
    """Return the prices of a file."""
    return named_prices(_content(file), f"--prices {file}")


def assigned_prices(assignments: Iterable[str]) -> Prices:
    """Return the prices of texts such as `h100=2.99/h`, or of several with commas between them."""
    given: dict[str, Any] = {}
    for text in (one for several in assignments for one in _each(several)):
        name, equals, price = (part.strip() for part in text.rpartition("="))
        if not equals or not name:
            file = " A file of prices is given by --prices." if text.endswith((".toml", ".json")) else ""
            raise OptionError(f"--price {text!r:.80} is not a price: {_EXAMPLE}.{file}")
        if name in given:
            raise OptionError(f"--price: there are two prices for {name!r:.80}; give one.")
        given[name] = price
    return named_prices(given, "--price")


def _each(text: str) -> list[str]:
    """Return the prices of one text; a comma that is none between prices belongs to a file's name."""
    parts = text.split(",")
    return parts if all("=" in part for part in parts) else [text]


def named_prices(given: Mapping[str, Any], place: str) -> Prices:
    """Check prices by name; `place` begins the message that says what is wrong with them."""
    found: Prices = {}
    written: dict[str, str] = {}
    for name, price in given.items():
        try:
            device = find_device(name).name
        except DeviceError as error:
            raise OptionError(f"{place}: {error}") from None
        if device in written:
            raise OptionError(
                f"{place}: {written[device]!r:.80} and {name!r:.80} are both {device}; give one price."
            )
        written[device] = name
        found[device] = _per_hour(price, f"{place}: {name:.80}")
    return found


def refuse_unused(prices: Iterable[str], devices: Iterable[Device], place: str) -> None:
    """Refuse the price of a device that is not compared: it was meant for something. A file may have more."""
    compared = [device.name for device in devices]
    unused = next((name for name in prices if name not in compared), None)
    if unused is not None:
        raise OptionError(
            f"{place}: {unused} has a price, but is not among the devices: {', '.join(compared)}."
        )


def _per_hour(price: Any, place: str) -> float:
    if isinstance(price, str):
        match = _PRICE.fullmatch(price.strip())
        if match is None:
            raise OptionError(
                f"{place}: {price!r:.80} is not a price per hour; write it like 2.99 or 2.99/h."
            )
        price = float(match["number"].replace("_", ""))
    # NaN fails the comparison. Nothing is a price, too: of a machine that is paid for.
    known = isinstance(price, int | float) and not isinstance(price, bool)
    if not known or not 0 <= price <= _LARGEST or not math.isfinite(price):
        raise OptionError(f"{place}: a price per hour is a number from zero on, got {price!r:.80}.")
    return float(price)


def _content(file: str) -> dict[str, Any]:
    """Return what a file of prices says, unchecked."""
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError, RuntimeError) as error:
        reason = "it is not text" if isinstance(error, UnicodeDecodeError) else None
        if isinstance(error, RuntimeError):  # a home folder of nobody
            reason = str(error)
        elif reason is None:
            reason = reason_of(error)
        raise OptionError(f"--prices {file!r:.200} cannot be read: {reason}.") from None
    try:
        found = parse_json(text) if file.lower().endswith(".json") else tomllib.loads(text)
    except (Malformed, tomllib.TOMLDecodeError, RecursionError) as error:
        kind = "JSON" if isinstance(error, Malformed) else "TOML"
        raise OptionError(f"--prices {file:.200} is not {kind}: {error}.") from None
    if not isinstance(found, dict):
        raise OptionError(
            f'--prices {file:.200}: expected one object of prices per hour, as in {{"h100": 2.99}}.'
        )
    return found
