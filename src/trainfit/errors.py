"""Every mistake a user can make, as an exception whose message is what the command line prints.

TrainfitError                 base: exit code 2, one message, no traceback
├── TargetError               a target that cannot be found, loaded or understood
│   └── MissingExtra          an optional dependency is not installed
├── StepError                 the step itself is wrong (no parameters, no backward, wrong type)
├── UserCodeError             the user's own function raised; carries their traceback
├── CaptureError              the step does something that capture cannot follow
├── DeviceError               an unknown or impossible device
├── OptionError               a flag or size that makes no sense
│   └── SizeNotTaken          a function of the user's own has no parameter for it
├── PlanError                 a plan that is not this model's, or that is applied twice
│   └── PlanDoesNotFit        a step does not have the regions of a plan, or they do something else there
├── GraphError                a graph that cannot be scheduled: a cycle, a missing or doubled name
├── FileFormatError           a file that is truncated, corrupted or of another schema
├── MemoryGuard               running the real step would exceed this machine's memory
├── BudgetTooSmall            no plan fits: exit code 3
└── GrewTooMuch               a step needs more than was allowed, compared with an older one: exit code 4

A mistake of ours is an AssertionError (or any other exception) and keeps its traceback.
"""

from __future__ import annotations


class TrainfitError(Exception):
    """A mistake the user can mend; the message says what, where and what to do next."""

    exit_code = 2


class TargetError(TrainfitError):
    """The target cannot be found, loaded or understood."""


class MissingExtra(TargetError):
    """An optional dependency that the target needs is not installed."""


class StepError(TrainfitError):
    """The step is not a training step: wrong type, no parameters, no backward."""


class UserCodeError(TrainfitError):
    """The user's own code raised. `user_traceback` is theirs alone, without our frames."""

    def __init__(self, message: str, user_traceback: str) -> None:
        super().__init__(message)
        self.user_traceback = user_traceback


class CaptureError(TrainfitError):
    """The step does something that capture cannot follow; names the line in the user's code."""


class DeviceError(TrainfitError):
    """The device is unknown, ambiguous or impossible."""


class OptionError(TrainfitError):
    """A flag, size or count that makes no sense."""


class SizeNotTaken(OptionError):
    """A function of the user's own has no parameter for an option; `label` is what the function is called."""

    def __init__(self, message: str, label: str) -> None:
        """Keep the function's name for messages of other questions."""
        super().__init__(message)
        self.label = label


class PlanError(TrainfitError):
    """A plan does not belong to the model, or the model runs one already."""


class PlanDoesNotFit(PlanError):
    """A step does not have the regions of a plan, or they do something else there."""


class GraphError(TrainfitError):
    """A graph cannot be scheduled: a cycle, a missing or doubled name, a size that makes no sense."""


class FileFormatError(TrainfitError):
    """A file is truncated, corrupted, of another schema, or not what it claims to be."""


class MemoryGuard(TrainfitError):
    """Running the real step would exceed this machine's memory; `--force` overrides."""


class BudgetTooSmall(TrainfitError):
    """No plan fits into the budget; `minimum_peak_bytes` is the smallest peak that one reaches."""

    exit_code = 3

    def __init__(self, message: str, minimum_peak_bytes: int) -> None:
        """Keep the figure for programs; the message has it for people."""
        super().__init__(message)
        self.minimum_peak_bytes = minimum_peak_bytes


class GrewTooMuch(TrainfitError):
    """A step needs more memory or time than an older one, by more than was allowed."""

    exit_code = 4
