"""torch.compile in our order: a pass after fusion, at the place that inductor's configuration has for one.

Inductor takes the smallest peak among the order that the pass returns and three of its own, by its own count.
The pass counts more precisely what kernels allocate (`scheduler_memory.py`), and returns our order only where
it is better by the precise count and not worse by inductor's, which then keeps it. Everywhere else the nodes
are returned as they came, and inductor does what it would have done without the pass. Nothing of inductor is
replaced.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomSchedulerPass

from trainfit.order_fronts.scheduler_memory import Nodes, planned_graph, precise_graph
from trainfit.ordering.problem import peak_of, problem_of
from trainfit.ordering.results import Order
from trainfit.ordering.solve import TORCH_METHODS, heuristic_orders, solve


@dataclass(frozen=True)
class CompiledGraph:
    """One graph that was compiled: what inductor would have needed, and what our order needs."""

    order: Order
    """The best order found, by the precise count."""
    inductor_peak_bytes: int
    """The precise peak of the order that inductor would have chosen by itself."""
    peak_bytes: int
    """The precise peak of the order that the pass returned."""

    @property
    def changed(self) -> bool:
        """Whether inductor got our order instead of its own."""
        return self.peak_bytes < self.inductor_peak_bytes


Watcher = Callable[[CompiledGraph], None]


@dataclass(frozen=True)
class OrderPass(CustomSchedulerPass):
    """Gives inductor our order of a graph's kernels where its peak is smaller than inductor would reach."""

    before: Callable[[Nodes], Nodes] | None = None
    """The pass that was there already; it runs first."""
    watcher: Watcher | None = None
    """Called for every graph, better or not."""

    def __call__(self, nodes: Nodes) -> Nodes:
        """Return the nodes in the better order, or as they came."""
        if self.before is not None:
            nodes = self.before(nodes)
        planned = planned_graph(nodes)
        counted, precise_of = problem_of(planned), precise_graph(nodes, planned)
        precise = problem_of(precise_of)
        orders = heuristic_orders(planned, counted)
        theirs = min(TORCH_METHODS, key=lambda method: peak_of(counted, orders[method]))
        most_counted = peak_of(counted, orders[theirs])
        needed = peak_of(precise, orders[theirs])
        best = solve(precise_of)
        candidates = [best.steps]
        if peak_of(counted, best.steps) > most_counted:
            candidates = [solve(planned).steps]
        steps = min(candidates, key=lambda steps: peak_of(precise, steps))
        reached = peak_of(precise, steps)
        kept = reached < needed and peak_of(counted, steps) <= most_counted
        if self.watcher is not None:
            self.watcher(CompiledGraph(best, needed, reached if kept else needed))
        return [nodes[step] for step in steps] if kept else nodes

    def uuid(self) -> Any:
        """Identify the pass for inductor's cache of compiled code; None: cannot be cached."""
        if self.before is None:
            return _code_hash()
        known = self.before.uuid() if isinstance(self.before, CustomSchedulerPass) else None
        return None if known is None else (_code_hash(), known)


def install(watcher: Watcher | None = None) -> None:
    """Let everything that is compiled from now on run in our order; `uninstall` ends it."""
    uninstall()
    present = config._post_fusion_custom_pass
    config._post_fusion_custom_pass = OrderPass(before=present, watcher=watcher)


def uninstall() -> None:
    """Put back what was there before `install`; nothing happens if it was not called."""
    present = config._post_fusion_custom_pass
    if isinstance(present, OrderPass):
        config._post_fusion_custom_pass = present.before


@contextlib.contextmanager
def installed(watcher: Watcher | None = None) -> Iterator[None]:
    """Let everything that is compiled within the block run in our order."""
    with config.patch(_post_fusion_custom_pass=config._post_fusion_custom_pass):
        install(watcher)
        yield


@functools.cache
def _code_hash() -> str:
    """Hash the code that decides the order: compiled code is cached as long as that does not change."""
    hasher = hashlib.sha256()
    package = Path(__file__).parent.parent
    own = (Path(__file__), Path(__file__).parent / "scheduler_memory.py")
    for file in (*sorted((package / "ordering").glob("*.py")), *own):
        hasher.update(file.read_bytes())
    return hasher.hexdigest()
