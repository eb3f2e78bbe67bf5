"""`save_report`: a result as a page, from Python; and what a reader sees of any result."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

from trainfit.errors import OptionError
from trainfit.report import json_result, reading
from trainfit.report.fit_data import fit_data
from trainfit.report.sizes_data import size_data
from trainfit.webpage.page import write_page

_READERS: dict[str, Callable[[Any], Any]] = {
    "Estimate": reading.estimate_data,
    "PlanResult": reading.plan_data,
    "Frontier": reading.frontier_data,
    "FitResult": fit_data,
    "Verification": reading.verification_data,
    "OrderResult": reading.order_data,
    "MaxSize": size_data,
    "DeviceComparison": attrgetter("data"),
}
"""By the name of the result's class: some of the classes come with torch, which nothing here needs."""


def data_of(result: Any) -> Any:
    """Return what a reader sees of a result; `OptionError` if it is none that has a page."""
    reader = _READERS.get(type(result).__name__)
    if reader is None:
        raise OptionError(
            "a report is made of what trainfit.estimate, frontier, verify, max_batch or compare "
            "returns, got "
            f"{type(result).__name__}; for a plan or an order use --report on the command line."
        )
    return reader(result)


def save_report(result: Any, path: str | Path) -> None:
    """Write what `estimate`, `frontier`, `verify`, `max_batch` or `compare` returned as a page."""
    data = data_of(result)
    json_result.check_destination(str(path), "save_report")
    write_page(data, result, path)
