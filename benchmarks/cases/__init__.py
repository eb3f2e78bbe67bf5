"""The training steps on which predictions are compared with what a real run does."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

from trainfit import Step


@dataclass(frozen=True)
class Case:
    """One training step, with what a reader of the results needs to know about it.

    `convolutions`: it runs some `nn.Conv*`, whose CPU kernels allocate workspaces of their own.
    `data_dependent`: batches of the same shape can take different memory (LayerDrop, masks, routing).
    """

    name: str
    group: str  # "huggingface", "builtin" or "pattern"
    build: Callable[[], Step]
    convolutions: bool
    data_dependent: bool
    kind: str


def all_cases() -> dict[str, Case]:
    """Return every case by name: the `CASES` of all modules in this folder. Builds no model."""
    cases: dict[str, Case] = {}
    for module in pkgutil.iter_modules(__path__):
        for case in importlib.import_module(f"{__name__}.{module.name}").CASES:
            if case.name in cases:
                raise ValueError(f"two cases are called {case.name!r}")
            cases[case.name] = case
    return cases
