"""The calls of a model's modules: which may be regions, which are blocks, and which passes they belong to."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from trainfit.traces.trace import Trace

_WRAPPERS = ("DistributedDataParallel",)
"""Modules whose `forward` prepares its own backward: the model inside can be a region, they cannot."""


def forward_ops(trace: Trace, call: int) -> Sequence[int]:
    """Return the ops of a module's `forward` in a call, where a plan is applied: hooks run outside of it.

    Nor does a plan decide about what units of FSDP inside do to be whole.
    """
    return own_ops(trace, trace.calls[call].body)


def own_ops(trace: Trace, ops: range) -> Sequence[int]:
    """Return the ops that the program itself runs, without what units of FSDP do around them."""
    own = [op for op in ops if not trace.ops[op].exchange]
    return ops if len(own) == len(ops) else own


def candidate_calls(trace: Trace) -> Iterator[int]:
    """Yield the module calls that may be regions: those of the model whose results backward needs.

    A module outside of the model's tree (a loss of its own) is not reached when a plan is applied. A unit of
    FSDP is gathered around its region; those inside of a region gather when it is recomputed.
    """
    for number, call in enumerate(trace.calls):
        worth = not call.recompute and call.backward_start >= 0 and bool(call.body)
        wraps = trace.modules[call.module].class_name in _WRAPPERS
        if worth and call.module in trace.in_model and not wraps:
            yield number


def _around_units(trace: Trace) -> set[int]:
    """Return the calls inside of which a unit of FSDP is called."""
    found: set[int] = set()
    for call in trace.calls:
        parent = call.parent if trace.modules[call.module].unit else -1
        while parent >= 0 and parent not in found:
            found.add(parent)
            parent = trace.calls[parent].parent
    return found


def block_families(trace: Trace) -> Iterator[list[int]]:
    """Yield the calls of blocks, family by family: numbered modules of one class in one container.

    Of a sharded model the blocks are units: what lies around several is none.
    """
    families: dict[tuple[str, str], list[int]] = {}
    around = _around_units(trace)
    for number in candidate_calls(trace):
        if number in around and not trace.modules[trace.calls[number].module].unit:
            continue
        module = trace.modules[trace.calls[number].module]
        container, _, last = module.name.rpartition(".")
        if last.isdecimal():
            families.setdefault((container, module.class_name), []).append(number)
    yield from (members for members in families.values() if len(members) > 1)


def calls_in_pass(trace: Trace) -> dict[int, int]:
    """Return, for each call of a module, which of its module's calls it is in one pass over the model.

    A pass begins when the model is called, and when forward goes on after a backward: that is how a model
    that runs a plan counts. A step that accumulates gradients has several; a plan cannot tell them apart.
    """
    backwards = _beginnings_of_backward(trace)
    counts: dict[tuple[int, int, int], int] = {}
    found: dict[int, int] = {}
    begun = 0
    for number, call in enumerate(trace.calls):
        if call.recompute:
            continue
        begun += call.module == trace.model
        place = (call.module, begun, bisect_right(backwards, call.forward_start))
        found[number] = counts.get(place, 0)
        counts[place] = found[number] + 1
    return found


def passes_in_step(trace: Trace) -> int:
    """Return how often the model is called in the step."""
    return sum(call.module == trace.model and not call.recompute for call in trace.calls)


def _beginnings_of_backward(trace: Trace) -> list[int]:
    phases = [op.phase for op in trace.ops]
    return [
        n for n, phase in enumerate(phases) if phase == "backward" and (n == 0 or phases[n - 1] != "backward")
    ]
