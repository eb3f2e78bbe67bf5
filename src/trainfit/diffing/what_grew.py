"""`diff`: what grew between two results, or two traces."""

from __future__ import annotations

from trainfit.devices.device_table import Device
from trainfit.diffing import figure_changes as changes
from trainfit.diffing.allowed_growth import AllowedGrowth, exceeded, parse_share
from trainfit.diffing.found_diff import Diff
from trainfit.diffing.result_reading import Comparable, NamedReading, read_side
from trainfit.errors import OptionError
from trainfit.report.diff_data import DiffData

_LIKE_WITH_LIKE = ("device", "world size", "rank", "mesh")


def diff(
    old: Comparable,
    new: Comparable,
    *,
    device: str | Device | None = None,
    max_peak: str | float | None = None,
    max_time: str | float | None = None,
) -> Diff:
    """Say what grew from `old` to `new`: the peak, the step's time, categories, modules, operators.

    Either is a file that `--json` or `--save-trace` wrote, what `trainfit.estimate` returns, or a trace. Both
    are of one kind. Traces are compared by memory, and by time too on a `device`. With `max_peak` or
    `max_time` (`"2%"` or 0.02), `Diff.exceeded` says what grew by more, and `Diff.check` raises.
    """
    allowed = AllowedGrowth(parse_share(max_peak, "--max-peak"), parse_share(max_time, "--max-time"))
    sides = read_side(old, "old", device), read_side(new, "new", device)
    _check_comparable(*sides, device, allowed)
    before, after = (side.reading for side in sides)
    figures = changes.figures(before, after)
    by_name = {one.name: one for one in figures}
    peak, time = by_name["peak_bytes"], by_name.get("step_seconds")
    return Diff(
        DiffData(
            kind=sides[0].kind,
            old=changes.side_of(sides[0]),
            new=changes.side_of(sides[1]),
            others=changes.other_values(*sides),
            figures=figures,
            categories=changes.categories(before, after),
            modules=changes.modules(before, after),
            operators=changes.operators(before, after),
            regions=changes.regions(before, after),
            peak_share=peak.share,
            time_share=time.share if time else None,
            max_peak_share=allowed.peak_share,
            max_time_share=allowed.time_share,
            exceeded=exceeded(allowed, peak, time),
        )
    )


def _check_comparable(
    old: NamedReading, new: NamedReading, device: str | Device | None, allowed: AllowedGrowth
) -> None:
    if old.kind != new.kind:
        raise OptionError(
            f"{old.name} is {_article(old.kind)} and {new.name} {_article(new.kind)}: compare two of a kind."
        )
    if device is not None and old.kind != "trace":
        raise OptionError("--device is for traces: results say themselves what device they are for.")
    if allowed == AllowedGrowth():
        return
    for other in changes.other_values(old, new):
        if other.name in _LIKE_WITH_LIKE:
            raise OptionError(
                f"--max-peak and --max-time compare like with like: the {other.name} of {old.name} is "
                f"{other.old}, that of {new.name} is {other.new}."
            )


def _article(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"
