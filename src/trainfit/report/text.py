"""Results as a person reads them: the answer first, then what it consists of. Plain text when piped."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trainfit.devices import Device
from trainfit.plan_origin import other_step
from trainfit.report.module_rows import largest_rows
from trainfit.settings import describe
from trainfit.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from trainfit.costs.summary import StepTime
    from trainfit.estimates import Estimate
    from trainfit.planning.baselines import Baseline
    from trainfit.planning.results import Frontier, PlanResult
    from trainfit.plans import Plan, Region
    from trainfit.trace import Trace
    from trainfit.verification import Comparison, Verification

_BAR_WIDTH = 24
_LEAST_WIDTH = 80
"""Numbers are never cut: on a narrower terminal the lines wrap instead."""
_LEAST_NAME_WIDTH = 18
_MOST_WARNINGS = 10
_MOST_DIFFERENCES = 5
_MOST_OPERATORS = 8
_MOST_KINDS = 10
_WHOLE_ABOVE = 100
_MOST_UNPRICED = 5
_FITS = {
    "fits": Text("yes", "green"),
    "too close to call": Text("close", "yellow"),
    "does not fit": Text("no", "red"),
}


def show(view: RenderableType, file: IO[str] | None = None) -> None:
    """Print a result: in colour on a terminal, as plain text elsewhere."""
    stream = file or sys.stdout
    console = Console(file=stream, highlight=False)
    needed = console.measure(view, options=console.options.update(max_width=10_000)).minimum
    console.width = max(console.width, _LEAST_WIDTH, needed)
    with console.capture() as captured:
        console.print(view)
    # Tables fill every line up with spaces, which are of no use in a file or a transcript.
    stream.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def estimate_view(estimate: Estimate) -> RenderableType:
    """Lay out an estimate: fits or not, what the peak consists of, where it is, the largest modules."""
    parts: list[RenderableType] = [
        _headline(estimate),
        *_settings(estimate.trace),
        Text(),
        _where(estimate),
        Text(),
        _categories(estimate.by_category, estimate.peak_bytes),
    ]
    if estimate.advice:
        parts += [Text(), Text("what would lower it", "yellow")]
        parts += [Padding(_safe(one.text), (0, 0, 0, 2)) for one in estimate.advice]
    modules = _modules(estimate)
    if modules is not None:
        parts += [Text(), modules]
    if estimate.time is not None:
        parts += [Text(), _time(estimate.time, estimate.device), Text(), _operators(estimate.time)]
    parts += _warnings(estimate.warnings)
    parts += [Text(), _estimate_footer(estimate)]
    return Group(*parts)


def plan_view(result: PlanResult) -> RenderableType:
    """Lay out a plan: does it fit, what it costs, how good it is, the usual ways beside it, its regions."""
    plan = result.plan
    parts: list[RenderableType] = [
        _plan_headline(result),
        *_settings(result.trace),
        Text(),
        _alternatives(result.baselines, plan),
    ]
    regions = _plan_regions(plan)
    if regions is not None:
        parts += [Text(), regions]
    parts += _warnings(result.warnings)
    parts += [Text(), _plan_footer(result)]
    return Group(*parts)


def frontier_view(frontier: Frontier) -> RenderableType:
    """Lay out a frontier: the least time for every peak."""
    table = _table("peak (predicted)", "step", "added", "regions", "fits")
    fastest = frontier.points[-1].step_seconds
    for point in frontier.points:
        table.add_row(
            format_bytes(point.peak_bytes),
            format_seconds(point.step_seconds),
            f"{point.step_seconds / fastest - 1:.1%}" if fastest else "-",
            format_count(len(point.plan.regions)),
            _FITS[frontier.device.verdict(point.peak_bytes)],
        )
    budget = frontier.device.default_budget_bytes
    best = next((p for p in reversed(frontier.points) if p.peak_bytes <= budget), None)
    line = _safe(frontier.trace.target, "bold").append(" on ").append_text(_safe(frontier.device.name))
    if best is None:
        line.append(": nothing fits", "bold red")
    else:
        line.append(f": the fastest that fits takes {format_seconds(best.step_seconds)} per step and ")
        line.append(format_bytes(best.peak_bytes), "bold").append(" (predicted)")
    parts: list[RenderableType] = [
        line,
        *_settings(frontier.trace),
        Text(),
        _whole_numbers(table),
    ]
    if frontier.device.margin_bytes:
        parts += [Text(), Text(f"close: within {_margin(frontier.device.margin_bytes)}", "dim")]
    return Group(*parts)


def _margin(margin_bytes: int) -> str:
    return f"the margin of {format_bytes(margin_bytes)} for the allocator's fragmentation and workspaces"


def _settings(trace: Trace) -> list[Text]:
    """Say in one line what the step is."""
    line = describe(trace.settings)
    return [_safe(line, "dim")] if line else []


def _plan_headline(result: PlanResult) -> Text:
    plan = result.plan
    line = _safe(plan.target, "bold").append(f" on {result.device.name}")
    if plan.world_size > 1:
        line.append(f", in each of {plan.world_size} processes")
    line.append(": ")
    if not result.feasible:
        line.append(f"no plan fits into {format_bytes(plan.budget_bytes)}", "bold red")
        return line.append(f"; the smallest peak is {format_bytes(plan.peak_bytes)} (predicted)")
    if not plan.regions:
        line.append("fits as it is", "bold green")
        both = f"{format_bytes(plan.peak_bytes)} of {format_bytes(plan.budget_bytes)}"
        return line.append(f": {both} (predicted)")
    line.append(f"{format_bytes(plan.peak_bytes)} of {format_bytes(plan.budget_bytes)}", "bold green")
    added = plan.added_seconds / plan.baseline_step_seconds if plan.baseline_step_seconds else 0.0
    line.append(f" at {format_seconds(plan.step_seconds)} per step, {added:+.1%} (predicted). ")
    return line.append(f"No plan of this kind is more than {plan.gap:.2%} faster.")


def _alternatives(baselines: Sequence[Baseline], plan: Plan) -> Table:
    table = _table("compared (predicted)", "peak", "step", "added", "fits")
    rows = [("this plan", plan.peak_bytes, plan.step_seconds)]
    rows += [(baseline.name, baseline.peak_bytes, baseline.step_seconds) for baseline in baselines]
    for name, peak, step in rows:
        added = step / plan.baseline_step_seconds - 1 if plan.baseline_step_seconds else 0.0
        fits = Text("yes", "green") if peak <= plan.budget_bytes else Text("no", "red")
        label = Text(name, "bold" if name == "this plan" else "")
        table.add_row(label, format_bytes(peak), format_seconds(step), f"{added:+.1%}", fits)
    return _whole_numbers(table)


def _plan_regions(plan: Plan) -> Table | None:
    """Return the regions with the same decisions as one line each."""
    if not plan.regions:
        return None
    table = _table("checkpointed", "calls", "keep", "recompute", "saved ops", "repeated", "skipped")
    by_kind: dict[int, list[Region]] = {}
    for region in plan.regions:
        by_kind.setdefault(region.kind, []).append(region)
    for kind, members in sorted(by_kind.items(), key=lambda item: -len(item[1]))[:_MOST_KINDS]:
        decisions = [op.decision for op in plan.kinds[kind].ops]
        first = members[0].module
        name = first if len(members) == 1 else f"{first} and {len(members) - 1} more"
        table.add_row(
            _safe(name),
            format_count(len(members)),
            format_bytes(sum(region.kept_bytes for region in members)),
            format_seconds(sum(region.recompute_seconds for region in members)),
            *(format_count(decisions.count(decision)) for decision in ("save", "recompute", "skip")),
        )
    return _whole_numbers(table)


def _plan_footer(result: PlanResult) -> Text:
    seconds = result.seconds
    reserve = result.plan.reserve_bytes
    aside = f"{format_bytes(reserve)} of the peak set aside: memory depends on data\n" if reserve else ""
    margin = f"budget: the device without {_margin(result.margin_bytes)}\n" if result.margin_bytes else ""
    return Text(
        f"{aside}{margin}{format_count(len(result.trace.ops))} ops, "
        f"captured in {format_seconds(seconds['capture'])}, "
        f"solved in {format_seconds(seconds['solve'])}, torch {result.trace.torch}",
        "dim",
    )


def verification_view(verification: Verification) -> RenderableType:
    """Lay out a verification: how far off the prediction was, and the figures side by side."""
    predicted, measured = verification.predicted_peak_bytes, verification.measured
    if measured.compiled:
        table, compare = _table("", "eager, predicted", "compiled, measured", "ratio"), _ratio
    else:
        table, compare = _table("", "predicted", "measured", "error"), _error
    table.add_row("peak", *_both(predicted, measured.peak_bytes), compare(predicted, measured.peak_bytes))
    table.add_row(
        "before the step",
        *_both(verification.predicted_persistent_bytes, measured.persistent_bytes),
        compare(verification.predicted_persistent_bytes, measured.persistent_bytes),
    )
    ratio = verification.predicted_seconds / measured.seconds if measured.seconds else 1.0
    table.add_row(
        "step time",
        Text(format_seconds(verification.predicted_seconds)),
        Text(format_seconds(measured.seconds)),
        Text(f"{ratio:.2f} x" if measured.compiled else f"{ratio - 1:+.1%}"),
    )
    comparison = verification.comparison
    if comparison is not None:
        baseline = comparison.baseline
        table.add_row("peak without the plan", "", format_bytes(baseline.peak_bytes), "")
        table.add_row("step time without the plan", "", format_seconds(baseline.seconds), "")
    seconds = verification.seconds
    footer = Text(
        f"predicted in {format_seconds(seconds['capture'])} from {format_count(len(verification.trace.ops))} "
        f"ops, measured in {format_seconds(seconds['measure'])} ({_times(verification.runs['total'])} of the "
        f"step), torch {verification.trace.torch}",
        "dim",
    )
    parts = [
        _verdict(verification),
        *_settings(verification.trace),
        *([_safe(other, "yellow")] if (other := other_step(verification.plan_differences)) else []),
        *([] if comparison is None else _same_results(comparison)),
        Text(),
        _whole_numbers(table),
        *_warnings(verification.warnings),
        Text(),
        footer,
    ]
    return Group(*parts)


def devices_view(devices: Sequence[Device]) -> RenderableType:
    """Lay out the device table."""
    table = _table("device", "memory", "usable", "GB/s", "fp32", "bf16", "architecture")
    for device in devices:
        table.add_row(
            device.name,
            format_bytes(device.memory_bytes),
            format_bytes(device.usable_bytes),
            _rate(device.bandwidth_bytes_per_second, 1e9),
            _rate(device.flops.get("fp32"), 1e12),
            _rate(device.flops.get("bf16"), 1e12),
            device.architecture,
        )
    note = "usable: without the CUDA context. GB/s: memory bandwidth. fp32, bf16: dense peak TFLOP/s."
    return Group(_whole_numbers(table), Text(), Text(note, "dim"))


def device_view(device: Device) -> RenderableType:
    """Lay out everything known about one device."""
    rows = {
        "memory": format_bytes(device.memory_bytes),
        "usable for tensors": format_bytes(device.usable_bytes),
        "margin": format_bytes(device.margin_bytes),
        "bandwidth": _rate(device.bandwidth_bytes_per_second, 1e9, "GB/s"),
        **{f"{dtype} dense": _rate(rate, 1e12, "TFLOP/s") for dtype, rate in device.flops.items()},
        "fastest matrix product": f"{device.matmul_share:.0%} of the peak" if device.matmul_share else "-",
        "step times": "calibrated on published ones" if device.calibrated else "not calibrated",
        "last-level cache": format_bytes(device.cache_bytes) if device.cache_bytes else "-",
        "multiprocessors" if device.kind == "cuda" else "cores": str(device.sm_count or "unknown"),
        "architecture": device.architecture or "unknown",
        "link to its neighbours": _rate(device.nvlink_bytes_per_second, 1e9, "GB/s one way"),
        "link to the host": _rate(device.pcie_bytes_per_second, 1e9, "GB/s one way"),
        "source": device.source,
    }
    table = Table.grid(padding=(0, 3))
    for label, value in rows.items():
        table.add_row(Text(label, "dim"), _safe(value))
    return Group(_safe(device.name, "bold"), table)


def _headline(estimate: Estimate) -> Text:
    device = estimate.device
    line = Text().append_text(_safe(estimate.target, "bold")).append(": peak ")
    line.append(format_bytes(estimate.peak_bytes), "bold").append(" (predicted), ")
    spare = estimate.spare_bytes
    if estimate.verdict == "fits":
        line.append_text(_safe(f"fits in {device.name}", "bold green"))
        line.append(f": {format_bytes(spare)} free")
    elif estimate.verdict == "does not fit":
        line.append_text(_safe(f"does not fit in {device.name}", "bold red"))
        line.append(f": {format_bytes(-spare)} missing")
    else:
        line.append_text(_safe(f"too close to call in {device.name}", "bold yellow"))
        line.append(f": {format_bytes(spare)} free, less than {_margin(device.margin_bytes)}")
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
        return _safe(f"The peak is what is there before the step. {before}")
    module = "outside of any module" if peak.module == "Global" else f"in {peak.module}"
    place = f"The peak is in the {peak.phase}, {module}, at {peak.op} (op {format_count(peak.op_index)}"
    return _safe(f"{place} of {format_count(len(estimate.trace.ops))}). {before}")


def _categories(by_category: dict[str, int], peak_bytes: int) -> Table:
    table = _table("at the peak (predicted)", "bytes", "share")
    table.add_column("")
    for name, size in sorted(by_category.items(), key=lambda item: -item[1]):
        if size:
            share = size / peak_bytes
            bar = Text("█" * round(share * _BAR_WIDTH) or "▏", "cyan")
            table.add_row(name.replace("_", " "), format_bytes(size), f"{share:.1%}", bar)
    return _whole_numbers(table)


def _modules(estimate: Estimate) -> Table | None:
    rows = largest_rows(estimate.modules)
    if not rows:
        return None
    timed = estimate.time is not None
    columns = ("at the peak", "parameters", "activations", *(("forward", "backward") if timed else ()))
    table = _table("largest modules (predicted)", *columns)
    for row in rows:
        label = _safe("  " * row.indent + row.short_label)
        label.append(f" ({len(row.members)} ×)" if len(row.members) > 1 else "", "dim")
        if row.class_name != row.short_label:
            label.append_text(_safe(f" {row.class_name}", "dim"))
        sizes = (row.held_bytes, row.parameter_bytes, row.activation_bytes)
        cells = [format_bytes(size) if size else Text("-", "dim") for size in sizes]
        if timed:
            cells += [format_seconds(row.forward_seconds), format_seconds(row.backward_seconds)]
        table.add_row(label, *cells)
    return _whole_numbers(table)


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


def _operators(time: StepTime) -> Table:
    table = _table("longest operators (predicted)", "calls", "time", "share", "bound by", "figure")
    for operator in time.operators[:_MOST_OPERATORS]:
        if operator.seconds:
            name = operator.name.removeprefix("aten.").removesuffix(".default")
            table.add_row(
                _safe(name),
                format_count(operator.calls),
                format_seconds(operator.seconds),
                f"{operator.share:.1%}",
                operator.bound,
                operator.source,
            )
    return _whole_numbers(table)


def _estimate_footer(estimate: Estimate) -> Text:
    return Text(
        f"{format_count(len(estimate.trace.ops))} ops, captured for {estimate.trace.device} in "
        f"{format_seconds(estimate.seconds['capture'])}, torch {estimate.trace.torch}",
        "dim",
    )


def _verdict(verification: Verification) -> Text:
    line = _safe(verification.target, "bold").append(f" on {verification.device.name}: ")
    if verification.measured.compiled:
        return line.append_text(_compiled_verdict(verification))
    line.append("the predicted peak is ")
    if verification.predicted_peak_bytes == verification.measured.peak_bytes:
        return line.append("exact", "bold green").append(
            f" ({format_count(verification.measured.peak_bytes)} bytes)"
        )
    direction = "high" if verification.error > 0 else "low"
    difference = abs(verification.predicted_peak_bytes - verification.measured.peak_bytes)
    line.append(f"{_percent(abs(verification.error))} too {direction}", "bold yellow")
    return line.append(f" ({format_count(difference)} bytes)")


def _compiled_verdict(verification: Verification) -> Text:
    """Say both peaks: that of a compiled step is nobody's prediction."""
    predicted, measured = verification.predicted_peak_bytes, verification.measured.peak_bytes
    line = Text("the step is compiled and has a peak of ")
    line.append(format_bytes(measured), "bold").append(" (measured); the eager step has ")
    line.append(format_bytes(predicted), "bold")
    line.append(f" (predicted), {predicted / max(measured, 1):.2f} times that. ")
    return line.append("--eager measures the eager step.")


def _same_results(comparison: Comparison) -> list[RenderableType]:
    """Say whether the plan changed the results, where, and what was not compared."""
    results = comparison.results
    line = Text("With the plan the loss is ").append_text(_equality(comparison.loss_equal))
    line.append(", the gradients are ").append_text(_equality(comparison.gradients_equal))
    line.append(", parameters and buffers afterwards are ").append_text(_equality(comparison.state_equal))
    line.append(" (bit by bit, measured).")
    if comparison.gradients_equal is False and math.isfinite(comparison.max_gradient_difference):
        relative = comparison.max_gradient_difference / (results.gradient_scale or 1.0)
        line.append(f" Gradients are up to {relative:.1e} of the largest apart.")
    parts: list[RenderableType] = [line]
    for title, lines in (("not equal", results.differences), ("not compared", results.not_compared)):
        parts += [Padding(_safe(f"{title}: {text}"), (0, 0, 0, 2)) for text in lines[:_MOST_DIFFERENCES]]
        if len(lines) > _MOST_DIFFERENCES:
            parts.append(Text(f"  and {len(lines) - _MOST_DIFFERENCES} more; --json lists all", "dim"))
    return parts


def _equality(equal: bool | None) -> Text:
    if equal is None:
        return Text("not compared", "yellow")
    return Text("equal", "green") if equal else Text("NOT equal", "bold red")


def _both(predicted: int, measured: int) -> tuple[Text, Text]:
    return Text(format_bytes(predicted)), Text(format_bytes(measured))


def _times(runs: int) -> str:
    return "1 run" if runs == 1 else f"{runs} runs"


def _ratio(predicted: int, measured: int) -> Text:
    return Text(f"{predicted / measured:.2f} x" if measured else "-")


def _error(predicted: int, measured: int) -> Text:
    if predicted == measured:
        return Text("exact", "green")
    if measured == 0:
        return Text(f"+{format_count(predicted)} B", "yellow")
    error = (predicted - measured) / measured
    return Text(f"{'+' if error > 0 else '-'}{_percent(abs(error))}", "yellow")


def _percent(share: float) -> str:
    """Write a share with enough digits to show that it is not zero."""
    percent = 100 * share
    return f"{percent:.2f} %" if percent >= 0.01 else f"{percent:.1g} %"


def _rate(value: float | None, factor: float, unit: str = "") -> str:
    return "-" if value is None else f"{value / factor:,.6g} {unit}".rstrip()


def _warnings(warnings: Sequence[str]) -> list[RenderableType]:
    counts: dict[str, int] = {}
    for warning in warnings:
        counts[warning] = counts.get(warning, 0) + 1
    if not counts:
        return []
    parts: list[RenderableType] = [Text(), Text("notes", "yellow")]
    for warning, count in list(counts.items())[:_MOST_WARNINGS]:
        times = f" ({count} times)" if count > 1 else ""
        parts.append(Padding(_safe(f"{warning}{times}"), (0, 0, 0, 2)))
    if len(counts) > _MOST_WARNINGS:
        parts.append(Text(f"  and {len(counts) - _MOST_WARNINGS} more; --json lists all", "dim"))
    return parts


def _table(first: str, *numbers: str) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(first, overflow="fold")
    for number in numbers:
        table.add_column(number, justify="right", no_wrap=True)
    return table


def _whole_numbers(table: Table) -> Table:
    """Make every column after the first wide enough for its cells: rich would cut them short."""
    console = Console(width=10_000)
    for column in table.columns[1:]:
        cells = [column.header, *column.cells]
        column.min_width = max(console.measure(cell).maximum for cell in cells)
    table.columns[0].min_width = _LEAST_NAME_WIDTH
    return table


def _safe(text: str, style: str = "") -> Text:
    """Return text that stands for itself: no markup, and nothing that would steer the terminal."""
    return Text(
        "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text), style
    )
