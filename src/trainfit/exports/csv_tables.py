"""`--csv`: every table of a result as a file of its own, for spreadsheets and scripts.

The tables are those of the JSON result: a list of objects is a table, an object of figures is one with two
columns, and what is left is in `summary.csv`. A step has `memory.csv` besides: one row for every op. Figures
are exact: bytes are whole numbers, seconds have all their digits, and a column's name ends in its unit.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainfit.costs.estimates import Estimate
from trainfit.exports.shown_step import ShownStep
from trainfit.exports.table_folder import write_folder
from trainfit.planning.plan_results import PlanResult
from trainfit.report.json_result import result_json
from trainfit.report.sizes_data import SeveralSteps
from trainfit.traces.trace import CATEGORIES

Row = dict[str, Any]
Tables = dict[str, list[Row]]

_PAIRS = {
    "by_category": ("category", "bytes"),
    "seconds": ("stage", "seconds"),
    "libraries": ("library", "bytes"),
    "cost_sources": ("source", "share_of_device_time"),
    "uncalibrated": ("kind", "share_of_step"),
    "methods": ("method", "peak_bytes"),
    "mesh": ("dimension", "ranks"),
    "settings": ("setting", "value"),
}
"""Objects that are tables with two columns, and what these are called."""
_NAMES = {"baselines": "usual_ways", "points": "frontier", "seconds": "wall_time"}
"""Tables whose key says less than its name could."""


def write_tables(data: Any, result: object, folder: str | Path) -> None:
    """Write what a reader sees of a result (`report/data.py`) into a folder, which is made if need be."""
    files = {f"{name}.csv": csv_text(rows) for name, rows in tables_of(data, result).items()}
    write_folder(Path(folder), files)


def tables_of(data: Any, result: object = None) -> Tables:
    """Return all tables by name; those without rows are left out."""
    if isinstance(data, SeveralSteps):
        return {"steps": [asdict(row) for row in data.rows]}
    tables: Tables = {"summary": []}
    for key, value in result_json(data).items():
        name = _NAMES.get(key, key)
        if key in _PAIRS and isinstance(value, dict):
            columns = _PAIRS[key]
            tables[name] = [dict(zip(columns, pair)) for pair in _flat(value).items()]
        elif isinstance(value, dict) and value and all(isinstance(part, list) for part in value.values()):
            tables[name] = list(_lists(key.removesuffix("s"), value))
        elif isinstance(value, list) and all(isinstance(row, dict) for row in value):
            tables[name] = [_flat(row) for row in value]
        elif isinstance(value, list):
            tables[name] = [{"number": number, "text": text} for number, text in enumerate(value)]
        else:
            tables["summary"] += [{"name": n, "value": v} for n, v in _flat({key: value}).items()]
    if isinstance(result, Estimate | PlanResult):
        tables["memory"] = list(_memory_rows(ShownStep.of(result)))
    return {name: rows for name, rows in tables.items() if rows}


def csv_text(rows: Sequence[Row]) -> str:
    """Return a table as RFC 4180 has it: a line of names first, lines that end in CR LF."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow(columns)
    writer.writerows([_cell(row.get(column)) for column in columns] for row in rows)
    return text.getvalue()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value) if isinstance(value, list | dict) else str(value)


def _flat(value: dict[str, Any], before: str = "") -> Row:
    """Return an object with what is inside of its objects, under names such as `peak.module`."""
    found: Row = {}
    for name, part in value.items():
        if isinstance(part, dict) and part:
            found |= _flat(part, f"{before}{name}.")
        else:
            found[before + name] = None if part == {} else part
    return found


def _lists(what: str, value: dict[str, Any]) -> Iterator[Row]:
    """Yield lists that have names as one table."""
    for name, parts in value.items():
        for number, part in enumerate(parts):
            yield {what: name, "number": number, "text": part}


def _memory_rows(step: ShownStep) -> Iterator[Row]:
    """Yield bytes in use while each op runs, and when it runs where that is known."""
    timeline, trace = step.timeline, step.timeline.trace
    times, schedule = step.op_times, step.times
    for number, op in enumerate(trace.ops):
        row: Row = {
            "op": number,
            "operator": trace.op_name(number),
            "module": trace.module_name(op.module),
            "phase": op.phase,
            "recompute": op.recompute,
            "queue": op.queue,
        }
        if times is not None and schedule is not None:
            row["begin_seconds"] = float(times.begin[number])
            row["device_seconds"] = float(schedule.device_seconds[number])
            row["host_seconds"] = float(schedule.host_seconds[number])
        now = timeline.categories_at(number)
        row |= {f"{category}_bytes": now[category] for category in CATEGORIES}
        yield {**row, "total_bytes": int(timeline.used_bytes[number])}
