"""Fits of the roofline's constants, each by what it has seen, as files: `fits/NAME.json`.

`everything` is what trainfit has built in; the others have not seen a third of the families of rows, or any
row of one device, and judge by these.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from .fitting import Key, Point
from .prediction import third_of
from .rows import Row

FOLDER = Path(__file__).with_name("fits")
EVERYTHING = "everything"


@dataclass(frozen=True)
class StoredFit:
    """Constants, and the kinds of operators that took a noticeable share of some row, by architecture."""

    point: Point
    kinds: dict[str, frozenset[str]]
    loss: float


def without_model(row: Row) -> str:
    """Return the name of the fit that has not seen a row's model on its device."""
    return f"without-third-{third_of(row)}"


def without_device(row: Row) -> str:
    """Return the name of the fit that has seen nothing of a row's device."""
    return f"without-{row.device.name}"


def save_fit(name: str, fit: StoredFit) -> None:
    """Write a fit whole."""
    found = {
        "loss": round(fit.loss, 5),
        "constants": {f"{where} {what}": float(f"{value:.4g}") for (where, what), value in fit.point.items()},
        "kinds": {architecture: sorted(kinds) for architecture, kinds in sorted(fit.kinds.items())},
    }
    FOLDER.mkdir(exist_ok=True)
    part = FOLDER / f"{name}.part"
    part.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    part.replace(FOLDER / f"{name}.json")


def load_fit(name: str) -> StoredFit:
    """Read a fit."""
    found = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    point: Point = {}
    for words, value in found["constants"].items():
        key: Key = tuple(words.split(" "))
        point[key] = value
    kinds = {architecture: frozenset(kinds) for architecture, kinds in found["kinds"].items()}
    return StoredFit(point, kinds, found["loss"])
