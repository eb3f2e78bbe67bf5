"""`trainfit.order`: a function that orders what it is given, and the switch of the pass in torch.compile."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from trainfit.order_fronts.answer import order_anything
from trainfit.ordering.found_order import Order

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from trainfit.models.recipe import StepOptions
    from trainfit.order_fronts.inductor import Watcher


class OrderSwitch:
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


order = OrderSwitch()
