"""One row of a grid: a step on a device, as it is or with a plan, as flat figures. What fails says why."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from typing import Any

from trainfit.api.choose import plan_step
from trainfit.api.predict import estimate_step
from trainfit.costs.estimates import Estimate
from trainfit.costs.summary import StepTime, summarise
from trainfit.devices.cluster_text import read_cluster
from trainfit.devices.device_table import find_device
from trainfit.errors import TrainfitError
from trainfit.models.recipe import StepOptions
from trainfit.planning.plan_results import PlanResult
from trainfit.renting.compared_rows import trained_by
from trainfit.renting.shared_captures import SharedCaptures
from trainfit.sweeping.grid_file import DEVICE, NONE
from trainfit.sweeping.grid_tasks import RowTask
from trainfit.traces.trace import CATEGORIES

Row = dict[str, Any]
_STEP = ("batch", "seq", "image_size", "dtype", "optimizer")
_LEFT_OUT = ("batch", "seq", "image_size", "dtype")
"""Keys for which `none` is no value; an optimizer and a budget may be `none`."""
_TIMES = (
    *("step_seconds", "lower_seconds", "upper_seconds", "forward_seconds", "backward_seconds"),
    *("optimizer_seconds", "recompute_seconds", "communication_seconds", "exposed_communication_seconds"),
    "model_flops_utilisation",
)
FIGURES = (
    *("device_name", "fits", "verdict", "peak_bytes", "smallest_memory_bytes", "usable_bytes"),
    *(f"{category}_bytes" for category in CATEGORIES),
    *_TIMES,
    *("samples_per_second", "tokens_per_second", "copies", "world_size"),
    *("budget_bytes", "plan_regions", "plan_added_seconds", "unplanned_peak_bytes", "unplanned_step_seconds"),
    *("parameters", "ops", "torch", "seconds", "warnings", "error"),
)
"""The columns after those of the grid, whatever the grid is."""


class RowRunner:
    """Does rows one after the other; those that share a capture share it if they follow each other."""

    def __init__(self) -> None:
        """Nothing is captured yet."""
        self._capture: bytes = b""
        self._captures: SharedCaptures | None = None

    def run(self, task: RowTask) -> Row:
        """Return the row: what was asked, what was found, or what went wrong."""
        begin = time.perf_counter()
        row: Row = {**task.values, **dict.fromkeys(FIGURES)}
        try:
            # What was asked stays as it was written; what was left to the target is filled in.
            row |= self._figures(task) | _given(task.values)
        except TrainfitError as error:
            row["error"] = str(error)
        except MemoryError:
            row["error"] = "this machine has not enough memory to capture the step"
        except Exception as error:  # ours: one row says so, and the others go on
            place = traceback.extract_tb(error.__traceback__)[-1]
            row["error"] = (
                f"a mistake of trainfit's, please report it: {type(error).__name__}: {error} "
                f"({place.filename}:{place.lineno})"
            )
        row["seconds"] = time.perf_counter() - begin
        return row

    def _figures(self, task: RowTask) -> Row:
        values = task.values
        device = find_device(values["device"])
        captures = self._shared(task)
        request = captures.request(device, allocator=values.get("allocator", "default"))
        budget = values.get("budget", NONE)
        if budget == NONE:
            return _of_estimate(estimate_step(request))
        limit = float(values.get("plan_seconds", 30.0))
        return _of_plan(plan_step(request, None if budget == DEVICE else budget, limit))

    def _shared(self, task: RowTask) -> SharedCaptures:
        """Return the captures of this step; those of another one are forgotten."""
        if self._captures is None or self._capture != task.capture:
            self._captures = None  # two traces of large models at once would take twice the memory
            values = task.values
            chosen = {name: values[name] for name in _STEP if name in values}
            settings = {
                name.removeprefix("set."): one for name, one in values.items() if name.startswith("set.")
            }
            rank = values.get("rank")
            cluster, worst_rank = read_cluster(
                values.get("world_size"),
                None if rank is None else str(rank),
                values.get("gpus_per_node"),
                None if values.get("mesh", NONE) == NONE else values["mesh"],
                values.get("network"),
            )
            arguments = {
                "options": StepOptions(**_given(chosen), set=settings),
                "task": values.get("task"),
                "steps": values.get("steps"),
                "cluster": cluster,
                "worst_rank": worst_rank,
            }
            self._captures = SharedCaptures(values["target"], arguments)
            self._capture = task.capture
        return self._captures


def _given(chosen: dict[str, Any]) -> dict[str, Any]:
    """Leave out what the grid leaves to the target."""
    return {name: one for name, one in chosen.items() if one != NONE or name not in _LEFT_OUT}


def _of_estimate(found: Estimate) -> Row:
    return {
        "device_name": found.device.name,
        "fits": found.fits,
        "verdict": found.verdict,
        "peak_bytes": found.peak_bytes,
        "smallest_memory_bytes": found.smallest_memory_bytes,
        "usable_bytes": found.device.usable_bytes,
        **{f"{name}_bytes": size for name, size in found.by_category.items()},
        **_times(found, found.time),
        **_about(found),
    }


def _of_plan(found: PlanResult) -> Row:
    """Return the figures of a plan; if none fits, the memory of the smallest, and no times."""
    plan = found.plan
    planned = {
        "plan_regions": len(plan.regions),
        "plan_added_seconds": plan.added_seconds,
    }
    return {
        "device_name": found.device.name,
        "fits": found.feasible,
        "verdict": "fits" if found.feasible else "does not fit",
        "peak_bytes": plan.peak_bytes,
        "smallest_memory_bytes": plan.memory_bytes,
        "usable_bytes": found.device.usable_bytes,
        **{f"{name}_bytes": size for name, size in found.timeline.peak_by_category.items()},
        **_times(found, summarise(found.times) if found.feasible else None),
        "budget_bytes": plan.budget_bytes,
        **(planned if found.feasible else {}),
        "unplanned_peak_bytes": plan.baseline_peak_bytes,
        "unplanned_step_seconds": plan.baseline_step_seconds,
        **_about(found),
    }


def _times(found: Estimate | PlanResult, time: StepTime | None) -> Row:
    if time is None:
        return {}
    rate = trained_by(found.trace, time.step_seconds)
    return {
        **{name: getattr(time, name) for name in _TIMES},
        "samples_per_second": rate.per_second(rate.samples),
        "tokens_per_second": rate.per_second(rate.tokens),
    }


def _about(found: Estimate | PlanResult) -> Row:
    """Return what the step is, with what the grid left to the target."""
    trace, settings = found.trace, found.trace.settings
    rate = trained_by(trace)
    return {
        **{name: one for name in _STEP if (one := getattr(settings, name)) is not None},
        "copies": rate.copies,
        "world_size": rate.devices,
        "parameters": settings.parameters,
        "ops": len(trace.ops),
        "torch": trace.torch,
        "warnings": "; ".join(_each_once(found.warnings)),
    }


def _each_once(texts: tuple[str, ...]) -> Iterator[str]:
    yield from dict.fromkeys(texts)


def failed_row(task: RowTask, reason: str) -> Row:
    """Return the row of a task that nobody could finish."""
    return {**task.values, **dict.fromkeys(FIGURES), "error": reason}
