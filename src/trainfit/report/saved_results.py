"""`save_result`: a result of the API in the file that `--json` of its command writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainfit.costs.estimates import Estimate
from trainfit.errors import OptionError
from trainfit.fitting.fit_results import FitResult
from trainfit.planning.plan_results import Frontier, PlanResult
from trainfit.report.fit_data import fit_data
from trainfit.report.json_result import result_json, write_json
from trainfit.report.reading import estimate_data, frontier_data, plan_data
from trainfit.report.sizes_data import size_data
from trainfit.sizing.size_results import MaxSize


def save_result(result: Estimate | PlanResult | Frontier | FitResult | MaxSize, path: str | Path) -> None:
    """Write what a question of the API was answered with as one JSON object, whole or not at all."""
    data: Any
    if isinstance(result, Estimate):
        data = estimate_data(result)
    elif isinstance(result, PlanResult):
        data = plan_data(result)
    elif isinstance(result, Frontier):
        data = frontier_data(result)
    elif isinstance(result, FitResult):
        data = fit_data(result)
    elif isinstance(result, MaxSize):
        data = size_data(result)
    else:
        raise OptionError(
            "save_result writes what `trainfit.estimate`, `trainfit.frontier` or `trainfit.fit` returns, got "
            f"{type(result).__name__}; plans have save_plan, and ways save_way."
        )
    write_json(result_json(data), str(path))
