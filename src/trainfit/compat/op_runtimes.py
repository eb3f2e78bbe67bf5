"""Milliseconds of each op of a trace, by one of the two modes of PyTorch's estimators."""

from __future__ import annotations

import torch

from trainfit.capturing.counting import counted
from trainfit.costs.pricing import CostSource, price_trace
from trainfit.devices.device_table import Device, find_device
from trainfit.traces.trace import Trace

BENCHMARK, COST_MODEL = "operator-level-benchmark", "operator-level-cost-model"
_SOURCES: dict[str, CostSource] = {BENCHMARK: "measured", COST_MODEL: "roofline"}


def check_mode(mode: str) -> str:
    """Return the mode, if there is such a one."""
    if mode not in _SOURCES:
        raise NotImplementedError(f"estimate_mode_type is {' or '.join(_SOURCES)}, not {mode!r}")
    return mode


def op_milliseconds(trace: Trace, mode: str, device: Device | None) -> list[float]:
    """Return what each op takes on its device, besides the host; on the present one if none is named."""
    target = device or find_device(trace.device)
    # Measuring, also how fast a processor is, runs real operators, whatever mode the user is in.
    with torch.utils._python_dispatch._disable_current_modes():
        table = price_trace(counted(trace), target, costs=_SOURCES[mode])
    return [1e3 * table.costs[op.signature].seconds for op in trace.ops]
