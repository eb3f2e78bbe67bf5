"""Which modules to checkpoint within a budget, and which ops of one: `torch.distributed._tools.sac_ilp`.

Both are adapters: the program over modules is `planning/modules/milp.py`, the one over ops is
`planning/modules/policy.py`; the solver is HiGHS. Units are torch's: GiB in, milliseconds and bytes out.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from trainfit.basics.units import format_bytes
from trainfit.compat.ilp_utils import Graph, Node, first_node
from trainfit.compat.sac_readings import op_table
from trainfit.errors import OptionError
from trainfit.planning.modules.milp import ModuleProblem, ModuleUnit, Stretch
from trainfit.planning.modules.policy import optimal_policy
from trainfit.planning.modules.sac_stats import Line, TradeOff
from trainfit.planning.modules.unit_names import places_of

logger = logging.getLogger(__name__)

_GIBIBYTE = 1 << 30
_SECONDS_LIMIT = 180.0
_GAP_SHARE = 1e-5
"""Of the step's time."""
_GAP_SHARE_OF_MANY = 0.02
"""Of the recomputation, if there are many modules: layers that are alike make the last bit of proof long."""
_FEW = 40
_DECIMALS = 10_000
"""Shares are given with four decimals."""


class SACDecision(IntEnum):
    """What becomes of an op of a checkpointed module."""

    RECOMPUTE = 0
    SAVE = 1


def sac_milp(
    graph: Graph,
    memory_budget: float,
    world_size: int = 1,
    ac_units: list[str] | None = None,
    fsdp_units: list[str] | None = None,
) -> tuple[dict[str, float], float, int]:
    """Return the modules to checkpoint so that the least is recomputed within a budget of GiB.

    The answer is the share of its activation bytes that each module discards, the milliseconds of computing
    them again, and the peak in bytes that this leaves: a prediction, at most the budget. Parameters and
    gradients are divided by the world size. Without `ac_units` every module with modules inside may be
    chosen; none around one of `fsdp_units` is. If nothing fits, the answer is `({}, 0, -1)`.
    """
    _check(memory_budget, world_size)
    root = first_node(graph)
    chosen = _candidates(graph, ac_units, fsdp_units)
    problem = _problem(graph, chosen, world_size)
    unplanned = problem.planned_peak_bytes({})
    budget = memory_budget * _GIBIBYTE
    if unplanned <= budget:
        return {}, 0.0, round(unplanned)
    step_seconds = (root["fw_runtime_per_module"] + root["bw_runtime_per_module"]) / 1e3
    found = problem.solve(
        int(budget),
        seconds_limit=_SECONDS_LIMIT,
        gap_seconds=_GAP_SHARE * step_seconds,
        gap_share=_GAP_SHARE_OF_MANY if len(chosen) > _FEW else 0.0,
    )
    if not found.feasible:
        smallest = problem.smallest_peak(seconds_limit=_SECONDS_LIMIT)
        least = format_bytes(round(problem.planned_peak_bytes(smallest.shares)))
        logger.error("no choice of modules fits into %s GiB; the smallest peak is %s", memory_budget, least)
        return {}, 0, -1
    shares = _earlier_ones_more(problem, found.shares)
    shares = {number: _rounded_up(share) for number, share in shares.items()}
    decisions = {chosen[number]["fqn"]: share for number, share in shares.items()}
    return decisions, 1e3 * problem.seconds(shares), round(problem.planned_peak_bytes(shares))


def _earlier_ones_more(problem: ModuleProblem, shares: dict[int, float]) -> dict[int, float]:
    """Return an answer that is as good, and in which of modules that are alike the earlier one discards more.

    What is discarded earlier is away for longer, so nothing needs more memory than before.
    """
    alike: dict[TradeOff, list[int]] = {}
    for number in sorted(shares, key=lambda number: problem.units[number].away_from):
        alike.setdefault(problem.units[number].curve, []).append(number)
    found: dict[int, float] = {}
    for numbers in alike.values():
        found.update(zip(numbers, sorted((shares[number] for number in numbers), reverse=True)))
    return {number: found[number] for number in shares}


def _check(memory_budget: float, world_size: int) -> None:
    if not memory_budget > 0:
        raise OptionError(f"memory_budget is a number of GiB above 0, got {memory_budget}.")
    if world_size == 0:
        raise ZeroDivisionError("world_size must be at least 1, got 0")
    if world_size < 1:
        raise OptionError(f"world_size must be at least 1, got {world_size}.")


def _rounded_up(share: float) -> float:
    """Return a share with four decimals that still frees enough."""
    return min(math.ceil(share * _DECIMALS - 1e-3) / _DECIMALS, 1.0)


def _candidates(graph: Graph, ac_units: list[str] | None, fsdp_units: list[str] | None) -> list[Node]:
    """Return the modules that may be checkpointed, in the order of the graph."""
    names = [node["fqn"] for node in graph.nodes]

    def places(given: Sequence[str] | None, role: str) -> set[int]:
        if isinstance(given, str):
            raise OptionError(f"{role}s are lists of names, got {given!r}; write [{given!r}].")
        return {place for name in given or () for place in places_of(names, name, role)}

    named = places(ac_units, "AC unit") if ac_units else set(range(len(names)))
    above = {
        outer for place in places(fsdp_units, "FSDP unit") for outer in _around(graph, graph.nodes[place])
    }
    return [
        node
        for place, node in enumerate(graph.nodes)
        if place in named and place not in above and not node["is_leaf"] and _storable_bytes(node)
    ]


def _around(graph: Graph, node: Node) -> set[int]:
    """Return the modules around one: by the matrix, and by names, because torch's matrix is incomplete."""
    parts = node["fqn"].split(".")
    prefixes = (".".join(parts[:count]) for count in range(1, len(parts)))
    found = {graph.name2node[prefix]["index"] for prefix in prefixes if prefix in graph.name2node}
    found.update(int(place) for place in graph.ad_matrix[:, node["index"]].nonzero()[0])
    return found - {node["index"]}


def _problem(graph: Graph, chosen: Sequence[Node], world_size: int) -> ModuleProblem:
    """Return the data of the program: a stretch is the backward of a module.

    When that runs, the modules whose forward ended earlier are away, and the others have done with theirs.
    """
    number_of = {node["index"]: number for number, node in enumerate(chosen)}
    units = []
    for node in chosen:
        around = tuple(number_of[place] for place in sorted(_around(graph, node)) if place in number_of)
        away_from = node["pos_fw_post_order"] + 1
        units.append(ModuleUnit(around, away_from, len(graph.fw_post_order) + 1, _curve(node)))
    parameters = first_node(graph)["param_per_module"]
    stretches = [
        Stretch(
            node["pos_fw_post_order"],
            parameters + node["grad_total"],
            node["act_grad_per_module"] + node["act_total"],
        )
        for node in graph.nodes
    ]
    return ModuleProblem(units, stretches, world_size)


def _storable_bytes(node: Node) -> int:
    return max(node["sac_memory"], node["act_fw_per_module"])


def _curve(node: Node) -> TradeOff:
    """Return the trade-off of a module as it was fitted."""
    storable, saved = node["sac_memory"], node["act_fw_per_module"]
    if storable < saved:
        logger.warning(
            "%s: its ops store %d bytes, but its forward leaves %d; the larger one is used",
            node["fqn"],
            storable,
            saved,
        )
    segments = zip(node["slopes"], node["intercepts"])
    lines = tuple(Line(slope, intercept) for slope, intercept in list(segments)[: node["n_segments"]])
    seconds = node["sac_runtime"] / 1e3
    return TradeOff(_storable_bytes(node), saved, seconds, ((0.0, 0.0), (1.0, 0.0)), lines)


def get_optimal_checkpointing_policy_per_module(sac_stats: Any, memory_budget: float) -> list[int]:
    """Return 1 (saved) or 0 (recomputed) per op: the most time saved within a share of the module's bytes.

    `sac_stats` is a `SACStats`, torch's or that of this package. If what must be saved exceeds the share, or
    shares the storage of a view, which never is, the answer is an empty list.
    """
    if not 0 <= memory_budget <= 1:
        raise ValueError(f"memory_budget is a share between 0 and 1, got {memory_budget}")
    stats = op_table(sac_stats)
    policy = optimal_policy(stats, memory_budget)
    saved = sum(op.bytes for op, decision in zip(stats.ops, policy) if decision)
    if saved > math.ceil(memory_budget * stats.bytes):
        logger.error("what must be saved takes %d of %d bytes, more than the budget", saved, stats.bytes)
        return []
    if both := [op.name for op, decision in zip(stats.ops, policy) if op.view and decision]:
        logger.error("%s is a view, which is never saved, of what must be saved", both[0])
        return []
    return policy
