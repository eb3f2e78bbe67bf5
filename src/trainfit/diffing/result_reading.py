"""Results as far as they are compared: from a file that `--json` wrote, a trace, or a result of the API.

Files are not trusted: every value that is used has the type that it should have, or one message says which
has not.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainfit.basics.decoding import Malformed, decode
from trainfit.basics.sealed_files import read_json
from trainfit.costs.estimates import Estimate, peak_of
from trainfit.devices.device_table import Device
from trainfit.errors import FileFormatError, OptionError
from trainfit.memory.module_stats import module_stats
from trainfit.planning.plan_results import PlanResult
from trainfit.report.json_result import SCHEMA, result_json
from trainfit.report.reading import estimate_data, plan_data
from trainfit.traces.settings import settings_json
from trainfit.traces.simulate import simulate
from trainfit.traces.trace import Trace
from trainfit.traces.trace_store import load_trace

_DEEPEST = 200
"""Modules inside of each other; no model has as many."""
Comparable = str | Path | Trace | Estimate | PlanResult
"""What `diff` takes."""


@dataclass(frozen=True)
class ReadModule:
    """A module with all inside of it."""

    name: str
    class_name: str
    depth: int
    parameter_bytes: int
    buffer_bytes: int
    activation_bytes: int
    at_peak_bytes: int
    forward_seconds: float | None = None
    backward_seconds: float | None = None


@dataclass(frozen=True)
class ReadOperator:
    """All calls of an operator."""

    name: str
    calls: int
    seconds: float | None = None


@dataclass(frozen=True)
class ReadRegion:
    """A region of a plan."""

    module: str
    kept_bytes: int
    recompute_seconds: float


@dataclass(frozen=True)
class ReadPeak:
    """Where the peak is."""

    op: str = ""
    module: str = ""
    phase: str = ""


@dataclass(frozen=True)
class ResultReading:
    """One side of a comparison. What the kind of result does not say is None or empty."""

    target: str
    device: str
    torch: str
    ops: int
    peak_bytes: int
    by_category: dict[str, int]
    schema: int = SCHEMA
    world_size: int = 1
    rank: int = 0
    mesh: dict[str, int] = field(default_factory=dict)
    persistent_bytes: int | None = None
    allocated_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    smallest_memory_bytes: int | None = None
    budget_bytes: int | None = None
    step_seconds: float | None = None
    forward_seconds: float | None = None
    backward_seconds: float | None = None
    optimizer_seconds: float | None = None
    recompute_seconds: float | None = None
    communication_seconds: float | None = None
    flops: int | None = None
    peak: ReadPeak = ReadPeak()
    modules: tuple[ReadModule, ...] = ()
    operators: tuple[ReadOperator, ...] = ()
    regions: tuple[ReadRegion, ...] = ()


@dataclass(frozen=True)
class NamedReading:
    """A reading, what it is of, and the settings that the step had."""

    name: str
    kind: str
    """`estimate`, `plan` or `trace`."""
    reading: ResultReading
    settings: dict[str, Any]


def read_side(given: Comparable, name: str, device: str | Device | None) -> NamedReading:
    """Read one side; `device` is where the step of a trace is to run, if its time is to be compared."""
    if isinstance(given, Estimate):
        return _of_document(_as_written(estimate_data(given)), name)
    if isinstance(given, PlanResult):
        return _of_document(_as_written(plan_data(given)), name)
    if isinstance(given, Trace):
        return _of_trace(given, name, device)
    if not isinstance(given, str | Path):
        raise OptionError(
            "diff compares files that --json or --save-trace wrote, estimates and traces, got "
            f"{type(given).__name__}."
        )
    path = Path(given)
    document = read_json(path)
    if isinstance(document, dict) and document.get("format") == "trainfit-trace":
        return _of_trace(load_trace(path), str(given), device)
    return _of_document(document, str(given))


def _as_written(data: Any) -> Any:
    """Return a result as its file has it, of plain types only."""
    return json.loads(json.dumps(result_json(data)))


def _of_document(document: Any, name: str) -> NamedReading:
    kind = _kind(document)
    if kind is None:
        raise FileFormatError(
            f"{name} is neither a result of `trainfit estimate` or `trainfit plan` (--json FILE) nor a trace "
            "(--save-trace FILE)."
        )
    try:
        reading = decode(ResultReading, document, defaults=True, surplus=True)
        _check(reading)
    except Malformed as error:
        raise FileFormatError(f"{name} is not a result that can be compared: {error}.") from None
    settings = document.get("settings")
    return NamedReading(name, kind, reading, settings if isinstance(settings, dict) else {})


def _kind(document: Any) -> str | None:
    """Tell what a result is by what only such results have."""
    if not isinstance(document, dict) or document.get("schema") != SCHEMA or "format" in document:
        return None
    if "feasible" in document and "regions" in document:
        return "plan"
    return "estimate" if "modules" in document and "operators" in document else None


def _check(reading: ResultReading) -> None:
    """Refuse a tree of modules that is none, and less than nothing."""
    last = -1
    for number, module in enumerate(reading.modules):
        if not 0 <= module.depth <= min(last + 1, _DEEPEST):
            raise Malformed(
                f"a module of depth {module.depth} cannot follow one of {last}", f"modules[{number}]"
            )
        last = module.depth
    if reading.peak_bytes < 0:
        raise Malformed("a peak is not negative", "peak_bytes")


def _of_trace(trace: Trace, name: str, device: str | Device | None) -> NamedReading:
    if device is not None:
        from trainfit.api.predict import estimate  # loads torch, which results do not need

        found = _of_document(_as_written(estimate_data(estimate(trace, device=device))), name)
        return NamedReading(name, "trace", found.reading, found.settings)
    timeline = simulate(trace)
    peak = peak_of(timeline)
    calls = Counter(
        trace.op_name(number)
        for number, op in enumerate(trace.ops)
        if not trace.signatures[op.signature].view
    )
    reading = ResultReading(
        target=trace.target,
        device=trace.device,
        torch=trace.torch,
        ops=len(trace.ops),
        peak_bytes=timeline.peak_bytes,
        by_category=dict(timeline.peak_by_category),
        world_size=trace.cluster.world_size if trace.cluster else 1,
        rank=trace.cluster.rank if trace.cluster else 0,
        mesh=dict(trace.cluster.mesh) if trace.cluster else {},
        persistent_bytes=timeline.persistent_bytes,
        flops=sum(trace.signatures[op.signature].flops for op in trace.ops),
        peak=ReadPeak(peak.op, peak.module, peak.phase),
        modules=tuple(
            ReadModule(
                one.name,
                one.class_name,
                one.depth,
                one.parameter_bytes,
                one.buffer_bytes,
                one.activation_bytes,
                one.at_peak_bytes,
            )
            for one in module_stats(timeline)
        ),
        operators=tuple(ReadOperator(operator, count) for operator, count in calls.items()),
    )
    return NamedReading(name, "trace", reading, settings_json(trace.settings))
