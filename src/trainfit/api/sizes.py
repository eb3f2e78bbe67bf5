"""`max_batch` and `max_seq`: the largest batch or sequence that fits, with or without a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

from trainfit.allocator.allocator_options import AllocatorOptions
from trainfit.api.request import Build, Request
from trainfit.api.size_judge import SizeJudge, SizeQuestion
from trainfit.api.size_limits import SizeRange, refuse_fixed_size, size_range
from trainfit.basics.doing import Measuring, Progress, doing, heard_by, in_turn
from trainfit.basics.units import format_bytes, format_count
from trainfit.costs.estimates import Estimate
from trainfit.costs.pricing import CostSource
from trainfit.devices.device_table import Device
from trainfit.errors import BudgetTooSmall, OptionError, TargetError, UserCodeError
from trainfit.models.recipe import StepOptions
from trainfit.planning.infeasible import too_small
from trainfit.planning.plan_results import PlanResult
from trainfit.planning.requests import budget_notes
from trainfit.sizing.size_results import Limit, MaxSize, SizeRow
from trainfit.sizing.size_search import Bracket, Needed, confirmed
from trainfit.traces.ranks import Cluster

_MOST_ROWS = 6


def max_batch(
    target: str | Build,
    *,
    device: str | Device = "cpu",
    seq: int | None = None,
    with_plan: bool = False,
    budget: int | str | None = None,
    multiple_of: int = 1,
    options: StepOptions | None = None,
    task: str | None = None,
    steps: int | None = None,
    costs: CostSource = "roofline",
    allocator: str | AllocatorOptions | None = "default",
    cluster: Cluster | None = None,
    worst_rank: bool = False,
    seconds_limit: float = 30.0,
    progress: Progress | None = None,
    measuring: Measuring | None = None,
) -> MaxSize:
    """Return the largest batch with which a step fits; `BudgetTooSmall` if not even one sample does.

    A size fits as `trainfit.estimate` says, or with `with_plan` where `trainfit.plan` finds one; `budget` is
    that of `trainfit.plan`. Few sizes are captured, and the others worked out from these; the largest that
    fits is captured, and so is the next, which does not fit. `multiple_of` looks only at multiples of it.

    A function of your own is called with the size as its parameter `batch`.
    """
    options = _with_size(options, "seq", seq)
    question = SizeQuestion("batch", with_plan, budget, multiple_of, seconds_limit)
    with heard_by(progress, measuring):
        request = Request(target, device, options, task, steps, costs, False, allocator, cluster, worst_rank)
        return largest_size(request, question)


def max_seq(
    target: str | Build,
    *,
    device: str | Device = "cpu",
    batch: int | None = None,
    with_plan: bool = False,
    budget: int | str | None = None,
    multiple_of: int = 1,
    options: StepOptions | None = None,
    task: str | None = None,
    steps: int | None = None,
    costs: CostSource = "roofline",
    allocator: str | AllocatorOptions | None = "default",
    cluster: Cluster | None = None,
    worst_rank: bool = False,
    seconds_limit: float = 30.0,
    progress: Progress | None = None,
    measuring: Measuring | None = None,
) -> MaxSize:
    """Return the longest sequence with which a step fits; see `max_batch`, which has the same arguments.

    A model may have positions for so many tokens and no more: that is then the answer, and said.
    """
    options = _with_size(options, "batch", batch)
    question = SizeQuestion("seq", with_plan, budget, multiple_of, seconds_limit)
    with heard_by(progress, measuring):
        request = Request(target, device, options, task, steps, costs, False, allocator, cluster, worst_rank)
        return largest_size(request, question)


def _with_size(options: StepOptions | None, name: str, size: int | None) -> StepOptions | None:
    if size is None:
        return options
    given = options or StepOptions()
    if isinstance(given, StepOptions) and getattr(given, name) is not None:
        raise OptionError(f"{name} is given twice, as {name}= and in options; leave one of them out.")
    if not isinstance(given, StepOptions):
        return given  # refused where it is used
    return replace(given, seq=size) if name == "seq" else replace(given, batch=size)


def largest_size(request: Request, question: SizeQuestion) -> MaxSize:
    """Find the largest size of a step; its own request says everything else about it."""
    refuse_fixed_size(request, question)
    judge = SizeJudge(request, question)
    sizes = size_range(request, question)
    unit = question.multiple_of
    for start in sizes.starts:
        _capture_start(judge, start)
    if judge.growth.is_flat:
        raise TargetError(unused_size(question.name, sizes.starts[0], sizes.starts[-1]))
    doing("finding the largest size that fits")
    bracket = Bracket(sizes.first // unit, sizes.last // unit)

    def ask(number: int) -> Needed:
        return judge.ask(number * unit)

    def guess(number: int) -> Needed | None:
        return judge.guess(number * unit)

    def peak(number: int) -> Needed | None:
        return judge.guessed_peak(number * unit)

    guesses = {start // unit: guess(start // unit) for start in sizes.starts}
    hints = {number: needed for number, needed in guesses.items() if needed is not None}
    found = confirmed(ask, guess, judge.budget_bytes, bracket, hints, None if question.with_plan else peak)
    if found is None:
        refuse_first(judge, sizes.first)
    return _answer(judge, sizes, found * unit)


def unused_size(name: str, first: int, last: int) -> str:
    """Say that a function takes a size and makes the same step whatever it is."""
    return (
        f"the step is the same with {name} {first:,} and {last:,}: the function takes {name}, but does not "
        "use it."
    )


def _capture_start(judge: SizeJudge, size: int) -> None:
    try:
        judge.capture(size)
    except UserCodeError as error:
        text = (
            f"{error} That was with {judge.question.name} {format_count(size)}: if the step takes only "
            "multiples of a number, say so by --multiple-of N."
        )
        raise UserCodeError(text, error.user_traceback) from None


def refuse_first(judge: SizeJudge, size: int) -> NoReturn:
    """Say that not even the smallest size fits, as `estimate` or `plan` says it."""
    if size in judge.refused:
        raise judge.refused[size]
    result, name = judge.result(size), judge.question.name
    words = f"with {name} {format_count(size)}"
    if isinstance(result, PlanResult):
        raise BudgetTooSmall(f"{words}, the smallest there is, {too_small(result)}", result.plan.peak_bytes)
    raise BudgetTooSmall(_does_not_fit(judge, result, words), result.peak_bytes)


def _does_not_fit(judge: SizeJudge, result: Estimate, words: str) -> str:
    budget, need = judge.budget_bytes, result.smallest_memory_bytes
    place = f"into {format_bytes(budget)} of {result.device.name}"
    if judge.question.budget is None and result.verdict == "too close to call":
        place += f", which leaves a margin of {format_bytes(result.device.margin_bytes)} (too close to call)"
    runs = f", runs in {format_bytes(need)}" if need != result.peak_bytes else ""
    lower = "".join(f"\n  {one.text}" for one in result.advice)
    return (
        f"{result.target} {words}, the smallest there is, does not fit {place}: peak "
        f"{format_bytes(result.peak_bytes)}{runs} (predicted), {format_bytes(need - budget)} missing. "
        f"--with-plan looks for a plan that makes it fit.{' What would lower it:' if lower else ''}{lower}"
    )


def _answer(judge: SizeJudge, sizes: SizeRange, size: int) -> MaxSize:
    question, following = judge.question, size + judge.question.multiple_of
    limit: Limit = "memory"
    text = ""
    if following in judge.refused:
        limit, text = "refused", str(judge.refused[following])
    elif following > sizes.last:
        limit, text = ("model", sizes.why) if sizes.why else ("range", "")
    next_row = judge.captured_row(following) if following in judge.results else None
    rows = _rows(judge, sizes, size)
    result = replace(judge.result(size), seconds=judge.watch.seconds)
    return MaxSize(
        name=question.name,
        size=size,
        target=result.trace.target,
        device=judge.device,
        with_plan=question.with_plan,
        budget_bytes=judge.budget_bytes,
        margin_bytes=judge.device.margin_bytes if question.budget is None else 0,
        multiple_of=question.multiple_of,
        limit=limit,
        limit_text=text,
        answer=rows[-1],
        next=next_row,
        rows=rows,
        captures=tuple(sorted(judge.traces)),
        result=result,
        seconds=result.seconds,
        notes=() if question.with_plan else budget_notes(question.budget, judge.device),
    )


def _rows(judge: SizeJudge, sizes: SizeRange, size: int) -> tuple[SizeRow, ...]:
    """Return the throughput of some sizes up to the largest: each twice the one before."""
    unit = judge.question.multiple_of
    doubled = [unit]
    while doubled[-1] * 2 < size:
        doubled.append(doubled[-1] * 2)
    # One sample often takes another course than several, which its capture alone shows.
    smallest = sizes.first + (1 if judge.question.name == "batch" and unit == 1 else 0)
    shown = [one for one in doubled if smallest <= one < size][1 - _MOST_ROWS :]
    found: list[SizeRow | None] = []
    for one in in_turn("throughput of size", shown):
        if one in judge.results:
            found.append(judge.captured_row(one))
        elif judge.request.costs == "roofline":
            found.append(judge.guessed_row(one))
    return (*(row for row in found if row is not None), judge.captured_row(size))
