"""The modules as a tree for the treemap, and as a table: memory at the peak, kept for backward, time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from trainfit.memory.module_stats import ModuleStats
from trainfit.memory.peak_owners import OUTSIDE, peak_owners
from trainfit.traces.simulate import Timeline
from trainfit.traces.trace import CATEGORIES
from trainfit.webpage.page_parts import Part, Strings, column, table


def treemap_part(timeline: Timeline, modules: Sequence[ModuleStats], strings: Strings) -> Part:
    """Return the tree of modules: own bytes at the peak by category, own seconds of forward and backward."""
    owned: dict[int, dict[str, int]] = {}
    for (module, category), size in peak_owners(timeline).items():
        owned.setdefault(module, {})[category] = size
    trace = timeline.trace
    nodes = range(len(trace.modules))
    part: Part = {
        "kind": "treemap",
        "names": [strings.number(module.name) for module in trace.modules],
        "classes": [strings.number(module.class_name) for module in trace.modules],
        "parents": [module.parent for module in trace.modules],
        "categories": list(CATEGORIES),
        "owned": [_sparse(owned.get(node, {})) for node in nodes],
        "outside": _sparse(owned.get(OUTSIDE, {})),
        "peak_bytes": timeline.peak_bytes,
    }
    if modules and modules[0].forward_seconds is not None:
        part["forward"] = _own_seconds(timeline, [m.forward_seconds or 0.0 for m in modules])
        part["backward"] = _own_seconds(timeline, [m.backward_seconds or 0.0 for m in modules])
    return part


def _sparse(by_category: dict[str, int]) -> list[int]:
    """Return pairs of the category's number and its bytes, one after the other."""
    return [number for name, size in by_category.items() for number in (CATEGORIES.index(name), size)]


def _own_seconds(timeline: Timeline, whole: list[float]) -> list[float]:
    """Return seconds of each module without those below it; rounding must not make them negative."""
    own = list(whole)
    for number, module in enumerate(timeline.trace.modules):
        if module.parent >= 0:
            own[module.parent] -= whole[number]
    return [float(f"{max(seconds, 0.0):.4g}") for seconds in own]


def modules_table(modules: Sequence[ModuleStats], divided: bool) -> Part:
    """Return every module with everything below it."""
    columns: list[dict[str, Any]] = [
        column("module", "text", [module.name for module in modules]),
        column("class", "text", [module.class_name for module in modules], minor=True),
        column(
            "at the peak",
            "bytes",
            [module.parameter_bytes + module.buffer_bytes + module.at_peak_bytes for module in modules],
            "Parameters, buffers, and what was made inside that is alive at the peak of the step",
        ),
        column("parameters", "bytes", [module.parameter_bytes for module in modules]),
        column("gradients", "bytes", [module.gradient_bytes for module in modules]),
        column(
            "kept for backward",
            "bytes",
            [module.activation_bytes for module in modules],
            "Activations made inside that outlive the forward call",
        ),
        column("calls", "count", [module.calls for module in modules]),
    ]
    if divided:
        whole = [module.whole_parameter_bytes for module in modules]
        columns.insert(4, column("on all ranks", "bytes", whole, "Its parameters on all ranks, each once"))
    if modules and modules[0].forward_seconds is not None:
        columns.append(column("forward", "seconds", [module.forward_seconds for module in modules]))
        columns.append(column("backward", "seconds", [module.backward_seconds for module in modules]))
    caption = "Every module, with everything inside it (predicted)"
    return table(caption, *columns, sorted_by=None, name="modules")


def alike(name: str) -> str:
    """Return a module's name with its numbers as stars, so that layers that are alike have one name."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
