"""Regions that are recomputed as a whole: nothing is kept, and torch alone can do it.

That costs the host less than following a plan op by op (`applying/plain_checkpoint.py`), but all ops run
again up to the last value that backward needs, also those whose results nothing needs.
"""

from __future__ import annotations

from trainfit.operators.memory_use import moves_statistics
from trainfit.planning.minimum_cut import Choice
from trainfit.planning.regions import RegionGraph
from trainfit.traces.trace import Trace


def full_recompute(region: RegionGraph) -> Choice:
    """Return what plain checkpointing does: nothing is kept but what cannot be recomputed.

    It stops at the last value that backward needs.
    """
    last = max((number for number, group in enumerate(region.groups) if group.needed), default=-1)
    kept = frozenset(n for n, group in enumerate(region.groups) if not group.repeatable and group.storages)
    worth = enumerate(region.groups[: last + 1])
    repeated = frozenset(n for n, group in worth if group.repeatable and not group.free)
    size = sum(region.groups[n].bytes for n in kept)
    return Choice(kept, repeated, size, sum(region.groups[n].seconds for n in repeated))


def is_full_recompute(trace: Trace, region: RegionGraph, choice: Choice) -> bool:
    """Whether a choice is one that torch alone carries out, with the results of the step without a plan."""
    if choice.restored or choice.host_inputs or choice.repeated != full_recompute(region).repeated:
        return False
    return torch_can_recompute(trace, region)


def torch_can_recompute(trace: Trace, region: RegionGraph) -> bool:
    """Whether a region does nothing but compute its result.

    Where Python reads values, they may lead to another branch the next time: such a region is followed op by
    op in every step.
    """
    if len(region.calls) > 1 or not all(group.repeatable for group in region.groups):
        return False
    return not any(moves_statistics(trace.op_name(op)) or trace.ops[op].reads_value for op in region.ops)
