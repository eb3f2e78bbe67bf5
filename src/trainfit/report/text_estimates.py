"""Estimates as a person reads them: the answer first, then what it consists of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from trainfit.devices import Device
from trainfit.report.module_rows import largest_rows
from trainfit.report.tables import NumberTable, margin_words, safe, settings_lines, warning_lines
from trainfit.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from trainfit.costs.summary import StepTime
    from trainfit.estimates import Estimate

_BAR_WIDTH = 24
_MOST_OPERATORS = 8
_WHOLE_ABOVE = 100
_MOST_UNPRICED = 5


def estimate_view(estimate: Estimate) -> RenderableType:
    """Lay out an estimate: fits or not, what the peak consists of, where it is, the largest modules."""
    parts: list[RenderableType] = [
        _headline(estimate),
        *settings_lines(estimate.trace),
        Text(),
        _where(estimate),
        Text(),
        _categories(estimate.by_category, estimate.peak_bytes),
    ]
    if estimate.advice:
        parts += [Text(), Text("what would lower it", "yellow")]
        parts += [Padding(safe(one.text), (0, 0, 0, 2)) for one in estimate.advice]
    modules = _modules(estimate)
    if modules is not None:
        parts += [Text(), modules]
    if estimate.time is not None:
        parts += [Text(), _time(estimate.time, estimate.device), Text(), _operators(estimate.time)]
    parts += warning_lines(estimate.warnings)
    parts += [Text(), _estimate_footer(estimate)]
    return Group(*parts)


def _headline(estimate: Estimate) -> Text:
    device = estimate.device
    line = Text().append_text(safe(estimate.target, "bold")).append(": peak ")
    line.append(format_bytes(estimate.peak_bytes), "bold").append(" (predicted), ")
    spare = estimate.spare_bytes
    if estimate.verdict == "fits":
        line.append_text(safe(f"fits in {device.name}", "bold green"))
        line.append(f": {format_bytes(spare)} free")
    elif estimate.verdict == "does not fit":
        line.append_text(safe(f"does not fit in {device.name}", "bold red"))
        line.append(f": {format_bytes(-spare)} missing")
    else:
        line.append_text(safe(f"too close to call in {device.name}", "bold yellow"))
        line.append(f": {format_bytes(spare)} free, less than {margin_words(device.margin_bytes)}")
    if estimate.time is not None:
        line.append("; ").append(format_seconds(estimate.time.step_seconds), "bold").append(" per step")
    return line


def _where(estimate: Estimate) -> Text:
    peak = estimate.peak
    before = (
        f"Before the step {format_bytes(estimate.timeline.persistent_bytes)} are in use (predicted). "
        f"{estimate.device.name} has {format_bytes(estimate.device.usable_bytes)} for tensors."
    )
    if peak.op_index < 0:
        return safe(f"The peak is what is there before the step. {before}")
    module = "outside of any module" if peak.module == "Global" else f"in {peak.module}"
    place = f"The peak is in the {peak.phase}, {module}, at {peak.op} (op {format_count(peak.op_index)}"
    return safe(f"{place} of {format_count(len(estimate.trace.ops))}). {before}")


def _categories(by_category: dict[str, int], peak_bytes: int) -> NumberTable:
    table = NumberTable("at the peak (predicted)", "bytes", "share", last="")
    for name, size in sorted(by_category.items(), key=lambda item: -item[1]):
        if size:
            share = size / peak_bytes
            bar = Text("█" * round(share * _BAR_WIDTH) or "▏", "cyan")
            table.add_row(name.replace("_", " "), format_bytes(size), f"{share:.1%}", bar)
    return table


def _modules(estimate: Estimate) -> NumberTable | None:
    rows = largest_rows(estimate.modules)
    if not rows:
        return None
    timed = estimate.time is not None
    columns = ("at the peak", "parameters", "activations", *(("forward", "backward") if timed else ()))
    table = NumberTable("largest modules (predicted)", *columns)
    for row in rows:
        label = safe("  " * row.indent + row.short_label)
        label.append(f" ({len(row.members)} ×)" if len(row.members) > 1 else "", "dim")
        if row.class_name != row.short_label:
            label.append_text(safe(f" {row.class_name}", "dim"))
        sizes = (row.held_bytes, row.parameter_bytes, row.activation_bytes)
        cells = [format_bytes(size) if size else Text("-", "dim") for size in sizes]
        if timed:
            cells += [format_seconds(row.forward_seconds), format_seconds(row.backward_seconds)]
        table.add_row(label, *cells)
    return table


def _time(time: StepTime, device: Device) -> Text:
    """Say how long the step takes, how sure that is, and how well it uses the device."""
    span = f"{format_seconds(time.lower_seconds)} to {format_seconds(time.upper_seconds)}"
    line = Text("A step takes ").append(format_seconds(time.step_seconds), "bold")
    line.append(f" (predicted, likely {span}): ")
    recompute = f" ({format_seconds(time.recompute_seconds)} of it recomputation)"
    line.append(
        f"forward {format_seconds(time.forward_seconds)}, backward {format_seconds(time.backward_seconds)}"
        f"{recompute if time.recompute_seconds else ''}, optimizer {format_seconds(time.optimizer_seconds)}."
    )
    rates = [
        f"{format_count(round(rate)) if rate >= _WHOLE_ABOVE else f'{rate:.3g}'} {unit}/s"
        for rate, unit in ((time.tokens_per_second, "tokens"), (time.samples_per_second, "samples"))
        if rate is not None
    ][:1]
    rates.append(f"{time.flops_per_second / 1e12:.3g} TFLOP/s")
    if time.model_flops_utilisation is not None:
        rates.append(f"MFU {time.model_flops_utilisation:.1%}")
    line.append(f" {', '.join(rates)}.")
    if time.launch_bound:
        line.append(
            f" Launch-bound: {device.name} waits {time.waiting_share:.0%} of the step for the host to issue "
            "kernels; a larger batch or torch.compile would use it better.",
            "yellow",
        )
    if time.unpriced:
        names = ", ".join(operator.name for operator in time.unpriced[:_MOST_UNPRICED])
        more = (
            f" and {len(time.unpriced) - _MOST_UNPRICED} more" if len(time.unpriced) > _MOST_UNPRICED else ""
        )
        share = sum(operator.share for operator in time.unpriced)
        line.append(f" Without a formula, priced by the bytes they move ({share:.1%}): {names}{more}.")
    return line


def _operators(time: StepTime) -> NumberTable:
    table = NumberTable("longest operators (predicted)", "calls", "time", "share", "bound by", "figure")
    for operator in time.operators[:_MOST_OPERATORS]:
        if operator.seconds:
            name = operator.name.removeprefix("aten.").removesuffix(".default")
            table.add_row(
                safe(name),
                format_count(operator.calls),
                format_seconds(operator.seconds),
                f"{operator.share:.1%}",
                operator.bound,
                operator.source,
            )
    return table


def _estimate_footer(estimate: Estimate) -> Text:
    steps = estimate.trace.steps
    return Text(
        f"{format_count(len(estimate.trace.ops))} ops, captured for {estimate.trace.device} in "
        f"{format_seconds(estimate.seconds['capture'])} (run {steps.recorded} of {steps.looked_at}), "
        f"torch {estimate.trace.torch}",
        "dim",
    )
