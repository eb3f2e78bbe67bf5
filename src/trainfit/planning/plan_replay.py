"""The decisions of a plan, replayed over another trace of the same step: that of another rank, for one.

All ranks run the plan of one of them. Where their parts of the model are not equally large, each has a peak
of its own under it, and that is what this finds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainfit.errors import PlanDoesNotFit
from trainfit.planning.certify import promised_peak
from trainfit.planning.effects import Effect, effect_of
from trainfit.planning.host_copies import CopyWindow, HostLink
from trainfit.planning.minimum_cut import Choice
from trainfit.planning.model_calls import calls_in_pass, forward_ops
from trainfit.planning.region_inputs import input_at
from trainfit.planning.regions import RegionGraph, chain_graph
from trainfit.planning.rewrite import rewritten
from trainfit.planning.unit_gathers import has_units_inside
from trainfit.plans.plan import Plan, Region
from trainfit.traces.simulate import Timeline, simulate
from trainfit.traces.trace import Trace

_ANY_LINK = HostLink(1.0, 0.0, overlaps=True)
"""Only memory is asked for here, and not how long copies take."""
_Calls = dict[tuple[str, int], list[int]]
"""The calls of each module in a step, by which of its calls in one pass over the model it is."""


def replay_plan(plan: Plan, trace: Trace) -> tuple[Timeline, int]:
    """Return the memory of a step that runs a plan, and its peak with what a plan sets aside.

    Raises `PlanDoesNotFit` where the step is not one that can run the plan as it was made.
    """
    effects = list(_effects(plan, trace))
    timeline = simulate(rewritten(trace, effects) if effects else trace)
    return timeline, promised_peak(trace, timeline, bool(effects))


def _effects(plan: Plan, trace: Trace) -> Iterator[Effect]:
    calls: _Calls = {}
    for number, place in calls_in_pass(trace).items():
        calls.setdefault((trace.module_name(trace.calls[number].module), place), []).append(number)
    seconds = [0.0] * len(trace.ops)
    for row in _rows(plan):
        found = [_calls_of(region, calls) for region in row]
        # One region for each pass over the model: a plan decides the same for all of them.
        for together in zip(*found):
            graph = chain_graph(trace, together, seconds)
            if graph is None and has_units_inside(trace, together):
                raise PlanDoesNotFit(
                    f"{row[0].module} is around FSDP units, and what they gather if it is recomputed is not "
                    "known."
                )
            if graph is None:
                raise PlanDoesNotFit(f"{row[0].module} cannot be checkpointed in this step.")
            choice = _choice(plan, trace, graph, row)
            copying = (_window(trace, graph, row[0], calls), _ANY_LINK) if choice.copies else None
            yield effect_of(trace, graph, choice, by_torch=row[0].whole, copying=copying)


def _window(trace: Trace, graph: RegionGraph, region: Region, calls: _Calls) -> CopyWindow:
    """Return beside what the results of a region are copied to the host."""
    if region.beside is None:
        return CopyWindow(-1, graph.end, graph.first_unpack)
    found = calls.get((region.beside.module, region.beside.call), [])
    beside = next((n for n in found if trace.calls[n].body.start >= graph.end), None)
    if beside is None or trace.calls[beside].backward_start < 0:
        raise PlanDoesNotFit(
            f"{region.module} is copied to the host beside {region.beside.module}, which does not follow it "
            "in this step."
        )
    return CopyWindow(beside, trace.calls[beside].body.stop, trace.calls[beside].backward_start)


def _rows(plan: Plan) -> Iterator[Sequence[Region]]:
    """Yield the regions of a plan, several in a row that are recomputed together as one."""
    row: list[Region] = []
    for region in plan.regions:
        if row and not region.continues:
            yield row
            row = []
        row.append(region)
    if row:
        yield row


def _calls_of(region: Region, calls: _Calls) -> list[int]:
    found = calls.get((region.module, region.call))
    if not found:
        times = "" if region.call == 0 else f" {region.call + 1} times"
        raise PlanDoesNotFit(f"it has a region {region.module}, which this step does not call{times}.")
    return found


def _choice(plan: Plan, trace: Trace, graph: RegionGraph, row: Sequence[Region]) -> Choice:
    """Return what a plan decides about the groups of a region."""
    kept: set[int] = set()
    repeated: set[int] = set()
    offloaded: set[int] = set()
    for call, region in zip(graph.calls, row):
        numbers, decided = forward_ops(trace, call), plan.kind_of(region).ops
        names = [op.name for op in decided]
        here = [trace.op_name(number) for number in numbers]
        if names != here:
            raise PlanDoesNotFit(f"{region.module} {_first_difference(names, here)}.")
        for number, op in zip(numbers, decided):
            group = graph.group_of_op[number]
            behaviour = op.decision.behaviour
            if behaviour.on_host:
                offloaded.add(group)
            elif behaviour.restored:
                kept.add(group)
            elif behaviour.runs_again and not graph.groups[group].free:
                repeated.add(group)
    decided_inputs = plan.kind_of(row[0]).host_inputs
    if any(input_at(trace, graph, place) is None for place in decided_inputs):
        raise PlanDoesNotFit(f"{row[0].module} has other inputs in this step.")
    return Choice(frozenset(kept), frozenset(repeated), 0, 0.0, frozenset(offloaded), decided_inputs)


def _first_difference(planned: list[str], here: list[str]) -> str:
    for number, (one, other) in enumerate(zip(planned, here)):
        if one != other:
            return f"runs other operators in this step: op {number} is {other}, and {one} in the plan"
    return f"runs {len(here)} operators in this step, and {len(planned)} in the plan"
