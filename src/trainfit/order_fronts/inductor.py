"""torch.compile in our order: a pass after fusion, at the place that inductor's configuration has for one.

Inductor takes the smallest peak among the order that the pass returns and three of its own, by its own count.
The pass counts as the generated code allocates (`scheduler_memory.py`, `reuse.py`). It returns our order only
where that is better by this count, not worse by inductor's (which then keeps it), and where no kernel that
may need memory inside itself runs while more is alive than in inductor's order. Everywhere else the nodes are
returned as they came, and inductor does what it would have done without the pass. Nothing of inductor is
replaced.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomSchedulerPass

from trainfit.order_fronts.reuse import live_bytes_with_reuse
from trainfit.order_fronts.scheduler_graph import Nodes
from trainfit.order_fronts.scheduler_memory import (
    kinds_of_buffers,
    nodes_with_unknown_workspace,
    planned_graph,
    precise_graph,
    with_workspaces,
)
from trainfit.ordering.best_order import TORCH_METHODS, best_order, heuristic_orders
from trainfit.ordering.found_order import Order
from trainfit.ordering.ordering_problem import peak_of, problem_of


@dataclass(frozen=True)
class CompiledGraph:
    """One graph that was compiled: what inductor would have needed, and what our order needs."""

    order: Order
    """The best order found, by the precise count."""
    inductor_peak_bytes: int
    """The peak of the order that inductor would have chosen by itself, as its code allocates."""
    peak_bytes: int
    """The same of the order that the pass returned."""

    @property
    def changed(self) -> bool:
        """Whether inductor got our order instead of its own."""
        return self.peak_bytes < self.inductor_peak_bytes


Watcher = Callable[[CompiledGraph], None]

_LEAST_SHARE = 0.001
"""Inductor's own order stays where ours would save less than this share of the peak."""


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
        choice = _OrderChoice(nodes)
        steps, reached = choice.steps()
        if self.watcher is not None:
            self.watcher(CompiledGraph(choice.best, choice.needed, reached))
        return nodes if steps is None else [nodes[step] for step in steps]

    def uuid(self) -> Any:
        """Identify the pass for inductor's cache of compiled code; None: cannot be cached."""
        if self.before is None:
            return _code_hash()
        known = self.before.uuid() if isinstance(self.before, CustomSchedulerPass) else None
        return None if known is None else (_code_hash(), known)


class _OrderChoice:
    """The order that inductor would choose, and ours if it is better whatever the kernels need inside."""

    def __init__(self, nodes: Nodes) -> None:
        planned = planned_graph(nodes)
        self._planned = planned
        self._counted = problem_of(planned)
        self._precise = precise_graph(nodes, planned)
        self._kinds = kinds_of_buffers(nodes)
        orders = heuristic_orders(planned, self._counted)
        theirs = orders[min(TORCH_METHODS, key=lambda method: peak_of(self._counted, orders[method]))]
        self._most_counted = peak_of(self._counted, theirs)
        self._before = self._alive(theirs)
        self.needed = max(self._before.values(), default=0)
        self.best = best_order(self._precise)
        self._unknown = nodes_with_unknown_workspace(nodes)

    def steps(self) -> tuple[tuple[int, ...] | None, int]:
        """Return our order and its peak; None for the order if it saves too little or could do harm."""
        if self.needed - self.best.peak_bytes > _LEAST_SHARE * self.needed:
            for steps in self._candidates():
                alive = self._alive(steps)
                reached = max(alive.values())
                if self.needed - reached > _LEAST_SHARE * self.needed and self._is_safe(steps, alive):
                    return steps, reached
        return None, self.needed

    def _alive(self, steps: Sequence[int]) -> dict[int, int]:
        """Return what is alive when each node runs, as the generated code has it."""
        return dict(zip(steps, live_bytes_with_reuse(self._planned, self._precise, steps, *self._kinds)))

    def _candidates(self) -> Iterator[tuple[int, ...]]:
        yield self.best.steps
        yield best_order(self._planned).steps
        # As if each of those nodes reached the best peak already: none of them may then have more alive.
        inside = {node: max(0, self.best.peak_bytes - self._before[node]) for node in self._unknown}
        yield best_order(with_workspaces(self._precise, inside)).steps

    def _is_safe(self, steps: tuple[int, ...], alive: dict[int, int]) -> bool:
        """Whether inductor keeps the order, and no kernel that may need more runs with more alive."""
        if peak_of(self._counted, steps) > self._most_counted:
            return False
        return all(alive[node] <= self._before[node] for node in self._unknown)


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
    for file in code_files():
        hasher.update(file.read_bytes())
    return hasher.hexdigest()


def code_files() -> list[Path]:
    """Return the files with the code that decides the order."""
    package = Path(__file__).parent.parent
    folders = ("basics", "traces", "operators", "ordering", "order_fronts")
    files = (sorted((package / name).glob("*.py")) for name in folders)
    return [package / "errors.py", *chain(*files)]
