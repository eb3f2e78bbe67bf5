"""A model on clusters of several sizes as a person reads it: the best mesh of each, then why others lose."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from trainfit.basics.units import format_bytes, format_count, format_seconds
from trainfit.report.amounts import Amount, at_most, stage_times, verdict_alone
from trainfit.report.scale_data import MeshRow, ScaleData, SizeOfCluster
from trainfit.report.tables import MOST_WARNINGS, Cell, NumberTable, safe, stacked

_NOTHING = Text("-", "dim")
_WHOLE_ABOVE = 100
_MOST_SHOWN = 2
"""How many other meshes are shown for each size."""
_PART_WORDS = {
    "compute": "computing",
    "recompute": "recomputing",
    "fsdp": "exposed fsdp",
    "replicate": "exposed replicate",
    "cp": "exposed cp",
    "ep": "exposed ep",
    "tp": "exposed tp",
    "bubble": "bubble",
    "sent": "sends between stages",
    "host": "waiting for the host",
    "optimizer": "optimizer",
}


def scale_view(data: ScaleData, amount: Amount = "usual") -> RenderableType:
    """Lay out what was found: the answer, the best mesh of each size, and why the others lose."""
    if amount == "verdict":
        return verdict_alone(_scale_headline(data), data.warnings)
    described = [safe(data.description, "dim")] if data.description else []
    return stacked(
        [_scale_headline(data), *described],
        [_best_meshes(data)],
        [_where_time_goes(data)] if any(one.winner for one in data.sizes) else [],
        _others(data, at_most(_MOST_SHOWN, amount)),
        stage_times(data.seconds, amount),
        warnings=data.warnings,
        most_warnings=at_most(MOST_WARNINGS, amount),
        footer=_scale_footer(data),
    )


def _scale_headline(data: ScaleData) -> Text:
    line = Text().append_text(safe(data.target, "bold")).append(f" on {data.device}: ")
    fitting = [one for one in data.sizes if one.winner is not None]
    if not fitting:
        return line.append("fits on none of these sizes (predicted)", "bold red")
    smallest, fastest = fitting[0], fitting[-1]
    line.append(f"fits from {format_count(smallest.world_size)} GPUs on (predicted)")
    best = data.size(data.most_efficient)
    if best is not None and best.winner is not None:
        line.append(", uses them best at ").append(format_count(best.world_size), "bold green")
        line.append(f" ({best.winner.words}, {_rate_words(best.winner, best.world_size)} for each)")
    if fastest is not best and fastest.winner is not None:
        line.append(f", and at {format_count(fastest.world_size)} with {fastest.winner.words}")
        line.append(f" ({fastest.efficiency or 0.0:.0%} of that)")
    return line


def _rate_words(row: MeshRow, ranks: int) -> str:
    if row.tokens_per_second_per_gpu is not None:
        return f"{_number(row.tokens_per_second_per_gpu)} tokens/s"
    return f"{_number((row.samples_per_second or 0.0) / ranks)} samples/s"


def _best_meshes(data: ScaleData) -> NumberTable:
    by_tokens = any(one.winner is not None and one.winner.tokens_per_second for one in data.sizes)
    unit = "tokens/s" if by_tokens else "samples/s"
    table = NumberTable(
        "GPUs  best mesh",
        *("batch", f"{unit}/GPU", "step", "MFU", "recompute", "runs in", unit, "efficiency", "figures"),
        whole_names=True,
    )
    for one in data.sizes:
        name = f"{one.world_size:>4}  "
        row = one.winner
        if row is None:
            table.add_row(Text(name + "nothing fits", "red"), *[_NOTHING] * 9)
            continue
        rates = (row.tokens_per_second if by_tokens else row.samples_per_second) or 0.0
        times = f" x {row.accumulation}" if row.accumulation > 1 else ""
        mfu: Cell = _NOTHING
        if row.model_flops_utilisation is not None:
            mfu = f"{row.model_flops_utilisation:.1%}"
        table.add_row(
            safe(name + row.words, "" if one.on_frontier else "dim"),
            f"{row.micro_batch}{times}",
            _number(rates / one.world_size),
            format_seconds(row.step_seconds or 0.0),
            mfu,
            row.recompute,
            format_bytes(row.memory_bytes),
            _number(rates),
            _NOTHING if one.efficiency is None else f"{one.efficiency:.0%}",
            row.source,
        )
    return table


def _where_time_goes(data: ScaleData) -> NumberTable:
    """Lay out what the step of each best mesh consists of, as shares."""
    there = [one for one in data.sizes if one.winner is not None]
    names = [name for name in _PART_WORDS if any(_share(one, name) >= 0.0005 for one in there)]
    table = NumberTable("GPUs", *(_PART_WORDS[name] for name in names))
    for one in there:
        table.add_row(f"{one.world_size:>4}", *(f"{_share(one, name):.1%}" for name in names))
    return table


def _share(one: SizeOfCluster, name: str) -> float:
    if one.winner is None or not one.winner.step_seconds:
        return 0.0
    return one.winner.parts.get(name, 0.0) / one.winner.step_seconds


def _others(data: ScaleData, most: int) -> list[RenderableType]:
    """Say why others lose: the next best ones of each size, and the last that does not fit."""
    found: list[RenderableType] = []
    for one in data.sizes:
        shown = [row for row in one.others if row.fits][:most]
        shown += [row for row in one.others if not row.fits][: max(most - len(shown), 1)]
        for row in shown:
            batch = f", batch {row.micro_batch}" if row.fits and not row.mesh.get("pp") else ""
            found.append(safe(f"  {one.world_size:>4}  {row.words}{batch}: {row.reason}"))
    return [Text("why not another mesh", "bold"), *found] if found else []


def _is_confirmed(one: SizeOfCluster) -> bool:
    return one.winner is not None and one.winner.source == "confirmed"


def _number(value: float) -> str:
    return format_count(round(value)) if value >= _WHOLE_ABOVE else f"{value:.3g}"


def _scale_footer(data: ScaleData) -> str:
    parts = []
    if data.global_batch is not None:
        parts.append(f"a step of all GPUs trains on {data.global_batch_words}")
    else:
        parts.append("no --global-batch: the micro-batch is the fastest, without accumulation")
    if data.layers_captured:
        depths = " and ".join(map(str, data.layers_captured))
        whole = [format_count(one.world_size) for one in data.sizes if _is_confirmed(one)]
        confirmed = f"captured whole: the best mesh of {', '.join(whole)} GPUs; " if whole else ""
        parts.append(f"{confirmed}all else is derived: worked out from captures with {depths} layers")
    taken = f"{format_count(data.captures)} captures, {data.gpus_per_node} GPUs per node"
    return f"{'; '.join([*parts, taken])}, torch {data.torch}"
