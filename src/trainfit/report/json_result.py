"""Results as one JSON object with stable keys. Bytes are integers; times are seconds; unknown is null."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainfit.basics.sealed_files import write_whole
from trainfit.errors import OptionError
from trainfit.report.data import EstimateData, FrontierData, OrderData, PlanData, Subject, VerificationData
from trainfit.traces.settings import settings_json

if TYPE_CHECKING:
    from trainfit.costs.summary import StepTime

SCHEMA = 1
STANDARD_OUTPUT = "-"


def estimate_json(data: EstimateData) -> dict[str, Any]:
    """Return an estimate as a JSON object; times are null if the device's speed is not known."""
    return {
        **_common(data.subject),
        "peak_bytes": data.peak_bytes,
        "persistent_bytes": data.persistent_bytes,
        "fits": data.verdict == "fits",
        "verdict": data.verdict,
        "spare_bytes": data.spare_bytes,
        "margin_bytes": data.subject.margin_bytes,
        "peak": dataclasses.asdict(data.peak),
        "by_category": dict(data.by_category),
        "advice": _rows(data.advice),
        **_time(data.time),
        "modules": _rows(data.modules),
        "orders": {name: list(modules) for name, modules in data.orders.items()},
    }


def _time(time: StepTime | None) -> dict[str, Any]:
    """Return the predicted times, with the same keys whether they are known or not."""
    names = (
        *("step_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds"),
        *("lower_seconds", "upper_seconds", "recompute_seconds", "busy_seconds", "waiting_share"),
        *("launch_bound", "flops", "model_flops", "flops_per_second", "model_flops_utilisation"),
        *("samples_per_second", "tokens_per_second"),
    )
    return {
        **{name: None if time is None else getattr(time, name) for name in names},
        "operators": _rows(time.operators) if time else [],
        "cost_sources": dict(time.sources) if time else {},
        "unpriced": [operator.name for operator in time.unpriced] if time else [],
    }


def plan_json(data: PlanData) -> dict[str, Any]:
    """Return a plan as a JSON object; if nothing fits, it is the plan with the smallest peak."""
    plan = data.plan
    return {
        **_common(data.subject),
        "feasible": data.feasible,
        "budget_bytes": plan.budget_bytes,
        "margin_bytes": data.budget_margin_bytes,
        "baseline": {"peak_bytes": plan.baseline_peak_bytes, "step_seconds": plan.baseline_step_seconds},
        "peak_bytes": plan.peak_bytes,
        "reserve_bytes": plan.reserve_bytes,
        "step_seconds": plan.step_seconds,
        "recompute_seconds": data.recompute_seconds,
        "bound_seconds": plan.bound_seconds,
        "gap": plan.gap,
        "method": plan.method,
        "world_size": plan.world_size,
        "trace_hash": plan.trace_hash,
        "regions": [
            {**dataclasses.asdict(region), "decisions": decisions} for region, decisions in data.regions
        ],
        "baselines": _rows(data.baselines),
        "by_category": dict(data.by_category),
        "advice": _rows(data.advice),
        "minimum_peak_bytes": None if data.feasible else plan.peak_bytes,
    }


def frontier_json(data: FrontierData) -> dict[str, Any]:
    """Return a frontier as a JSON object, smallest peak first."""
    keys = ("peak_bytes", "step_seconds", "bound_seconds", "regions", "verdict")
    return {
        **_common(data.subject),
        "points": [{key: getattr(point, key) for key in keys} for point in data.points],
        "margin_bytes": data.subject.margin_bytes,
        "baselines": _rows(data.baselines),
    }


def verification_json(data: VerificationData) -> dict[str, Any]:
    """Return a verification as a JSON object.

    Without a plan the measured step is the baseline itself, and there is nothing to compare its loss and
    gradients with.
    """
    peak, seconds, planned = data.peak_bytes, data.step_seconds, data.planned
    return {
        **_common(data.subject),
        "predicted_peak_bytes": peak.predicted,
        "measured_peak_bytes": peak.measured,
        "error": data.error,
        "predicted_persistent_bytes": data.persistent_bytes.predicted,
        "measured_persistent_bytes": data.persistent_bytes.measured,
        "predicted_seconds": seconds.predicted,
        "measured_seconds": seconds.measured,
        "baseline_measured_peak_bytes": planned.baseline_peak_bytes if planned else peak.measured,
        "baseline_measured_seconds": planned.baseline_seconds if planned else seconds.measured,
        "plan_made_for": planned.made_for if planned else None,
        "plan_differences": _rows(data.plan_differences),
        "compiled": data.compiled,
        "runs": data.runs,
        "other_load": data.other_load,
        "loss_equal": planned.loss_equal if planned else None,
        "gradients_equal": planned.gradients_equal if planned else None,
        "max_gradient_difference": planned.max_gradient_difference if planned else None,
        "state_equal": planned.state_equal if planned else None,
        "differences": list(planned.differences) if planned else [],
        "not_compared": list(planned.not_compared) if planned else [],
    }


def order_json(data: OrderData) -> dict[str, Any]:
    """Return an order as a JSON object; `order` are the names of the nodes."""
    for_people = ("quality", "saved_bytes", "saved_share", "rows")
    found = {field.name: getattr(data, field.name) for field in dataclasses.fields(data)}
    return {"schema": SCHEMA, **{key: value for key, value in found.items() if key not in for_people}}


def _rows(rows: Iterable[Any]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(row) for row in rows]


def _common(subject: Subject) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "target": subject.target,
        "device": subject.device,
        "device_usable_bytes": subject.device_usable_bytes,
        "torch": subject.torch,
        "seconds": subject.seconds,
        "ops": subject.ops,
        "settings": settings_json(subject.settings),
        "steps": dataclasses.asdict(subject.steps),
        "warnings": list(subject.warnings),
    }


def check_destination(path: str, flag: str) -> None:
    """Refuse a file that cannot be written before the work begins, not after it."""
    if path == STANDARD_OUTPUT:
        return
    file = Path(path)
    if not path or os.path.isdir(file):
        raise OptionError(f"{flag} needs the name of a file, got {path!r}.")
    if not os.path.isdir(file.parent):
        raise OptionError(f"{flag} {path}: there is no folder {str(file.parent)!r}.")
    try:
        os.stat(file)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:  # a name that no file can have
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise OptionError(f"{flag} {path}: {reason}.") from None


def write_json(result: dict[str, Any], path: str) -> None:
    """Write one object, whole or not at all; `-` is standard output."""
    text = json.dumps(result, indent=2, allow_nan=False) + "\n"
    if path == STANDARD_OUTPUT:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        write_whole(Path(path), text.encode())
