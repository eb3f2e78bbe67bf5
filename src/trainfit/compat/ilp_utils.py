"""Statistics of all modules in one table, and the graph of them: `torch.distributed._tools.ilp_utils`.

The trackers may be torch's own or those of this package: only their public attributes are read. Units are
torch's: bytes and milliseconds.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, TypedDict

import numpy as np
import torch
from torch import nn

from trainfit.compat.tracker_readings import Backward, ModuleReading, TrackerReadings
from trainfit.errors import GraphError

_UNITS = {"KiB": 10, "MiB": 20, "GiB": 30}
"""Powers of two."""


class ModOrder(TypedDict):
    """Names of the modules in the order in which they begin and end; one entry per call."""

    fw_pre_order: list[str]
    bw_pre_order: list[str]
    fw_post_order: list[str]
    bw_post_order: list[str]


class ModRuntime(TypedDict):
    """Milliseconds of a module with all modules inside of it."""

    fw: float
    bw: float


class ModStats(TypedDict):
    """Bytes and milliseconds of one module with all modules inside of it, and its trade-off."""

    fqn: str
    param_per_module: int
    grad_per_module: int
    grad_total: int
    """Gradients of the whole model that are there when its backward begins."""
    act_fw_per_module: int
    """Activations that its forward leaves, without its inputs and outputs."""
    act_bw_per_module: int
    """Activations of the whole model when its backward needs the most."""
    act_grad_per_module: int
    """What its backward needs for a while, at most."""
    act_total: int
    """Activations of the whole model when its forward ends."""
    input_per_module: int
    output_per_module: int
    fw_runtime_per_module: float
    bw_runtime_per_module: float
    is_leaf: bool
    sac_runtime: float
    """Milliseconds of computing all of its ops again."""
    sac_memory: int
    """Bytes of storing the results of all of its ops."""
    n_segments: int
    slopes: list[float]
    intercepts: list[float]
    breakpoints: list[float]
    tradeoff_curve: OrderedDict[float, float]
    """Share of the bytes that is discarded, and the share of the milliseconds which that takes."""


class ModuleInfo(TypedDict):
    """The table of a model: the order of its modules, and their statistics."""

    mod_order: ModOrder
    mod_stats: list[ModStats]


class ModuleNode(ModStats):
    """A module in the graph; torch calls it `Node`."""

    index: int
    """By the first begin of its forward."""
    pos_fw_post_order: int
    """By the last end of its forward."""


Node = ModuleNode


class Graph:
    """The modules of a model, and which of them are inside of which."""

    def __init__(self, n: int) -> None:
        self.nodes: list[Node] = []
        self.name2node: dict[str, Node] = {}
        self.ad_matrix = np.zeros((n, n))
        """1 where the column's module is the row's, or inside of it."""
        self.fw_post_order: list[str] = []

    def add_node(self, node: Node) -> None:
        """Add a module; its name leads to it."""
        self.nodes.append(node)
        self.name2node[node["fqn"]] = node


def aggregate_stats(
    model: nn.Module,
    mem_tracker: Any,
    runtime_estimator: Any,
    sac_estimator: Any,
    dev: torch.device,
) -> ModuleInfo:
    """Return the statistics of every module that was called, from three trackers of the same step.

    `dev` is where the memory counts. Runtimes are those of one call of the model, if it was called several
    times. Modules outside of the model, such as a loss, are left out.
    """
    readings = TrackerReadings(model, mem_tracker.memory_tracking, dev)
    times = _Times(readings, runtime_estimator)
    sac_estimator.pwlf_sac_tradeoff_curve()
    curves = sac_estimator.sac_mod_tradeoff_stats
    return {
        "mod_order": {
            "fw_pre_order": times.order("mod_fw_pre_order"),
            "bw_pre_order": times.order("mod_bw_pre_order"),
            "fw_post_order": times.order("mod_fw_post_order"),
            "bw_post_order": times.order("mod_bw_post_order"),
        },
        "mod_stats": [
            _mod_stats(reading, readings.backward(reading), times.of(reading), curves)
            for reading in readings.modules
        ],
    }


def _mod_stats(
    reading: ModuleReading, backward: Backward | None, runtime: ModRuntime, curves: Any
) -> ModStats:
    left = reading.forward("POST_FW")[-1]
    # Nothing inside needs a gradient: the module's own moment is the end of its forward.
    start, peak = (backward.start, backward.peak) if backward else (left, left)
    curve = curves.get(reading.tracked_name)
    # The trade-off is that of one call, but every call of a checkpointed module is computed again.
    calls = reading.calls
    return {
        "fqn": reading.name,
        "param_per_module": reading.stats.parameter_mem,
        "grad_per_module": reading.stats.parameter_mem,
        "grad_total": start.get("GRAD", 0),
        "act_fw_per_module": reading.activation_bytes,
        "act_bw_per_module": max(peak.get("ACT", 0), 0) if backward else 0,
        "act_grad_per_module": peak.get("TEMP", 0) - start.get("TEMP", 0),
        "act_total": left.get("ACT", 0),
        "input_per_module": reading.stats.input_mem,
        "output_per_module": reading.stats.output_mem,
        "fw_runtime_per_module": runtime["fw"],
        "bw_runtime_per_module": runtime["bw"],
        "is_leaf": curve is None,
        "sac_runtime": curve.sac_runtime * calls if curve else 0,
        "sac_memory": curve.sac_memory * calls if curve else 0,
        "n_segments": curve.n_segments if curve else 0,
        "slopes": list(curve.slopes) if curve else [],
        "intercepts": list(curve.intercepts) if curve else [],
        "breakpoints": list(curve.fit_breaks) if curve else [],
        "tradeoff_curve": OrderedDict(curve.tradeoff_curve) if curve else OrderedDict(),
    }


class _Times:
    """What the runtime estimator has seen, under the names that the modules have in the model."""

    def __init__(self, readings: TrackerReadings, estimator: Any) -> None:
        self._readings = readings
        self._estimator = estimator
        self._names = {reading.tracked_name: reading.name for reading in readings.modules}
        self._called = set(estimator.mod_fw_pre_order)
        self._steps = max(list(estimator.mod_fw_pre_order).count(readings.root.mod_fqn), 1)

    def order(self, which: str) -> list[str]:
        """Return one of the order lists, without modules that are not of the model."""
        return [self._names[name] for name in getattr(self._estimator, which) if name in self._names]

    def of(self, reading: ModuleReading) -> ModRuntime:
        """Return the milliseconds of a module; one without ops takes none."""
        if reading.tracked_name not in self._called:
            raise KeyError(
                f"the memory tracker has seen {reading.tracked_name}, the runtime estimator has not: "
                "both have to run the same step"
            )
        backward = self._milliseconds(reading.tracked_name, "bw")
        if not backward and reading.own_backward is None:
            inside = self._readings.topmost_inside(reading.module)
            backward = sum(self._milliseconds(inner.tracked_name, "bw") for inner in inside)
            backward = min(backward, self._milliseconds("Global", "bw") or backward)
        return {"fw": self._milliseconds(reading.tracked_name, "fw"), "bw": backward}

    def _milliseconds(self, name: str, phase: str) -> float:
        return float(self._estimator.mod_runtimes.get(name, {}).get(phase, 0.0)) / self._steps


def parse_module_info(module_info: ModuleInfo) -> Graph:
    """Return the graph of the modules, sorted by the begin of their forward; the table stays as it is."""
    stats = module_info["mod_stats"]
    order = module_info["mod_order"]
    _check_names([one["fqn"] for one in stats], order)
    place = {name: number for number, name in enumerate(dict.fromkeys(order["fw_pre_order"]))}
    graph = Graph(len(stats))
    # Of a module that is called several times the last end counts: before it not all of it is there.
    graph.fw_post_order = list(dict.fromkeys(reversed(order["fw_post_order"])))[::-1]
    end = {name: number for number, name in enumerate(graph.fw_post_order)}
    for one in sorted(stats, key=lambda one: place[one["fqn"]]):
        name = one["fqn"]
        graph.add_node({**one, "index": place[name], "pos_fw_post_order": end[name]})
    for outer, inner in _nested(place, order):
        graph.ad_matrix[place[outer]][place[inner]] = 1
    return graph


def _check_names(names: list[str], order: ModOrder) -> None:
    """Refuse orders and statistics of different modules."""
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise GraphError(f"{twice[0]} is in the statistics twice; every module has one row.")
    known = set(names)
    for key in ("fw_pre_order", "fw_post_order"):
        listed: list[str] = order[key]
        if unknown := sorted(set(listed) - known):
            raise AssertionError(f"{unknown[0]} is in {key}, but has no statistics")
        if missing := sorted(known - set(listed)):
            raise ValueError(f"{missing[0]} has statistics, but is not in {key}")


def _nested(names: Iterable[str], order: ModOrder) -> Iterator[tuple[str, str]]:
    """Yield every module with each that is inside of it, and with itself.

    Inside is what is called inside, or has a name that says so: a module that is in two places has one name.
    """
    known = set(names)
    for name in known:
        parts = name.split(".")
        prefixes = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        yield from ((prefix, name) for prefix in prefixes if prefix in known)
    yield from _called_inside(order["fw_pre_order"], order["fw_post_order"])


def _called_inside(begins: list[str], ends: list[str]) -> list[tuple[str, str]]:
    """Follow the calls by their begins and ends; nothing if these are not of the same calls."""
    found: list[tuple[str, str]] = []
    active: list[str] = []
    ended = 0
    for name in [*begins, None]:
        while active and ended < len(ends) and active[-1] == ends[ended]:
            active.pop()
            ended += 1
        if name is not None:
            found += [(outer, name) for outer in active]
            active.append(name)
    return [] if active or ended < len(ends) else found


def is_self_or_submodule(name_descendant: str, name_ancestor: str) -> bool:
    """Whether a module is another one or inside of it, by the parts of their names."""
    return name_descendant == name_ancestor or is_submodule(name_descendant, name_ancestor)


def is_submodule(name_descendant: str, name_ancestor: str) -> bool:
    """Whether a module is inside of another one, by the parts of their names."""
    return name_descendant.startswith(f"{name_ancestor}.")


def display_bytes(b: int, unit: str = "MiB") -> str:
    """Return a size in KiB, MiB or GiB with two decimals; with any other unit, in bytes."""
    if unit in _UNITS:
        return f"{b / 2 ** _UNITS[unit]:.2f} {unit}"
    return f"{b:.2f} bytes"


def get_peak_memory_runtime_baseline(graph: Graph) -> tuple[int, float]:
    """Return the peak bytes and the milliseconds of the step without checkpointing, on one device.

    The peak is the largest sum, over the modules, of all parameters, the gradients that are there when its
    backward begins, and the activations and their gradients. Optimizer state is not in it.
    """
    root = first_node(graph)
    most = max(node["grad_total"] + node["act_grad_per_module"] + node["act_total"] for node in graph.nodes)
    peak = max(root["param_per_module"] + most, 0)
    return peak, root["fw_runtime_per_module"] + root["bw_runtime_per_module"]


def first_node(graph: Graph) -> Node:
    """Return the model itself, whose forward begins first."""
    if not graph.nodes:
        raise IndexError("the graph has no modules")
    return graph.nodes[0]
