"""`order`: the order of a graph's nodes with the smallest peak, and the pass that gives it to torch.compile.

Nothing here loads torch before it is needed: the graph of a file is ordered without it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainfit.api.stopwatch import Stopwatch
from trainfit.errors import OptionError
from trainfit.order_fronts.order_result import OrderResult, graph_to_order, has_graph, order_graph
from trainfit.ordering.found_order import Order

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from trainfit.models.recipe import StepOptions
    from trainfit.order_fronts.inductor import Watcher
    from trainfit.targets import Target
    from trainfit.traces.trace import Trace

GRAPHS = ("joint", "eager")


def order_anything(
    given: Any,
    *,
    graph: str = "joint",
    options: StepOptions | None = None,
    task: str | None = None,
    seconds: float | None = None,
) -> OrderResult:
    """Find the order with the smallest peak, with where its graph came from; see `OrderFunction.__call__`."""
    if graph not in GRAPHS:
        raise OptionError(f"--graph must be one of {', '.join(GRAPHS)}, got {graph!r}.")
    watch = Stopwatch()
    if not has_graph(given):
        given = _captured(given, graph, options, task)
    found = graph_to_order(given)
    watch.lap("capture")
    result = order_graph(found, seconds=seconds)
    watch.lap("solve")
    return replace(result, seconds=watch.seconds)


def _captured(given: Any, graph: str, options: StepOptions | None, task: str | None) -> Trace | Target:
    """Return the step that a name or a function stands for: its trace, or what its joint graph is made of."""
    if not isinstance(given, str) and not callable(given):
        raise OptionError(
            "order takes a graph, the path of one, an FX GraphModule, a Trace, the name of a target, or a "
            f"function that builds a Step; got {type(given).__name__}."
        )
    from trainfit.api.request import Request

    request = Request(given, "cpu", options, task)
    return request.trace() if graph == "eager" else request.resolved


class OrderFunction:
    """Call it to order a graph; `install` or `compiled` to let torch.compile use our order."""

    def __call__(
        self,
        given: Any,
        *,
        graph: str = "joint",
        options: StepOptions | None = None,
        task: str | None = None,
        seconds: float | None = None,
    ) -> Order:
        """Return the order with the smallest peak that is found, and what is proved about it.

        `given` is a `BufferGraph`, the path of a graph as JSON, an FX `GraphModule`, a `Trace`, the name of a
        target, or a function that builds a `Step`; of the latter two `graph` orders the `joint` forward and
        backward graph, or the `eager` step. Without `seconds` the effort is fixed and the result is the same
        on every machine; with it, the search may go on for that long.
        """
        return order_anything(given, graph=graph, options=options, task=task, seconds=seconds).order

    def module(
        self, module: GraphModule, *, freeable: tuple[str, ...] = (), seconds: float | None = None
    ) -> GraphModule:
        """Return an FX module that computes the same in the better order.

        `freeable` are placeholders that the caller gives away, such as activations saved for a backward.
        """
        from trainfit.order_fronts.fx import reorder

        return reorder(module, freeable, seconds=seconds)[0]

    def install(self, watcher: Watcher | None = None) -> None:
        """Let everything that torch.compile compiles from now on run in our order.

        `watcher` is called with the `Order` of every graph that is compiled.
        """
        from trainfit.order_fronts import inductor

        inductor.install(watcher)

    def uninstall(self) -> None:
        """Undo `install`. What is compiled already stays as it is."""
        from trainfit.order_fronts import inductor

        inductor.uninstall()

    def compiled(self, watcher: Watcher | None = None) -> AbstractContextManager[None]:
        """Return a context in which torch.compile uses our order; note that it compiles at the first call."""
        from trainfit.order_fronts import inductor

        return inductor.installed(watcher)

    def __repr__(self) -> str:
        """Look like the function that it mostly is."""
        return "<function trainfit.order>"


order = OrderFunction()
