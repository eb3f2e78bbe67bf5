"""What the user points at, as a function that builds a `Step`: `load` is the way in."""

from trainfit.targets.parse import load
from trainfit.targets.target import Target

__all__ = ["Target", "load"]
