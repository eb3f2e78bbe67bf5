"""`Target`: something trainfit can capture, whatever the user called it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from trainfit.steps.step import Step
from trainfit.traces.settings import UNKNOWN_SETTINGS, Settings

Kind = Literal["file", "module", "function", "hf", "built-in"]


@dataclass(frozen=True)
class Target:
    """Something trainfit can capture. `build` makes a fresh step each time it is called."""

    name: str
    build: Callable[[], Step]
    kind: Kind
    settings: Settings = UNKNOWN_SETTINGS
    """What is known of its step before it is built."""
    decides_by_draws: bool = True
    """Whether random numbers may decide what it runs, as in LayerDrop."""
