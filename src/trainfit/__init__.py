"""trainfit: does a PyTorch training step fit, before a GPU is rented?

Names load on first use, so that `import trainfit` and the command line do not wait for torch. No module may
have the name of a public function: importing `trainfit.x` would hide the function `x` behind the module.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Keeps torch's profiler from writing to the terminal; read when torch is loaded, hence so early.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

if TYPE_CHECKING:
    from trainfit.api.arrange import order
    from trainfit.api.choose import frontier, plan
    from trainfit.api.predict import capture, estimate, price
    from trainfit.api.prove import verify
    from trainfit.applying import applied, apply, remove
    from trainfit.applying.trainer_callback import PlanCallback
    from trainfit.costs.estimates import Estimate, Peak
    from trainfit.costs.summary import OperatorTime, StepTime
    from trainfit.costs.table import CostTable
    from trainfit.devices.device_table import Device, find_device
    from trainfit.errors import (
        BudgetTooSmall,
        CaptureError,
        DeviceError,
        FileFormatError,
        GraphError,
        MemoryGuard,
        MissingExtra,
        OptionError,
        PlanError,
        StepError,
        TargetError,
        TrainfitError,
        UserCodeError,
    )
    from trainfit.memory.module_stats import ModuleStats
    from trainfit.models.recipe import StepOptions
    from trainfit.ordering.found_order import Order
    from trainfit.ordering.graph import BufferGraph
    from trainfit.ordering.simulator_json import load_graph, save_graph
    from trainfit.planning.plan_results import Frontier
    from trainfit.plans.plan import Plan
    from trainfit.plans.plan_store import load_plan, save_plan
    from trainfit.steps.step import Step
    from trainfit.traces.simulate import Timeline
    from trainfit.traces.trace import Trace
    from trainfit.traces.trace_store import load_trace, save_trace
    from trainfit.verifying.measuring import Measurement
    from trainfit.verifying.verification import Verification

_HOME = {
    "trainfit.api.arrange": ("order",),
    "trainfit.api.choose": ("frontier", "plan"),
    "trainfit.api.predict": ("capture", "estimate", "price"),
    "trainfit.api.prove": ("verify",),
    "trainfit.applying": ("applied", "apply", "remove"),
    "trainfit.costs.summary": ("OperatorTime", "StepTime"),
    "trainfit.costs.table": ("CostTable",),
    "trainfit.devices.device_table": ("Device", "find_device"),
    "trainfit.costs.estimates": ("Estimate", "Peak"),
    "trainfit.errors": (
        "BudgetTooSmall",
        "CaptureError",
        "DeviceError",
        "FileFormatError",
        "GraphError",
        "MemoryGuard",
        "MissingExtra",
        "OptionError",
        "PlanError",
        "StepError",
        "TargetError",
        "TrainfitError",
        "UserCodeError",
    ),
    "trainfit.models.recipe": ("StepOptions",),
    "trainfit.verifying.measuring": ("Measurement",),
    "trainfit.memory.module_stats": ("ModuleStats",),
    "trainfit.ordering.graph": ("BufferGraph",),
    "trainfit.ordering.found_order": ("Order",),
    "trainfit.ordering.simulator_json": ("load_graph", "save_graph"),
    "trainfit.plans.plan_store": ("load_plan", "save_plan"),
    "trainfit.planning.plan_results": ("Frontier",),
    "trainfit.plans.plan": ("Plan",),
    "trainfit.traces.simulate": ("Timeline",),
    "trainfit.steps.step": ("Step",),
    "trainfit.traces.trace_store": ("load_trace", "save_trace"),
    "trainfit.traces.trace": ("Trace",),
    "trainfit.applying.trainer_callback": ("PlanCallback",),
    "trainfit.verifying.verification": ("Verification",),
}
_HOME_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "BudgetTooSmall",
    "BufferGraph",
    "CaptureError",
    "CostTable",
    "Device",
    "DeviceError",
    "Estimate",
    "FileFormatError",
    "Frontier",
    "GraphError",
    "Measurement",
    "MemoryGuard",
    "MissingExtra",
    "ModuleStats",
    "OperatorTime",
    "OptionError",
    "Order",
    "Peak",
    "Plan",
    "PlanCallback",
    "PlanError",
    "Step",
    "StepError",
    "StepOptions",
    "StepTime",
    "TargetError",
    "Timeline",
    "Trace",
    "TrainfitError",
    "UserCodeError",
    "Verification",
    "__version__",
    "applied",
    "apply",
    "capture",
    "estimate",
    "find_device",
    "frontier",
    "load_graph",
    "load_plan",
    "load_trace",
    "order",
    "plan",
    "price",
    "remove",
    "save_graph",
    "save_plan",
    "save_trace",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Load a public name from the module it lives in."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'trainfit' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(__all__)
