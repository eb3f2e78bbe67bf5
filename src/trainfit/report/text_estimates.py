"""Estimates as a person reads them: the answer first, then what it consists of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from trainfit.basics.units import format_bytes, format_count, format_seconds
from trainfit.basics.visible_text import short_operator, shortened
from trainfit.report.added_words import setting_of_estimate
from trainfit.report.amounts import WITHOUT_END, Amount, at_most, stage_times, verdict_alone
from trainfit.report.data import EstimateData, ModuleRow, Subject
from trainfit.report.module_rows import largest_rows
from trainfit.report.sparkline import Sparkline
from trainfit.report.tables import (
    MOST_WARNINGS,
    NumberTable,
    indented,
    margin_words,
    name_text,
    safe,
    settings_lines,
    stacked,
)
from trainfit.report.text_communication import communication_words, units_table

if TYPE_CHECKING:
    from trainfit.costs.summary import StepTime

_BAR_WIDTH = 24
_LONGEST_NAME = 80
_MOST_OPERATORS = 8
_PARTS_OF_A_MODEL = ("pp", "ep")
"""Dimensions along which a rank has modules that others do not have."""
_MOST_RANKS = 8
_MOST_UNITS = 5
_WHOLE_ABOVE = 100
_MOST_UNPRICED = 5
_NOTICEABLE = 0.01
_STYLES = {"fits": "bold green", "too close to call": "bold yellow", "does not fit": "bold red"}


def estimate_view(data: EstimateData, amount: Amount = "usual") -> RenderableType:
    """Lay out an estimate: fits or not, what the peak consists of, where it is, the largest modules."""
    subject, time = data.subject, data.time
    if amount == "verdict":
        return verdict_alone(_headline(data), subject.warnings)
    rows = data.rows if amount == "usual" else largest_rows(data.modules, WITHOUT_END)
    # What fits needs no advice, unless one wants to see everything.
    advice = [one.text for one in data.advice] if not data.fits or amount == "all" else []
    return stacked(
        [_headline(data), *settings_lines(subject)],
        [_where(data)],
        [_rank(data)] if subject.world_size > 1 else [],
        [_device_memory(data)] if data.smallest_memory_bytes != data.peak_bytes else [],
        [_communicators(data)] if data.communicator_bytes else [],
        [Sparkline(data.memory)] if data.memory.ops else [],
        [_shares(data)],
        [Text("what would lower it", "yellow"), *indented(advice, len(advice))] if advice else [],
        [_modules(rows, timed=time is not None, divided=subject.world_size > 1)] if rows else [],
        [] if time is None else [_time(time, subject.device, divided=subject.world_size > 1)],
        [units_table(time, at_most(_MOST_UNITS, amount))] if time is not None and time.units else [],
        [] if time is None else [_operators(time, at_most(_MOST_OPERATORS, amount))],
        stage_times(subject.seconds, amount),
        warnings=subject.warnings,
        most_warnings=at_most(MOST_WARNINGS, amount),
        footer=_footer(subject),
    )


def _headline(data: EstimateData) -> Text:
    line = Text().append_text(safe(data.subject.target, "bold")).append(": peak ")
    line.append(format_bytes(data.peak_bytes), "bold")
    if data.smallest_memory_bytes != data.peak_bytes:
        line.append(", runs in ").append(format_bytes(data.smallest_memory_bytes), "bold")
    line.append(" (predicted), ")
    line.append_text(safe(f"{data.verdict} in {data.subject.device}", _STYLES[data.verdict]))
    line.append(f": {format_bytes(abs(data.spare_bytes))} {'missing' if data.spare_bytes < 0 else 'free'}")
    if data.verdict == "too close to call":
        line.append(f", less than {margin_words(data.margin_bytes)}")
    if data.time is not None:
        line.append("; ").append(format_seconds(data.time.step_seconds), "bold").append(" per step")
    return line


def _where(data: EstimateData) -> Text:
    peak, subject = data.peak, data.subject
    before = (
        f"Before the step {format_bytes(data.persistent_bytes)} are in use (predicted). "
        f"{subject.device} has {format_bytes(subject.device_usable_bytes)} for tensors."
    )
    if peak.op_index < 0:
        return safe(f"The peak is what is there before the step. {before}")
    module = (
        "outside of any module" if peak.module == "Global" else f"in {shortened(peak.module, _LONGEST_NAME)}"
    )
    place = f"The peak is in the {peak.phase}, {module}, at {peak.op} (op {format_count(peak.op_index)}"
    return safe(f"{place} of {format_count(subject.ops)}). {before}")


def _rank(data: EstimateData) -> Text:
    """Say which rank it is, and what it has at the peak because it is one of several."""
    subject = data.subject
    mesh = subject.mesh_words
    line = Text("Rank ").append(format_count(subject.rank), "bold")
    line.append(f" of {format_count(subject.world_size)}, {subject.gpus_per_node} per node")
    line.append_text(safe(f", mesh {mesh}" if mesh else ""))
    line.append(
        f". At the peak it has {format_bytes(data.gathered_bytes)} of gathered parameters and "
        f"{format_bytes(data.communication_bytes)} of buffers for communication."
    )
    if any(subject.mesh.get(name, 1) > 1 for name in _PARTS_OF_A_MODEL):
        line.append(" The parameters named above are those of its part of the model.")
    if data.ranks:
        peaks = sorted(one.peak_bytes for one in data.ranks)
        named = ", ".join(format_count(one.rank) for one in data.ranks[:_MOST_RANKS])
        more = len(data.ranks) - _MOST_RANKS
        named += f" and {more} more" if more > 0 else ""
        # With a mesh it is known which can differ; without one, what rank 0 communicates in has to do.
        looked_at = "those looked at, the ends of its groups and all stages"
        which = "those that can differ" if subject.mesh else looked_at
        line.append(
            f" It needs the most of {which} ({named}), whose peaks are from "
            f"{format_bytes(peaks[0])} to {format_bytes(peaks[-1])}."
        )
    return line


def _device_memory(data: EstimateData) -> Text:
    """Say what the allocator makes of the peak, and what lies outside of it."""
    kept = sum(data.libraries.values())
    line = Text(
        f"Allocated {format_bytes(data.allocated_peak_bytes)}, reserved "
        f"{format_bytes(data.reserved_peak_bytes)} (predicted)"
    )
    if kept:
        line.append(f", {format_bytes(kept)} of it workspaces of {_library_names(data)}")
    line.append(f"; the CUDA context takes about {format_bytes(data.context_bytes)} besides.")
    setting = setting_of_estimate(data)
    return line.append(f" {setting}", "yellow") if setting else line


def _communicators(data: EstimateData) -> Text:
    """Say what NCCL takes, which no tensor can have."""
    groups = f"{data.communicators} group{'s' if data.communicators != 1 else ''}"
    return Text(
        f"NCCL's own buffers take about {format_bytes(data.communicator_bytes)} besides, for {groups} "
        "(assumed, not measured; what fits is said of the rest)."
    )


def _library_names(data: EstimateData) -> str:
    return " and ".join(dict.fromkeys(name.partition(",")[0] for name in data.libraries))


def _shares(data: EstimateData) -> NumberTable:
    table = NumberTable("at the peak (predicted)", "bytes", "share", last="")
    for share in data.shares:
        bar = Text("█" * round(share.share * _BAR_WIDTH) or "▏", "cyan")
        table.add_row(share.name.replace("_", " "), format_bytes(share.bytes), f"{share.share:.1%}", bar)
    return table


def _modules(rows: Sequence[ModuleRow], *, timed: bool, divided: bool) -> NumberTable:
    columns = ["at the peak", "parameters", "activations", *(("forward", "backward") if timed else ())]
    if divided:
        columns.insert(2, "whole")
    table = NumberTable("largest modules (predicted)", *columns)
    for row in rows:
        label = Text("  " * row.indent).append_text(name_text(row.label))
        label.append(f" ({row.count} ×)" if row.count > 1 else "", "dim")
        if row.class_name != row.label:
            label.append(" ").append_text(name_text(row.class_name, "dim"))
        sizes = [row.held_bytes, row.parameter_bytes, row.activation_bytes]
        if divided:
            sizes.insert(2, row.whole_parameter_bytes)
        cells = [format_bytes(size) if size else Text("-", "dim") for size in sizes]
        if timed:
            cells += [format_seconds(row.forward_seconds), format_seconds(row.backward_seconds)]
        table.add_row(label, *cells)
    return table


def _time(time: StepTime, device: str, *, divided: bool) -> Text:
    """Say how long the step takes, how sure that is, and how well it uses the device."""
    span = f"{format_seconds(time.lower_seconds)} to {format_seconds(time.upper_seconds)}"
    line = Text("A step takes ").append(format_seconds(time.step_seconds), "bold")
    line.append(f" (predicted, likely {span}): ")
    recompute = f" ({format_seconds(time.recompute_seconds)} of it recomputation)"
    line.append(
        f"forward {format_seconds(time.forward_seconds)}, backward {format_seconds(time.backward_seconds)}"
        f"{recompute if time.recompute_seconds else ''}, optimizer {format_seconds(time.optimizer_seconds)}."
    )
    rates = _rates(time, divided=divided)
    rates.append(f"{time.flops_per_second / 1e12:.3g} TFLOP/s")
    if time.model_flops_utilisation is not None:
        rates.append(f"MFU {time.model_flops_utilisation:.1%}")
    line.append(f" {', '.join(rates)}.")
    line.append(communication_words(time))
    if time.launch_bound:
        line.append(
            f" Launch-bound: {device} waits {time.waiting_share:.0%} of the step for the host to issue "
            "kernels; a larger batch or torch.compile would use it better.",
            "yellow",
        )
    if time.uncalibrated_share >= _NOTICEABLE:
        line.append(f" {_uncalibrated(time)}")
    if time.unpriced:
        names = ", ".join(operator.name for operator in time.unpriced[:_MOST_UNPRICED])
        more = len(time.unpriced) - _MOST_UNPRICED
        names += f" and {more} more" if more > 0 else ""
        share = sum(operator.share for operator in time.unpriced)
        line.append(f" Without a formula, priced by the bytes they move ({share:.1%}): {names}.")
    return line


def _rates(time: StepTime, *, divided: bool) -> list[str]:
    """Return what is trained on in a second, of many ranks for each of them and in all."""
    rate, unit = time.total_tokens_per_second, "tokens"
    if rate is None:
        rate, unit = time.total_samples_per_second, "samples"
    if rate is None:
        return []
    if not divided:
        return [f"{_number(rate)} {unit}/s"]
    return [f"{_number(rate / time.world_size)} {unit}/s for each GPU, {_number(rate)} for all"]


def _number(rate: float) -> str:
    return format_count(round(rate)) if rate >= _WHOLE_ABOVE else f"{rate:.3g}"


def _uncalibrated(time: StepTime) -> str:
    """Say which share of the step rests on figures that were never compared with such a device."""
    found = list(time.uncalibrated.items())
    # Many kinds may be noticeable together, and none of them alone.
    shares = [(kind, share) for kind, share in found if share >= _NOTICEABLE] or found[:1]
    kinds = ", ".join(f"{kind} {share:.0%}" for kind, share in shares[:_MOST_UNPRICED])
    return f"{time.uncalibrated_share:.0%} of it rests on figures not calibrated on this device: {kinds}."


def _operators(time: StepTime, most: int) -> NumberTable:
    columns = ("calls", "time", "share", "bound by", "figure from")
    least = ("figure from", "bound by", "calls")
    table = NumberTable("longest operators (predicted)", *columns, least=least)
    for operator in time.operators[:most]:
        if operator.seconds:
            table.add_row(
                name_text(short_operator(operator.name)),
                format_count(operator.calls),
                format_seconds(operator.seconds),
                f"{operator.share:.1%}",
                operator.bound,
                operator.source,
            )
    return table


def _footer(subject: Subject) -> str:
    steps = subject.steps
    return (
        f"{format_count(subject.ops)} ops, captured for {subject.captured_for} in "
        f"{format_seconds(subject.seconds['capture'])} (run {steps.recorded} of {steps.looked_at}), "
        f"torch {subject.torch}"
    )
