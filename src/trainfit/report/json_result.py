"""Results as one JSON object with stable keys. Bytes are integers; times are seconds; unknown is null."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainfit.advice import advice
from trainfit.errors import OptionError
from trainfit.plans import DECISIONS, Plan, Region
from trainfit.sealed_files import write_whole
from trainfit.settings import settings_json
from trainfit.trace import Steps, Trace

if TYPE_CHECKING:
    from trainfit.costs.summary import StepTime
    from trainfit.devices import Device
    from trainfit.estimates import Estimate
    from trainfit.planning.plan_results import Frontier, PlanResult
    from trainfit.verification import Verification

SCHEMA = 1
STANDARD_OUTPUT = "-"


def estimate_json(estimate: Estimate) -> dict[str, Any]:
    """Return an estimate as a JSON object; times are null if the device's speed is not known."""
    return {
        **_common(estimate.target, estimate.device, estimate.trace, estimate.seconds),
        "peak_bytes": estimate.peak_bytes,
        "persistent_bytes": estimate.timeline.persistent_bytes,
        "fits": estimate.fits,
        "verdict": estimate.verdict,
        "spare_bytes": estimate.spare_bytes,
        "margin_bytes": estimate.device.margin_bytes,
        "peak": {
            "op": estimate.peak.op,
            "op_index": estimate.peak.op_index,
            "module": estimate.peak.module,
            "phase": estimate.peak.phase,
        },
        "by_category": dict(estimate.by_category),
        "advice": [dataclasses.asdict(one) for one in estimate.advice],
        **_time(estimate.time),
        "modules": [dataclasses.asdict(module) for module in estimate.modules],
        "orders": _orders(estimate.trace),
        "warnings": list(estimate.warnings),
    }


def _time(time: StepTime | None) -> dict[str, Any]:
    """Return the predicted times, with the same keys whether they are known or not."""
    names = (
        *("step_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds"),
        *("lower_seconds", "upper_seconds", "recompute_seconds", "busy_seconds", "waiting_share"),
        *("launch_bound", "flops", "model_flops", "flops_per_second", "model_flops_utilisation"),
        *("samples_per_second", "tokens_per_second"),
    )
    found = {name: None if time is None else getattr(time, name) for name in names}
    return {
        **found,
        "operators": [dataclasses.asdict(operator) for operator in time.operators] if time else [],
        "cost_sources": dict(time.sources) if time else {},
        "unpriced": [operator.name for operator in time.unpriced] if time else [],
    }


def _orders(trace: Trace) -> dict[str, list[str]]:
    """Return the modules in the order in which their forward and backward began and ended."""
    return {
        "forward_pre": list(trace.call_names(trace.forward_pre_order)),
        "forward_post": list(trace.call_names(trace.forward_post_order)),
        "backward_pre": list(trace.call_names(trace.backward_pre_order)),
        "backward_post": list(trace.call_names(trace.backward_post_order)),
    }


def plan_json(result: PlanResult) -> dict[str, Any]:
    """Return a plan as a JSON object; if nothing fits, it is the plan with the smallest peak."""
    plan = result.plan
    return {
        **_common(plan.target, result.device, result.trace, result.seconds),
        "feasible": result.feasible,
        "budget_bytes": plan.budget_bytes,
        "margin_bytes": result.margin_bytes,
        "baseline": {"peak_bytes": plan.baseline_peak_bytes, "step_seconds": plan.baseline_step_seconds},
        "peak_bytes": plan.peak_bytes,
        "reserve_bytes": plan.reserve_bytes,
        "step_seconds": plan.step_seconds,
        "recompute_seconds": sum(region.recompute_seconds for region in plan.regions),
        "bound_seconds": plan.bound_seconds,
        "gap": plan.gap,
        "method": plan.method,
        "world_size": plan.world_size,
        "trace_hash": plan.trace_hash,
        "regions": [_region(plan, region) for region in plan.regions],
        "baselines": [dataclasses.asdict(baseline) for baseline in result.baselines],
        "by_category": dict(result.timeline.peak_by_category),
        "advice": []
        if result.feasible
        else [dataclasses.asdict(one) for one in advice(result.timeline, planned=True)],
        "minimum_peak_bytes": None if result.feasible else plan.peak_bytes,
        "warnings": list(result.warnings),
    }


def _region(plan: Plan, region: Region) -> dict[str, Any]:
    decisions = [op.decision for op in plan.kind_of(region).ops]
    counts = {decision: decisions.count(decision) for decision in DECISIONS}
    return {**dataclasses.asdict(region), "decisions": counts}


def frontier_json(frontier: Frontier) -> dict[str, Any]:
    """Return a frontier as a JSON object, smallest peak first."""
    return {
        **_common(frontier.trace.target, frontier.device, frontier.trace, frontier.seconds),
        "points": [
            {
                "peak_bytes": point.peak_bytes,
                "step_seconds": point.step_seconds,
                "bound_seconds": point.plan.bound_seconds,
                "regions": len(point.plan.regions),
                "verdict": frontier.device.verdict(point.peak_bytes),
            }
            for point in frontier.points
        ],
        "margin_bytes": frontier.device.margin_bytes,
        "baselines": [dataclasses.asdict(baseline) for baseline in frontier.baselines],
    }


def verification_json(verification: Verification) -> dict[str, Any]:
    """Return a verification as a JSON object.

    Without a plan the measured step is the baseline itself, and there is nothing to compare its loss and
    gradients with.
    """
    measured = verification.measured
    comparison = verification.comparison
    return {
        **_common(verification.target, verification.device, verification.trace, verification.seconds),
        "predicted_peak_bytes": verification.predicted_peak_bytes,
        "measured_peak_bytes": measured.peak_bytes,
        "error": verification.error,
        "predicted_persistent_bytes": verification.predicted_persistent_bytes,
        "measured_persistent_bytes": measured.persistent_bytes,
        "predicted_seconds": verification.predicted_seconds,
        "measured_seconds": measured.seconds,
        "baseline_measured_peak_bytes": (comparison.baseline if comparison else measured).peak_bytes,
        "baseline_measured_seconds": (comparison.baseline if comparison else measured).seconds,
        "plan_made_for": None
        if comparison is None
        else {"device": comparison.plan.device, **settings_json(comparison.plan.settings)},
        "plan_differences": [dataclasses.asdict(found) for found in verification.plan_differences],
        "compiled": measured.compiled,
        "runs": verification.runs,
        "other_load": measured.load,
        "loss_equal": comparison.loss_equal if comparison else None,
        "gradients_equal": comparison.gradients_equal if comparison else None,
        "max_gradient_difference": _finite(comparison.max_gradient_difference) if comparison else None,
        "state_equal": comparison.state_equal if comparison else None,
        "differences": list(comparison.results.differences) if comparison else [],
        "not_compared": list(comparison.results.not_compared) if comparison else [],
        "warnings": list(verification.warnings),
    }


def _finite(number: float) -> float | None:
    """JSON has no infinity: a difference that no number says is null."""
    return number if math.isfinite(number) else None


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


def _steps(steps: Steps) -> dict[str, Any]:
    """Return which run of the step was recorded, and what was seen of the others."""
    counted = steps.peaks[steps.first - 1 :]
    return {
        "looked_at": steps.looked_at,
        "recorded": steps.recorded,
        "first": steps.first,
        "differ": steps.differ,
        "smallest_peak_bytes": min(counted, default=None),
        "largest_peak_bytes": max(counted, default=None),
        "changing": list(steps.changing),
        "complete": steps.complete,
        "leak_bytes_per_step": steps.growth_bytes,
        "leaks": [dataclasses.asdict(growth) for growth in steps.grows],
    }


def _common(target: str, device: Device, trace: Trace, seconds: dict[str, float]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "target": target,
        "device": device.name,
        "device_usable_bytes": device.usable_bytes,
        "torch": trace.torch,
        "seconds": dict(seconds),
        "ops": len(trace.ops),
        "settings": settings_json(trace.settings),
        "steps": _steps(trace.steps),
        "warnings": list(trace.warnings),
    }
