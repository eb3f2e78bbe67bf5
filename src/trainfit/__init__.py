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
    from trainfit.api.arrange import order as order
    from trainfit.api.carry_out import applied as applied
    from trainfit.api.carry_out import apply as apply
    from trainfit.api.carry_out import remove as remove
    from trainfit.api.choose import frontier as frontier
    from trainfit.api.choose import plan as plan
    from trainfit.api.compiled_steps import plan_compiled as plan_compiled
    from trainfit.api.find_ways import fit as fit
    from trainfit.api.gauge_machine import calibrate as calibrate
    from trainfit.api.predict import capture as capture
    from trainfit.api.predict import estimate as estimate
    from trainfit.api.predict import price as price
    from trainfit.api.prove import verify as verify
    from trainfit.api.sizes import max_batch as max_batch
    from trainfit.api.sizes import max_seq as max_seq
    from trainfit.applying import shard as shard
    from trainfit.autoplanning.autoplan_result import AutoPlan as AutoPlan
    from trainfit.autoplanning.plan_here import autoplan as autoplan
    from trainfit.autoplanning.trainer_callback import PlanCallback as PlanCallback
    from trainfit.calibrating.calibration_result import CalibrationResult as CalibrationResult
    from trainfit.compiling.compile_plan import CompilePlan as CompilePlan
    from trainfit.compiling.compiled_model import compile as compile
    from trainfit.costs.estimates import Estimate as Estimate
    from trainfit.costs.estimates import Peak as Peak
    from trainfit.costs.summary import OperatorTime as OperatorTime
    from trainfit.costs.summary import StepTime as StepTime
    from trainfit.costs.table import CostTable as CostTable
    from trainfit.devices.device_file import save_device as save_device
    from trainfit.devices.device_table import Device as Device
    from trainfit.devices.device_table import find_device as find_device
    from trainfit.diffing.found_diff import Diff as Diff
    from trainfit.diffing.what_grew import diff as diff
    from trainfit.errors import BudgetTooSmall as BudgetTooSmall
    from trainfit.errors import CaptureError as CaptureError
    from trainfit.errors import DeviceError as DeviceError
    from trainfit.errors import FileFormatError as FileFormatError
    from trainfit.errors import GraphError as GraphError
    from trainfit.errors import GrewTooMuch as GrewTooMuch
    from trainfit.errors import MemoryGuard as MemoryGuard
    from trainfit.errors import MissingExtra as MissingExtra
    from trainfit.errors import OptionError as OptionError
    from trainfit.errors import PlanError as PlanError
    from trainfit.errors import StepError as StepError
    from trainfit.errors import TargetError as TargetError
    from trainfit.errors import TrainfitError as TrainfitError
    from trainfit.errors import UserCodeError as UserCodeError
    from trainfit.fitting.fit_results import FitResult as FitResult
    from trainfit.memory.module_stats import ModuleStats as ModuleStats
    from trainfit.models.recipe import StepOptions as StepOptions
    from trainfit.ordering.found_order import Order as Order
    from trainfit.ordering.graph import BufferGraph as BufferGraph
    from trainfit.ordering.simulator_json import load_graph as load_graph
    from trainfit.ordering.simulator_json import save_graph as save_graph
    from trainfit.planning.plan_results import Frontier as Frontier
    from trainfit.plans.compiled_plan import CompiledPlan as CompiledPlan
    from trainfit.plans.plan import Plan as Plan
    from trainfit.plans.plan_store import load_plan as load_plan
    from trainfit.plans.plan_store import save_plan as save_plan
    from trainfit.plans.sharding_choice import Sharding as Sharding
    from trainfit.plans.sharding_choice import load_sharding as load_sharding
    from trainfit.plans.sharding_choice import save_sharding as save_sharding
    from trainfit.plans.way_store import load_way as load_way
    from trainfit.plans.way_store import save_way as save_way
    from trainfit.plans.ways import Way as Way
    from trainfit.renting.found_comparison import DeviceComparison as DeviceComparison
    from trainfit.renting.which_device import compare as compare
    from trainfit.report.saved_results import save_result as save_result
    from trainfit.scaling.found_scale import Scale as Scale
    from trainfit.scaling.which_mesh import scale as scale
    from trainfit.sharding.found_sharding import ShardingResult as ShardingResult
    from trainfit.sharding.found_sharding import plan_sharding as plan_sharding
    from trainfit.sizing.size_results import MaxSize as MaxSize
    from trainfit.steps.step import Step as Step
    from trainfit.sweeping.sweep_grid import sweep as sweep
    from trainfit.sweeping.swept_result import Sweep as Sweep
    from trainfit.traces.ranks import Cluster as Cluster
    from trainfit.traces.simulate import Timeline as Timeline
    from trainfit.traces.trace import Trace as Trace
    from trainfit.traces.trace_store import load_trace as load_trace
    from trainfit.traces.trace_store import save_trace as save_trace
    from trainfit.verifying.measuring import Measurement as Measurement
    from trainfit.verifying.verification import Verification as Verification
    from trainfit.webpage.saved_report import save_report as save_report

_HOME = {
    "trainfit.api.arrange": "order",
    "trainfit.api.choose": "frontier plan",
    "trainfit.api.find_ways": "fit",
    "trainfit.api.gauge_machine": "calibrate",
    "trainfit.api.predict": "capture estimate price",
    "trainfit.api.prove": "verify",
    "trainfit.api.sizes": "max_batch max_seq",
    "trainfit.api.carry_out": "applied apply remove",
    "trainfit.api.compiled_steps": "plan_compiled",
    "trainfit.applying": "shard",
    "trainfit.autoplanning.autoplan_result": "AutoPlan",
    "trainfit.autoplanning.plan_here": "autoplan",
    "trainfit.autoplanning.trainer_callback": "PlanCallback",
    "trainfit.calibrating.calibration_result": "CalibrationResult",
    "trainfit.compiling.compile_plan": "CompilePlan",
    "trainfit.compiling.compiled_model": "compile",
    "trainfit.costs.estimates": "Estimate Peak",
    "trainfit.costs.summary": "OperatorTime StepTime",
    "trainfit.costs.table": "CostTable",
    "trainfit.traces.ranks": "Cluster",
    "trainfit.devices.device_file": "save_device",
    "trainfit.devices.device_table": "Device find_device",
    "trainfit.diffing.found_diff": "Diff",
    "trainfit.diffing.what_grew": "diff",
    "trainfit.errors": (
        "BudgetTooSmall CaptureError DeviceError FileFormatError GraphError GrewTooMuch MemoryGuard "
        "MissingExtra OptionError PlanError StepError TargetError TrainfitError UserCodeError"
    ),
    "trainfit.fitting.fit_results": "FitResult",
    "trainfit.memory.module_stats": "ModuleStats",
    "trainfit.models.recipe": "StepOptions",
    "trainfit.ordering.found_order": "Order",
    "trainfit.ordering.graph": "BufferGraph",
    "trainfit.ordering.simulator_json": "load_graph save_graph",
    "trainfit.planning.plan_results": "Frontier",
    "trainfit.plans.compiled_plan": "CompiledPlan",
    "trainfit.plans.plan": "Plan",
    "trainfit.plans.plan_store": "load_plan save_plan",
    "trainfit.plans.sharding_choice": "Sharding load_sharding save_sharding",
    "trainfit.plans.way_store": "load_way save_way",
    "trainfit.plans.ways": "Way",
    "trainfit.renting.found_comparison": "DeviceComparison",
    "trainfit.renting.which_device": "compare",
    "trainfit.report.saved_results": "save_result",
    "trainfit.scaling.found_scale": "Scale",
    "trainfit.scaling.which_mesh": "scale",
    "trainfit.sharding.found_sharding": "ShardingResult plan_sharding",
    "trainfit.sizing.size_results": "MaxSize",
    "trainfit.steps.step": "Step",
    "trainfit.sweeping.sweep_grid": "sweep",
    "trainfit.sweeping.swept_result": "Sweep",
    "trainfit.traces.simulate": "Timeline",
    "trainfit.traces.trace": "Trace",
    "trainfit.traces.trace_store": "load_trace save_trace",
    "trainfit.verifying.measuring": "Measurement",
    "trainfit.verifying.verification": "Verification",
    "trainfit.webpage.saved_report": "save_report",
}
"""Where each public name lives; `__all__` is made of it."""
_HOME_OF = {name: module for module, names in _HOME.items() for name in names.split()}

__all__ = ["__version__", *_HOME_OF]


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
