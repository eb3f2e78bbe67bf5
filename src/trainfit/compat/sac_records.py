"""The records of `torch.distributed._tools.sac_estimator`, and how they are printed."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from math import nan
from typing import NamedTuple

from trainfit.compat.printed_tables import print_table


@dataclass
class SACStats:
    """The ops of one module, in order: names, milliseconds, bytes, and which of them are special."""

    func_names: list[str]
    runtimes: list[float]
    memory: list[int]
    view_like_ops: list[int]
    rand_ops: list[int]
    saved_autograd_ops: list[int]
    inplace_ops: list[tuple[int, int]]
    """Ops that write to a storage, each with the op of the module that made it (itself, if none did)."""
    force_store_random: bool


class MSPS(NamedTuple):
    """Ops that are recomputed together: bytes, milliseconds, and bytes per millisecond."""

    func_names: set[str]
    op_idx: int
    memory: int
    runtime: float
    msps: float


@dataclass
class SACTradeOffStats:
    """Share of the bytes discarded against share of the time added, and straight lines through it."""

    n_segments: int
    slopes: list[float]
    intercepts: list[float]
    fit_breaks: list[float]
    tradeoff_curve: OrderedDict[float, float]
    sac_memory: int
    sac_runtime: float


@dataclass
class SACGreedyOrderMeta:
    """What is always recomputed, what is always stored, and the rest by bytes per millisecond."""

    recomputed_ops: set[int]
    stored_ops: set[int]
    """First ops of groups."""
    inplace_op_groups: dict[int, set[int]]
    random_ops_group: dict[int, set[int]]
    msps_meta: list[MSPS]

    def group_of(self, op: int) -> set[int]:
        """Return the ops that go with the first op of a group."""
        return {op} | self.inplace_op_groups.get(op, set()) | self.random_ops_group.get(op, set())


def print_stats(stats: SACStats, tabular: bool) -> None:
    """Print the ops of a module as a table."""
    totals = f"Total Memory: {sum(stats.memory)} B Total Runtime: {sum(stats.runtimes)} ms"
    print(f"{totals} Store Random: {stats.force_store_random}")
    parents = dict(stats.inplace_ops)
    rows = [
        (
            str(number),
            name,
            f"{stats.runtimes[number]:.4f}",
            str(stats.memory[number]),
            str(number in stats.view_like_ops),
            str(number in stats.rand_ops),
            str(number in stats.saved_autograd_ops),
            str(parents.get(number)),
        )
        for number, name in enumerate(stats.func_names)
    ]
    headers = (
        "Op Idx", "Op Name", "Runtimes(ms)", "Memory (B)", "View-like", "Random", "Saved Autograd",
        "In-place",
    )  # fmt: skip
    print_table(headers, rows, tabular)


def print_trade_off(order: SACGreedyOrderMeta, stats: SACStats, tabular: bool) -> None:
    """Print what discarding the ops takes, one group after another, and what that adds up to."""
    total_bytes, total_runtime = sum(stats.memory), sum(stats.runtimes)
    groups: list[tuple[set[int], float, bool, bool]] = []
    groups += [(order.group_of(op), nan, False, True) for op in sorted(order.recomputed_ops)]
    groups += [(order.group_of(one.op_idx), one.msps, False, False) for one in order.msps_meta]
    groups += [(order.group_of(op), nan, True, False) for op in sorted(order.stored_ops)]
    rows = []
    discarded, again = 0, 0.0
    for ops, msps, stored, recomputed in groups:
        discarded += sum(stats.memory[op] for op in ops)
        again += sum(stats.runtimes[op] for op in ops)
        rows.append(
            (
                str(ops),
                str({stats.func_names[op] for op in ops}),
                f"{discarded / total_bytes if total_bytes else 0.0:.4f}",
                str(discarded),
                f"{again / total_runtime if total_runtime else 0.0:.4f}",
                str(again),
                "nan" if msps != msps else f"{msps:.2e}",
                str(stored),
                str(recomputed),
            )
        )
    headers = (
        "Op Id(s)", "Op Name(s)", "Discarded Mem (%)", "Discarded Mem (B)", "Recomp time (%)",
        "Recomp time (ms)", "MSPS", "Always Stored", "Always Recomputed",
    )  # fmt: skip
    print_table(headers, rows, tabular)
