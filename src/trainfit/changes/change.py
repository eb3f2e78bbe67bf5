"""`StepChange`: one thing that can be done differently in a step, with the code that does it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainfit.plans.ways import ChangeMade
from trainfit.steps.step import Step
from trainfit.traces.ranks import Cluster
from trainfit.traces.trace import Trace

PLAN = "plan"
"""How a change names plans among what it excludes."""


@dataclass(frozen=True)
class StepChange:
    """One value of one kind of change, and how it is made. A step has at most one change of each kind."""

    made: ChangeMade
    make: Callable[[Step], Step] | None = None
    """Carries it out on a step that was just built; raises `NotPossible` if that cannot be."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the target that it sets instead, or besides."""
    repeats: int = 1
    """How often forward and backward run in one step."""
    excludes: frozenset[str] = frozenset()
    """Kinds of change, or names of single ones, that it cannot be made together with."""

    cluster: Cluster | None = None
    """The processes that the step is divided among, if that is the change."""
    copies: int = 1
    """How many of them train on different samples."""
    least_copied_bytes: int = 0
    """What is copied over the link at least, whatever else is changed; nothing overlaps with these copies."""
    refused_by: Callable[[Trace], str | None] = lambda trace: None
    """Why it cannot be made after all, as the trace of the changed step shows; None if it can."""

    @property
    def is_setting(self) -> bool:
        """Whether the step stays the same, and only something around it is set otherwise."""
        return self.make is None and not self.options and self.cluster is None

    @property
    def kind(self) -> str:
        """What is changed."""
        return self.made.kind

    @property
    def name(self) -> str:
        """As results write it."""
        return self.made.name


class NotPossible(Exception):
    """A change cannot be made to this step; the message says why."""
