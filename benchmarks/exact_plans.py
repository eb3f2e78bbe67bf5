"""Every plan there is, replayed: the exact optimum, for steps that are small enough to try everything.

A plan is a set of regions that do not overlap, and for each which of its ops run again. What has to be kept
follows: everything that backward or those ops need and that they do not make.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from trainfit.costs.schedule import schedule
from trainfit.costs.table import CostTable
from trainfit.planning.effects import Effect, effect_of
from trainfit.planning.minimum_cut import Choice, choice_of
from trainfit.planning.model_calls import candidate_calls
from trainfit.planning.regions import RegionGraph, region_graph
from trainfit.planning.replay import replayed as replay_of
from trainfit.traces.trace import Trace

MOST_PLANS = 60_000


def every_plan(trace: Trace, costs: CostTable) -> list[tuple[int, float]]:
    """Return peak bytes and step seconds of every plan, the empty one included."""
    seconds = schedule(trace, costs).marginal_seconds.tolist()
    graphs = [region_graph(trace, call, seconds) for call in candidate_calls(trace)]
    regions = {(graph.start, graph.end): graph for graph in graphs if graph is not None}
    effects = {
        span: [effect_of(trace, region, choice) for choice in every_choice(region)]
        for span, region in regions.items()
    }
    found: list[tuple[int, float]] = []
    for spans in _sets_without_overlap(sorted(regions)):
        for chosen in itertools.product(*(effects[span] for span in spans)):
            if len(found) == MOST_PLANS:
                raise ValueError(f"more than {MOST_PLANS} plans: this step is too large to try all")
            found.append(replayed(trace, costs, list(chosen)))
    return found


def replayed(trace: Trace, costs: CostTable, effects: list[Effect]) -> tuple[int, float]:
    """Return peak bytes and step seconds of the step with these regions."""
    replay = replay_of(trace, costs, effects)
    return replay.timeline.peak_bytes, replay.step_seconds


def best_seconds(plans: list[tuple[int, float]], budget_bytes: int) -> float:
    """Return the step of the fastest plan within the budget."""
    return min(seconds for peak, seconds in plans if peak <= budget_bytes)


def every_choice(region: RegionGraph) -> Iterator[Choice]:
    """Yield each way to have every needed value, without recomputing what is not needed."""
    groups = region.groups
    repeatable = [n for n, group in enumerate(groups) if group.repeatable and group.storages]
    for size in range(len(repeatable) + 1):
        for repeated in map(frozenset, itertools.combinations(repeatable, size)):
            choice = choice_of(groups, repeated)
            read = {maker for n in repeated for maker in groups[n].inputs}
            useful = all(groups[n].needed or n in read for n in repeated)
            if useful and all(groups[n].keepable for n in choice.kept):
                yield choice


def _sets_without_overlap(spans: list[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], ...]]:
    if not spans:
        yield ()
        return
    first, rest = spans[0], spans[1:]
    yield from _sets_without_overlap(rest)
    apart = [span for span in rest if span[0] >= first[1]]
    for others in _sets_without_overlap(apart):
        yield (first, *others)
