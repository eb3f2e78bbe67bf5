"""A target with changes: the options that it is built with, and what is done to the step then."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from trainfit.changes.change import StepChange
from trainfit.models.recipe import StepOptions
from trainfit.steps.step import Step

_ORDER = ("dtype", "loss", "optimizer", "parameters", "state", "batch")
"""In which changes are made to a step: what is moved to the host after what else is done with it, and last of
all what runs the step several times."""


def position(kind: str) -> int:
    """Return where a kind comes among the changes that are made to a step."""
    return _ORDER.index(kind) if kind in _ORDER else len(_ORDER)


def options_with(options: StepOptions, changes: Iterable[StepChange]) -> StepOptions:
    """Return the options that a target is built with."""
    found: dict[str, Any] = {}
    for change in changes:
        found.update(change.options)
    return replace(options, **found)


def made_to(changes: Iterable[StepChange]) -> Callable[[Step], Step] | None:
    """Return what makes these changes to a step; None if there is nothing to do."""
    own = [change for change in changes if change.make is not None]
    own.sort(key=lambda change: position(change.kind))
    if not own:
        return None

    def make(step: Step) -> Step:
        for change in own:
            assert change.make is not None
            step = change.make(step)
        return step

    return make
