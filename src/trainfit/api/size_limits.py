"""Which sizes there are to look at: where the search begins, and what a model has no positions for."""

from __future__ import annotations

from dataclasses import dataclass

from trainfit.api.request import Request
from trainfit.api.size_judge import SizeQuestion
from trainfit.errors import OptionError, SizeNotTaken, TargetError, TrainfitError
from trainfit.models.recipe import RANGES, flag_of
from trainfit.traces.trace import Trace

_USUAL_SEQ = 512


@dataclass(frozen=True)
class SizeRange:
    """Sizes, all multiples of one number."""

    first: int
    last: int
    starts: tuple[int, ...]
    """Those that are captured first."""
    why: str = ""
    """Why there are no larger ones, if it is not what trainfit looks at."""


def refuse_fixed_size(request: Request, question: SizeQuestion) -> None:
    """Refuse a step whose size is said already, and a multiple that is none."""
    name = question.name
    if isinstance(request.target, Trace):
        raise OptionError(f"a trace is of one {name}; give the target that it was captured from.")
    if getattr(request.options, name) is not None:
        raise OptionError(f"{flag_of(name)} is what is looked for: leave it out.")
    multiple, largest = question.multiple_of, RANGES[name][1]
    if type(multiple) is not int or not 1 <= multiple <= largest:
        raise OptionError(f"--multiple-of must be a whole number from 1 to {largest:,}, got {multiple!r}.")


def size_range(request: Request, question: SizeQuestion) -> SizeRange:
    """Return the sizes to look at."""
    name, unit = question.name, question.multiple_of
    least, most = RANGES[name]
    first, last = -(-least // unit) * unit, most // unit * unit
    last, why = _allowed(request, name, unit, first, last)
    # One sample often takes another course than several. Over the batch two points are a line; over the
    # sequence it takes three for a parabola.
    wanted: tuple[int, ...] = (2 * unit, 4 * unit)
    if name == "seq":
        whole = max(min(_usual_seq(request) or _USUAL_SEQ, last), 4 * unit, 4 * first)
        wanted = (whole // 4, whole // 2, whole)
    rounded = {min(max(-(-size // unit) * unit, first), last) for size in wanted}
    return SizeRange(first, last, tuple(sorted(rounded)), why)


def _usual_seq(request: Request) -> int | None:
    """Return the sequence that the target takes when none is said; None if it does not say."""
    try:
        return request.found().settings.seq
    except TrainfitError:  # what is wrong is said when a size is captured
        return None


def _allowed(request: Request, name: str, unit: int, first: int, last: int) -> tuple[int, str]:
    """Return the largest size that the target takes, as far as it says without building it, and why."""

    def refusal(number: int) -> str | None:
        return _refusal(request, name, number * unit)

    low, high = first // unit, last // unit
    if (said := refusal(high)) is None:
        return last, ""
    if refusal(low) is not None:
        request.at(**{name: first}).found()  # says why
    while high - low > 1:
        middle = (low + high) // 2
        refused = refusal(middle)
        low, high = (middle, high) if refused is None else (low, middle)
        said = refused or said
    return low * unit, said


def _refusal(request: Request, name: str, size: int) -> str | None:
    try:
        request.at(**{name: size}).found()
    except SizeNotTaken as error:
        raise TargetError(_how_to_take(name, error)) from None
    except OptionError as error:
        return str(error)
    return None


def _how_to_take(name: str, error: SizeNotTaken) -> str:
    return (
        f"{error.label} has no parameter named {name}, and its size cannot be set. Add one that it makes its "
        f"data with: def build({name}: int = 8, ...)."
    )
