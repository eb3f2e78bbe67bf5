"""`SACEstimator` of `torch.distributed._tools.sac_estimator`: what checkpointing ops of a module trades.

    estimator = SACEstimator(device="a100-sxm-40gb")
    with FakeTensorMode(), estimator("operator-level-cost-model"):
        loss = model(tokens).sum()
    estimator.pwlf_sac_tradeoff_curve(n_segments=2)
    estimator.display_modulewise_sac_stats(depth=3)

Statistics are of modules with modules inside, of their last call; which ops go together and in which order
they are discarded is said by `planning/modules/sac_stats.py`.
"""

from __future__ import annotations

import importlib
import os

from trainfit.compat.observing_estimator import ObservingEstimator
from trainfit.compat.op_runtimes import op_milliseconds
from trainfit.compat.sac_readings import greedy_order_of, stats_of
from trainfit.compat.sac_records import (
    MSPS,
    SACGreedyOrderMeta,
    SACStats,
    SACTradeOffStats,
    print_stats,
    print_trade_off,
)
from trainfit.compat.seen_calls import Seen
from trainfit.compat.trade_off_fit import fitted
from trainfit.devices.device_table import Device

__all__ = ["MSPS", "SACEstimator", "SACGreedyOrderMeta", "SACStats", "SACTradeOffStats"]

_FOLDER = "tradeoff_graphs"


class SACEstimator(ObservingEstimator):
    """Follows the forward of modules while it is entered; what was found before stays until found again."""

    _refuses_writes = False  # the statistics are of forward, and torch's estimator does not refuse them

    def __init__(self, device: str | Device | None = None) -> None:
        """Prepare; `device` names what the operators would run on, else it is the one that tensors are on."""
        super().__init__(device)
        self.sac_mod_stats: dict[str, SACStats] = {}
        self.sac_mod_tradeoff_stats: dict[str, SACTradeOffStats] = {}
        self.sac_mod_greedy_order_meta: dict[str, SACGreedyOrderMeta] = {}

    def _read(self, seen: Seen) -> None:
        trace = seen.trace
        runtimes = op_milliseconds(trace, self._mode, self._device)
        parents = {module.parent for module in trace.modules}
        for number in trace.forward_post_order:
            call = seen.calls[number]
            if call.recompute or call.module not in parents:
                continue
            name = trace.module_name(call.module)
            returned = frozenset(call.returned)
            stats = stats_of(trace, trace.calls[number], runtimes, returned, has_tensors=call.has_tensors)
            self.sac_mod_stats[name] = stats
            self.sac_mod_greedy_order_meta[name] = greedy_order_of(stats)

    def pwlf_sac_tradeoff_curve(self, n_segments: int = 2, save_tradeoff_graphs: bool = False) -> None:
        """Lay at most so many straight lines through the trade-off of each module.

        With `save_tradeoff_graphs` each is drawn into the folder `tradeoff_graphs`, which needs matplotlib.
        """
        if n_segments < 1:
            raise ValueError(f"n_segments must be at least 1, got {n_segments}")
        for name, stats in self.sac_mod_stats.items():
            found = fitted(stats, self.sac_mod_greedy_order_meta[name], n_segments)
            self.sac_mod_tradeoff_stats[name] = found
            if save_tradeoff_graphs:
                _save_graph(name, found)

    def display_sac_stats(self, sac_stats: SACStats, print_tabular: bool = False) -> None:
        """Print the ops of a module; as a table of the package tabulate, if asked for."""
        print_stats(sac_stats, print_tabular)

    def display_sac_tradeoff_stats(
        self, greedy_order_meta: SACGreedyOrderMeta, sac_stats: SACStats, print_tabular: bool = False
    ) -> None:
        """Print what discarding the ops of a module adds up to, in the greedy order."""
        print_trade_off(greedy_order_meta, sac_stats, print_tabular)

    def display_modulewise_sac_stats(self, depth: int = 2, print_tabular: bool = False) -> None:
        """Print both for all modules down to a depth."""
        for name, stats in self.sac_mod_stats.items():
            if name.count(".") < depth:
                print(f"Module: {name}")
                self.display_sac_stats(stats, print_tabular)
                print(f"AC Trade-off for Module: {name} MSPS = Memory/Runtime")
                self.display_sac_tradeoff_stats(self.sac_mod_greedy_order_meta[name], stats, print_tabular)


def _save_graph(name: str, found: SACTradeOffStats) -> None:
    try:
        importlib.import_module("matplotlib").use("Agg")
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise ImportError("drawing trade-offs needs matplotlib: pip install matplotlib.") from error
    figure, axes = pyplot.subplots()
    axes.plot(
        list(found.tradeoff_curve), list(found.tradeoff_curve.values()), "x", label="Ops in greedy order"
    )
    heights = [
        max(s * share + i for s, i in zip(found.slopes, found.intercepts)) for share in found.fit_breaks
    ]
    axes.plot(found.fit_breaks, heights, "-", label="Lines")
    axes.set(xlabel="Memory discarded / Total memory", ylabel="Recomp time / Total recomp time", title=name)
    axes.legend()
    os.makedirs(_FOLDER, exist_ok=True)
    path = os.path.join(_FOLDER, f"{name}.png")
    try:
        figure.savefig(f"{path}.part", format="png")
        os.replace(f"{path}.part", path)
    finally:
        pyplot.close(figure)
        if os.path.exists(f"{path}.part"):
            os.remove(f"{path}.part")
