"""The options of the master problem: the regions worth checkpointing, and points of each one's curve."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence

from trainfit.costs.schedule import Schedule, Seconds
from trainfit.planning.curves import curve_of, with_points_between
from trainfit.planning.effects import Effect, effect_of
from trainfit.planning.full_recompute import full_recompute, torch_can_recompute
from trainfit.planning.host_copies import CopyWindow, HostLink, Offloading
from trainfit.planning.master import Option
from trainfit.planning.minimum_cut import Choice, choice_of
from trainfit.planning.model_calls import block_families, calls_in_pass, candidate_calls
from trainfit.planning.offload_curves import offloading_points, with_copies
from trainfit.planning.region_inputs import HostInput, inputs_for_host, with_inputs, without_inputs
from trainfit.planning.regions import RegionGraph, chain_graph
from trainfit.planning.replay import executor_seconds
from trainfit.traces.trace import Trace

_LEAST_SHARE = 0.0005
"""A region that could not free this share of the peak is not worth looking at."""
_MOST_REGIONS = 1200
_MOST_GROUPS = 600
_MOST_POINTS = 14
_POINTS_BETWEEN = 24
"""For all regions that are alike together: many of them fill the gaps of their hull by differing."""
_MOST_GROUPS_BETWEEN = 120
"""Larger regions have many points on their hull."""
_OFFLOAD_SECONDS = 4.0
"""After so long, further curves with copies are made of points without them: some regions, as those of
experts, are hard to solve."""
Passes = tuple[RegionGraph, ...]
"""The same call of a module, once for each pass over the model."""


def options_of(
    step: Schedule, peak_bytes: int, *, link: HostLink | None = None
) -> tuple[list[Option], list[list[int]]]:
    """Return the options of a step with this peak, and those of which at most one may be chosen.

    With a `link` results and inputs may be copied to the host.
    """
    regions = _regions(step.trace, step.marginal_seconds.tolist(), peak_bytes)
    options = _options(step, regions)
    if link is not None:
        options += _offloading_options(step, regions, link)
        options.sort(key=lambda option: option.region)
    return options, _exclusive(regions, options)


def _regions(trace: Trace, seconds: list[float], peak_bytes: int) -> list[Passes]:
    """Return the module calls worth checkpointing, each stretch of ops once, the outermost of equals."""
    places = calls_in_pass(trace)
    members: dict[tuple[int, int, int], list[RegionGraph]] = {}
    seen: set[tuple[int, int]] = set()
    for calls in (*((number,) for number in candidate_calls(trace)), *_rows(trace)):
        first, last = trace.calls[calls[0]], trace.calls[calls[-1]]
        if (first.body.start, last.body.stop) in seen:
            continue
        region = chain_graph(trace, calls, seconds)
        if region is None or len(region.groups) > _MOST_GROUPS:
            continue
        if region.freeable_bytes < _LEAST_SHARE * peak_bytes:
            continue
        seen.add((region.start, region.end))
        members.setdefault((first.module, places[calls[0]], len(calls)), []).append(region)
    found = [tuple(passes) for passes in members.values() if _alike(trace, passes)]
    largest = sorted(found, key=lambda passes: -passes[0].freeable_bytes)
    return sorted(largest[:_MOST_REGIONS], key=lambda passes: (passes[0].start, -passes[0].end))


def _rows(trace: Trace) -> Iterator[tuple[int, ...]]:
    """Yield blocks that follow each other, by two, four, eight: so they lie within each other or apart."""
    for calls in block_families(trace):
        length = 2
        while 2 * length <= len(calls):
            for first in range(0, len(calls) - length + 1, length):
                yield tuple(calls[first : first + length])
            length *= 2


def _alike(trace: Trace, passes: list[RegionGraph]) -> bool:
    """Whether one choice can be made for all passes: they do the same ops, on whatever sizes."""
    if len(passes) == 1:
        return True
    shapes = {
        tuple((g.saved, g.keepable, g.repeatable, g.reads, len(g.ops)) for g in region.groups)
        + tuple(trace.op_name(op) for op in region.ops)
        for region in passes
    }
    return len(shapes) == 1


def option_of(step: Schedule, occupied: Seconds, number: int, effects: tuple[Effect, ...]) -> Option:
    """Return one point of the region with this number; `occupied` is the step's `occupied_seconds`."""
    seconds = sum(effect.choice.seconds for effect in effects)
    executor = sum(executor_seconds(effect, step.costs.host) for effect in effects)
    if step.costs.host.runs_kernels:
        return Option(number, effects, seconds + executor)
    again = sum(float(occupied[list(effect.repeated)].sum()) for effect in effects)
    return Option(number, effects, seconds, again + executor)


def _options(step: Schedule, regions: list[Passes]) -> list[Option]:
    keys = [
        tuple((g.sizes, g.seconds, g.saved, g.keepable, g.repeatable, g.reads) for g in passes[0].groups)
        for passes in regions
    ]
    alike, occupied = Counter(keys), step.occupied_seconds
    curves: dict[object, list[Choice]] = {}
    options: list[Option] = []
    for number, (passes, key) in enumerate(zip(regions, keys)):
        if key not in curves:
            hull = _thinned(curve_of(passes[0].groups))
            more = _POINTS_BETWEEN // alike[key] if len(passes[0].groups) <= _MOST_GROUPS_BETWEEN else 0
            curves[key] = with_points_between(passes[0].groups, hull, more)
        points = curves[key]
        full = full_recompute(passes[0])
        if all(torch_can_recompute(step.trace, region) for region in passes) and not any(
            point.repeated == full.repeated for point in points
        ):
            points = [*points, full]
        for choice in points:
            chosen = [choice, *(choice_of(region.groups, choice.repeated) for region in passes[1:])]
            effects = tuple(effect_of(step.trace, *each) for each in zip(passes, chosen))
            options.append(option_of(step, occupied, number, effects))
    return options


def _offloading_options(step: Schedule, regions: list[Passes], link: HostLink) -> list[Option]:
    """Return the options that copy results or inputs to the host, if there is a place for the copies."""
    offloading = Offloading(step.trace, link, step.marginal_seconds.tolist())
    occupied = step.occupied_seconds
    curves: dict[object, list[Choice]] = {}
    options: list[Option] = []
    spent = 0.0
    for number, passes in enumerate(regions):
        windows = [offloading.window(region) for region in passes]
        narrowest = min((w for w in windows if w is not None), key=lambda w: w.narrowest, default=None)
        if narrowest is None or None in windows:
            continue
        inputs = _shared_inputs(step.trace, passes, [w for w in windows if w is not None])
        groups = with_inputs(passes[0].groups, inputs[0])
        key = (
            tuple((g.sizes, g.seconds, g.saved, g.keepable, g.repeatable, g.reads) for g in groups),
            narrowest.out_seconds,
            narrowest.back_seconds,
        )
        if key not in curves:
            hull, begin = _thinned(curve_of(groups)), time.monotonic()
            points = offloading_points(groups, hull, offloading, narrowest, solved=spent < _OFFLOAD_SECONDS)
            curves[key], spent = points, spent + time.monotonic() - begin
        for choice in curves[key]:
            effects = []
            for region, window, given in zip(passes, windows, inputs):
                assert window is not None
                own = with_inputs(region.groups, given)
                point = with_copies(own, choice, choice.offloaded, offloading, window)
                point = without_inputs(point, given, len(region.groups))
                effects.append(effect_of(step.trace, region, point, copying=(window, link)))
            options.append(option_of(step, occupied, number, tuple(effects)))
    return options


def _shared_inputs(
    trace: Trace, passes: Passes, windows: Sequence[CopyWindow]
) -> list[tuple[HostInput, ...]]:
    """Return the inputs of each pass that can be on the host in all of them."""
    found = [inputs_for_host(trace, region, window) for region, window in zip(passes, windows)]
    shared = set.intersection(*({one.place for one in inputs} for inputs in found))
    return [tuple(one for one in inputs if one.place in shared) for inputs in found]


def _thinned(points: list[Choice]) -> list[Choice]:
    """Keep about evenly many bytes between the points; always both ends."""
    if len(points) <= _MOST_POINTS:
        return points
    step = (len(points) - 1) / (_MOST_POINTS - 1)
    return [points[round(number * step)] for number in range(_MOST_POINTS)]


def _exclusive(passes: list[Passes], options: list[Option]) -> list[list[int]]:
    """Return the options of every chain of nested regions: at most one of them may be chosen.

    A chain for every region that has none inside: it and all regions around it.
    """
    regions = [region for region, *_ in passes]
    of_region: dict[int, list[int]] = {}
    for number, option in enumerate(options):
        of_region.setdefault(option.region, []).append(number)
    chains: list[list[int]] = []
    around: list[int] = []
    for number, region in enumerate(regions):
        if around and regions[around[-1]].end <= region.start:
            chains.append(list(around))
        while around and regions[around[-1]].end <= region.start:
            around.pop()
        around.append(number)
    if around:
        chains.append(around)
    return [[option for region in chain for option in of_region.get(region, [])] for chain in chains]
