"""What a shell offers when Tab is pressed: names of devices, targets and values. Without torch, at once.

`trainfit --install-completion` sets a shell up for it.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from trainfit.models.preset_names import PRESET_NAMES

Offered = Callable[[str], list[str]]


def one_of(*values: str) -> Offered:
    """Offer these values."""

    def offered(incomplete: str) -> list[str]:
        return [value for value in values if value.startswith(incomplete)]

    return offered


def devices(incomplete: str) -> list[str]:
    """Offer the devices of the table, this machine's own, and device files."""
    from trainfit.devices.device_table import known_devices

    names = [device.name for device in known_devices()]
    found = [name for name in (*names, "cpu", "cuda") if name.startswith(incomplete)]
    return [*found, *_files(incomplete, ".json")]


def targets(incomplete: str) -> list[str]:
    """Offer built-in models, Python files, and after the colon the functions in such a file."""
    if incomplete.startswith("hf:"):
        return [f"hf:{path}" for path in _files(incomplete.removeprefix("hf:"), ".json")]
    file, colon, beginning = incomplete.partition(":")
    if colon:
        return [f"{file}:{name}" for name in _functions(file) if name.startswith(beginning)]
    found = [name for name in (*PRESET_NAMES, "hf:") if name.startswith(incomplete)]
    return [*found, *(path if path.endswith("/") else f"{path}:" for path in _files(incomplete, ".py"))]


def graphs_and_targets(incomplete: str) -> list[str]:
    """Offer what `order` takes: graphs in files, and targets."""
    return list(dict.fromkeys([*targets(incomplete), *_files(incomplete, ".json")]))


def json_files(incomplete: str) -> list[str]:
    """Offer results and traces."""
    return list(_files(incomplete, ".json"))


def toml_files(incomplete: str) -> list[str]:
    """Offer grids."""
    return list(_files(incomplete, ".toml"))


def listed_devices(incomplete: str) -> list[str]:
    """Offer the last of several devices with commas between them."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in devices(last)]


def _files(incomplete: str, ending: str) -> Iterator[str]:
    """Yield folders and the files of one kind that begin with what was typed."""
    folder, name = os.path.split(incomplete)
    try:
        entries = sorted(os.scandir(folder or "."), key=lambda entry: entry.name)
    except OSError:  # no such folder: there is nothing to offer
        return
    for entry in entries:
        if entry.name.startswith(name) and not entry.name.startswith("." if not name else "\0"):
            path = os.path.join(folder, entry.name)
            if entry.is_dir():
                yield f"{path}/"
            elif entry.name.endswith(ending):
                yield path


def _functions(file: str) -> Iterator[str]:
    """Yield the functions at the top level of a file, which is read and not run."""
    try:
        body = ast.parse(Path(file).read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):  # nothing to offer
        return
    for statement in body:
        if isinstance(statement, ast.FunctionDef) and not statement.name.startswith("_"):
            yield statement.name
