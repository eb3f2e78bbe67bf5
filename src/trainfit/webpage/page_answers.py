"""The first screen of each kind of result: the answer in words, its figures, and what dominates the peak."""

from __future__ import annotations

from dataclasses import dataclass

from trainfit.basics.units import format_bytes, format_count, format_seconds
from trainfit.basics.visible_text import short_operator, shortened
from trainfit.report.added_words import (
    setting_of_estimate,
    setting_of_plan,
    shows_waiting,
    waiting_name,
    waiting_words,
)
from trainfit.report.data import EstimateData, FrontierData, PlanData, PointRow, Subject, VerificationData
from trainfit.report.ordered_data import OrderData
from trainfit.report.rank_report import RankVerificationData
from trainfit.report.tables import percent
from trainfit.webpage.peak_places import LargestPart

GOOD, CLOSE, BAD, PLAIN = "good", "close", "bad", "plain"
_TONES = {"fits": GOOD, "too close to call": CLOSE, "does not fit": BAD}
_LEAST_SHOWN = 0.0005
_LONGEST_NAME = 80
_GRAPHS = {"joint": "its joint graph", "eager": "the eager step", "file": "a file", "graph": "a graph"}
_CATEGORY_WORDS = {
    "parameter": "Parameters",
    "buffer": "Buffers",
    "gradient": "Gradients",
    "activation": "Activations",
    "optimizer_state": "The optimizer's state",
    "input": "Inputs",
    "temporary": "Temporary results",
    "communication": "Buffers of communication",
}


@dataclass(frozen=True)
class Figure:
    """One number of the first screen; the note says whether it is predicted or measured."""

    label: str
    value: str
    note: str


@dataclass(frozen=True)
class MemoryBar:
    """What a step needs beside what there is."""

    by_category: dict[str, int]
    needed_bytes: int
    limit_bytes: int
    limit_label: str
    margin_bytes: int


@dataclass(frozen=True)
class FirstScreen:
    """The answer."""

    target: str
    place: str
    """The device, or what else the answer is about."""
    verdict: str
    tone: str
    sentence: str
    figures: tuple[Figure, ...]
    joined: str = "on"
    """The word between the two."""
    description: str = ""
    dominates: str = ""
    setting: str = ""
    """What a setting of the allocator would be worth."""
    bar: MemoryBar | None = None


def dominates(largest: LargestPart | None, peak_bytes: int) -> str:
    """Say in a sentence what most of the peak is, and where it comes from."""
    if largest is None or not peak_bytes:
        return ""
    word = _CATEGORY_WORDS[largest.category]
    verb = "dominates" if word.startswith("The ") else "dominate"
    share = largest.category_bytes / peak_bytes
    text = (
        f"{word} {verb} the peak: {format_bytes(largest.category_bytes)} of {format_bytes(peak_bytes)} "
        f"({share:.0%}, predicted)"
    )
    return f"{text}{_whose(largest)}."


def _whose(largest: LargestPart) -> str:
    """Say which layers have most of it, or what made it if none of them has it."""
    part, place = format_bytes(largest.place_bytes), shortened(largest.place, _LONGEST_NAME)
    if largest.modules > 1:
        return f"; {part} of that is in the {largest.modules} modules {place}"
    if largest.modules == 1:
        return f"; {part} of that is in {place}"
    made = " and ".join(short_operator(name) for name in largest.operators)
    if made:
        where = f"in {place}, outside of its layers" if place else "outside of modules"
        return f"; {made} made {part} of that {where}"
    return f"; {part} of that is {place}'s own, outside of its layers" if place else ""


def estimate_answer(data: EstimateData, largest: LargestPart | None) -> FirstScreen:
    """Say whether it fits, and how long a step takes."""
    subject, spare = data.subject, data.spare_bytes
    short = "missing" if spare < 0 else "free"
    sentence = (
        f"A step needs {format_bytes(data.smallest_memory_bytes)} (predicted). {subject.device} has "
        f"{format_bytes(subject.device_usable_bytes)} for tensors: {format_bytes(abs(spare))} {short}"
    )
    if data.verdict == "too close to call":
        sentence += f", less than the margin of {format_bytes(data.margin_bytes)} for what is not simulated"
    figures = [Figure("peak", format_bytes(data.peak_bytes), "bytes in use, predicted")]
    if data.reserved_peak_bytes != data.peak_bytes:
        figures += [
            Figure("allocated", format_bytes(data.allocated_peak_bytes), "with libraries, predicted"),
            Figure("reserved", format_bytes(data.reserved_peak_bytes), "where there is room, predicted"),
            Figure("runs in", format_bytes(data.smallest_memory_bytes), "at least, predicted"),
        ]
    return FirstScreen(
        target=subject.target,
        place=_place(subject),
        verdict={"fits": "Fits", "too close to call": "Too close to call"}.get(data.verdict, "Does not fit"),
        tone=_TONES[data.verdict],
        sentence=f"{sentence}.",
        figures=(*figures, *_time_figures(data)),
        description=subject.description,
        dominates=dominates(largest, data.peak_bytes),
        setting=setting_of_estimate(data),
        bar=MemoryBar(
            data.by_category,
            data.smallest_memory_bytes,
            subject.device_usable_bytes,
            f"{subject.device} has for tensors",
            data.margin_bytes,
        ),
    )


def _time_figures(data: EstimateData) -> list[Figure]:
    time = data.time
    if time is None:
        return [Figure("step time", "unknown", "nothing is known about the device's speed")]
    span = f"{format_seconds(time.lower_seconds)} to {format_seconds(time.upper_seconds)}"
    found = [Figure("step time", format_seconds(time.step_seconds), f"predicted, likely {span}")]
    if time.total_tokens_per_second is not None:
        rate, unit = time.total_tokens_per_second / time.world_size, "tokens"
    elif time.total_samples_per_second is not None:
        rate, unit = time.total_samples_per_second / time.world_size, "samples"
    else:
        return found
    shown = format_count(round(rate)) if rate >= 100 else f"{rate:.3g}"
    use = time.model_flops_utilisation
    note = "predicted" if use is None else f"MFU {use:.1%}, predicted"
    note = f"for each GPU, {note}" if data.subject.world_size > 1 else note
    return [*found, Figure(f"{unit} per second", shown, note)]


def _place(subject: Subject) -> str:
    if subject.world_size == 1:
        return subject.device
    return f"{subject.device}, rank {format_count(subject.rank)} of {format_count(subject.world_size)}"


def plan_answer(data: PlanData, largest: LargestPart | None) -> FirstScreen:
    """Say whether there is a plan, and what it costs."""
    subject, needed = data.subject, format_bytes(data.smallest_memory_bytes)
    budget = format_bytes(data.budget_bytes)
    saved = format_bytes(int(data.baseline["peak_bytes"]) - data.peak_bytes)
    if not data.feasible:
        verdict, tone = "No plan fits", BAD
        sentence = f"The least memory that any plan needs is {needed} (predicted); the budget is {budget}."
    elif not data.regions:
        verdict, tone = "Fits as it is", GOOD
        sentence = f"The step needs {needed} of {budget} (predicted) without recomputing anything."
    else:
        verdict, tone = "Fits with this plan", GOOD
        sentence = (
            f"With the plan the step needs {needed} of {budget} and takes {data.added:.1%} longer "
            f"(predicted). Its peak is {saved} lower. No plan of this kind is more than {data.gap:.2%} "
            "faster."
        )
    figures = [
        Figure("peak with the plan", format_bytes(data.peak_bytes), "predicted"),
        Figure("peak without", format_bytes(int(data.baseline["peak_bytes"])), "predicted"),
        Figure("step with the plan", format_seconds(data.step_seconds), f"{data.added:+.1%}, predicted"),
        Figure("step without", format_seconds(data.baseline["step_seconds"]), "predicted"),
        Figure("recomputed", format_seconds(data.recompute_seconds), "of every step, predicted"),
    ]
    if shows_waiting(data):
        waiting = format_seconds(data.waiting_seconds)
        figures.append(Figure(waiting_name(data), waiting, "added to every step, predicted"))
    bar = MemoryBar(data.by_category, data.smallest_memory_bytes, data.budget_bytes, "budget", 0)
    return FirstScreen(
        target=subject.target,
        place=_place(subject),
        verdict=verdict,
        tone=tone,
        sentence=sentence,
        figures=tuple(figures),
        description=subject.description,
        dominates=dominates(largest, data.peak_bytes),
        setting=setting_of_plan(data),
        bar=bar,
    )


def frontier_answer(data: FrontierData, largest: LargestPart | None) -> FirstScreen:
    """Say what the fastest plan is that fits."""
    subject, best, least = data.subject, data.best, data.points[0]
    usable = format_bytes(subject.device_usable_bytes)
    figures = [
        Figure(
            "plans", format_count(len(data.points)), "none of them beaten by another in both memory and time"
        ),
        Figure("least memory", format_bytes(least.smallest_memory_bytes), "predicted"),
        Figure("its step", format_seconds(least.step_seconds), f"predicted{_waits(data, least)}"),
        Figure("fastest step", format_seconds(data.points[-1].step_seconds), "predicted"),
    ]
    if best is None:
        verdict, tone = "No plan fits", BAD
        sentence = f"{subject.device} has {usable} for tensors: no plan leaves its margin free (predicted)."
    else:
        verdict, tone = "Plans that fit were found" if best.regions else "Fits as it is", GOOD
        added = "" if not best.added else f", {best.added:+.1%} beside the fastest of all"
        sentence = (
            f"The fastest that fits needs {format_bytes(best.smallest_memory_bytes)} of {usable} and takes "
            f"{format_seconds(best.step_seconds)} per step{added} (predicted)."
        )
    return FirstScreen(
        target=subject.target,
        place=_place(subject),
        verdict=verdict,
        tone=tone,
        sentence=sentence,
        figures=tuple(figures),
        description=subject.description,
        dominates=dominates(largest, _peak_of(data)),
    )


def _waits(data: FrontierData, point: PointRow) -> str:
    words = waiting_words(data, point.waiting_seconds)
    return f"; {words}" if words else ""


def _peak_of(data: FrontierData) -> int:
    """Return the peak of the step without a plan, which the sentence about the peak is of."""
    plain = next((one.peak_bytes for one in data.baselines if one.name == "keep everything"), None)
    return data.points[-1].peak_bytes if plain is None else plain


def verification_answer(data: VerificationData) -> FirstScreen:
    """Say how far off the prediction was."""
    subject, peak, seconds = data.subject, data.peak_bytes, data.seconds
    both = f"{format_bytes(peak.predicted)} predicted, {format_bytes(peak.measured)} measured"
    if data.compiled:
        verdict, tone = "A compiled step, measured", PLAIN
        sentence = f"The step is compiled; what is predicted is the eager one. Peak: {both}."
    elif data.plan_differences:
        verdict, tone = "The plan is of another step", CLOSE
        sentence = f"What the plan promises is about another step than the one that ran. Peak: {both}."
    elif peak.exact:
        verdict, tone = "The predicted peak is exact", GOOD
        sentence = f"Predicted and measured are both {format_count(peak.measured)} bytes."
    else:
        direction = "high" if data.error > 0 else "low"
        verdict, tone = f"The predicted peak is {percent(abs(data.error))} too {direction}", CLOSE
        sentence = f"Peak: {both}, {format_count(abs(peak.predicted - peak.measured))} bytes apart."
    figures = (
        Figure("peak", format_bytes(peak.predicted), "predicted"),
        Figure("peak", format_bytes(peak.measured), "measured"),
        Figure("step time", format_seconds(seconds.predicted), "predicted"),
        Figure("step time", format_seconds(seconds.measured), "measured"),
    )
    description = subject.description
    return FirstScreen(
        subject.target, subject.device, verdict, tone, sentence, figures, description=description
    )


def rank_verification_answer(data: RankVerificationData) -> FirstScreen:
    """Say how far off the prediction was on the worst rank."""
    subject, peak = data.subject, data.peak_bytes
    if all(rank.peak_bytes.exact for rank in data.ranks):
        verdict, tone = "The predicted peak is exact on every rank", GOOD
    else:
        direction = "high" if data.error > 0 else "low"
        verdict, tone = f"The predicted peak is up to {percent(abs(data.error))} too {direction}", CLOSE
    sentence = (
        f"{data.world_size} ranks ran. The one that needs the most has {format_bytes(peak.measured)} "
        f"(measured); {format_bytes(peak.predicted)} were predicted for it."
    )
    figures = (
        Figure("largest peak", format_bytes(peak.predicted), "predicted"),
        Figure("largest peak", format_bytes(peak.measured), "measured"),
        Figure("ranks", format_count(data.world_size), "each predicted and measured"),
    )
    place = f"{data.world_size} ranks"
    return FirstScreen(
        subject.target, place, verdict, tone, sentence, figures, description=subject.description
    )


def order_answer(data: OrderData) -> FirstScreen:
    """Say what the better order saves."""
    before, after = format_bytes(data.baseline_peak_bytes), format_bytes(data.peak_bytes)
    if data.saved_bytes:
        # So few bytes are 0.0% less: say how many instead.
        many = data.saved_share >= _LEAST_SHOWN
        less = f"{data.saved_share:.1%}" if many else format_bytes(data.saved_bytes)
        verdict, tone = f"{less} less memory in another order", GOOD
        sentence = f"The peak falls from {before} to {after} (predicted); the order is {data.quality}."
    else:
        verdict, tone = "The order as given is as good as any found", PLAIN
        sentence = f"The peak stays at {after} (predicted); the order is {data.quality}."
    figures = (
        Figure("peak as given", before, "predicted"),
        Figure("peak of the best order", after, f"predicted, found by {data.method}"),
        Figure("no order is below", format_bytes(data.lower_bound_bytes), "proved"),
        Figure("nodes", format_count(data.ops), "in the graph"),
    )
    place = _GRAPHS.get(data.source, data.source)
    return FirstScreen(data.target, place, verdict, tone, sentence, figures, joined="as")
