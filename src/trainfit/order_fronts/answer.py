"""Answer `order` for whatever was given: a graph or its file, an FX module, a trace, or a step."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainfit.doing import doing
from trainfit.errors import OptionError
from trainfit.order_fronts.eager import trace_graph
from trainfit.ordering.best_order import best_order
from trainfit.ordering.found_order import Order
from trainfit.ordering.graph import BufferGraph
from trainfit.ordering.simulator_json import load_graph
from trainfit.trace import Trace

if TYPE_CHECKING:
    from trainfit.models.recipe import StepOptions
    from trainfit.step import Step

GRAPHS = ("joint", "eager")


@dataclass(frozen=True)
class OrderResult:
    """An order with where its graph came from. All bytes are predicted."""

    target: str
    source: str
    """`file`, `graph`, `joint` (forward and backward as one graph) or `eager` (the captured step)."""
    order: Order
    torch: str | None = None
    device: str | None = None
    released_at_last_use: Order | None = None
    """For an eager step: the best order if every tensor also went after its last use."""
    warnings: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict, compare=False)
    """Wall time of each stage: `capture` (or reading the file), `solve`, `total`."""


def order_anything(
    given: Any,
    *,
    graph: str = "joint",
    options: StepOptions | None = None,
    task: str | None = None,
    seconds: float | None = None,
) -> OrderResult:
    """Find the order with the smallest peak.

    `given` is a `BufferGraph`, the path of a graph as JSON, an FX `GraphModule`, a `Trace`, the name of a
    target, or a function that builds a `Step`. `graph` says how a target or function becomes a graph.
    `seconds` lets the search go on for that long if it has to; see `trainfit.ordering.best_order`.
    """
    if graph not in GRAPHS:
        raise OptionError(f"--graph must be one of {', '.join(GRAPHS)}, got {graph!r}.")
    begin = time.perf_counter()
    if isinstance(given, BufferGraph):
        found = _Found("graph", "graph", given)
    elif isinstance(given, Trace):
        found = _of_trace(given)
    elif is_graph_file(given):
        doing("reading the graph")
        found = _Found(str(given), "file", load_graph(given))
    elif _is_fx_module(given):
        found = _of_module(given)
    else:
        doing("tracing the step")
        found = _of_step(given, graph, options, task)
    captured = time.perf_counter()
    doing("looking for the best order")
    order = best_order(found.graph, seconds=seconds)
    freest = best_order(found.released_at_last_use, seconds=seconds) if found.released_at_last_use else None
    end = time.perf_counter()
    return OrderResult(
        target=found.target,
        source=found.source,
        order=order,
        torch=found.torch,
        device="cpu" if found.torch else None,
        released_at_last_use=freest,
        warnings=found.warnings,
        seconds={"capture": captured - begin, "solve": end - captured, "total": end - begin},
    )


def is_graph_file(given: Any) -> bool:
    """Return whether what was given is the path of a graph: it ends in `.json`, and is no `hf:` config."""
    if isinstance(given, Path):
        return True
    return isinstance(given, str) and given.endswith(".json") and not given.startswith("hf:")


def _is_fx_module(given: Any) -> bool:
    """Whether it is a `GraphModule`, without loading torch: whoever has one has loaded it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(given, torch.fx.GraphModule)


@dataclass(frozen=True)
class _Found:
    target: str
    source: str
    graph: BufferGraph
    torch: str | None = None
    released_at_last_use: BufferGraph | None = None
    warnings: tuple[str, ...] = ()


def _of_trace(trace: Trace) -> _Found:
    return _Found(
        trace.target,
        "eager",
        trace_graph(trace),
        trace.torch,
        trace_graph(trace, as_held=False),
        trace.warnings,
    )


def _of_module(module: Any) -> _Found:
    import torch

    from trainfit.order_fronts.fx import buffer_graph

    return _Found("GraphModule", "graph", buffer_graph(module), torch.__version__)


def _of_step(
    given: str | Callable[[], Step],
    graph: str,
    options: StepOptions | None,
    task: str | None,
) -> _Found:
    import torch

    from trainfit.models.recipe import StepOptions
    from trainfit.order_fronts.fx import buffer_graph
    from trainfit.order_fronts.joint import joint_graph_without_memory
    from trainfit.targets import load

    if isinstance(given, str) or callable(given):
        target = load(given, options or StepOptions(), task)
    else:
        raise OptionError(
            "order takes a graph, the path of one, an FX GraphModule, a Trace, the name of a target, or a "
            f"function that builds a Step; got {type(given).__name__}."
        )
    if graph == "eager":
        from trainfit.capturing import capture

        return _of_trace(capture(target.build, target=target.name, settings=target.settings))
    module = joint_graph_without_memory(target.build)
    return _Found(target.name, "joint", buffer_graph(module), torch.__version__)
