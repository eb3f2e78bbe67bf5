"""The fastest setting of FSDP's units within a budget, with few captures.

Which units stay whole after forward trades memory for gathers, and memory is what a plan trades for
recomputation: each setting is captured as FSDP runs it and gets the fastest plan that fits, and the settings
compete by the time of the replay. Among units that are alike the last ones are kept: they are whole for the
shortest time, and every other choice of as many has at least their memory at every moment. How many is looked
for between none and all, which are always tried, so that no uniform setting that was tried is faster.

PyTorch's proposed `fsdp_ilp` (which modules to wrap, so that exposed communication is least under a budget)
is the special case without checkpointing and without units that are kept, with figures per module instead of
a replay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainfit.models.parallel.unit_grain import Grain
from trainfit.sharding.unit_trials import Setting, Trial, Try

_GOOD_ENOUGH = 2e-3
"""Of a step: what is left to gain is not worth further captures."""
_MOST_KEPT = 6
"""How many numbers of kept units are tried between none and all."""


@dataclass(frozen=True)
class BestSetting:
    """The best setting, and what the step would take with nothing exposed and nothing recomputed."""

    best: Trial
    bound_seconds: float


def search(trial: Try, grains: Sequence[Grain | None]) -> BestSetting:
    """Try settings, the usual ones first; return the fastest that fits or, if none does, the smallest."""
    found: dict[Setting, Trial] = {}

    def tried(setting: Setting) -> Trial:
        found[setting] = trial(setting)
        return found[setting]

    none = tried(Setting(grains[0], 0))
    tried(Setting(grains[0], len(none.units)))
    _between(tried, grains[0], found)
    # Other units and gathering ahead can hide what is exposed, and nothing else.
    for grain in grains[1:]:
        if not _enough(found, _bound(found)):
            best, other = _best(found), tried(Setting(grain, 0))
            share = best.setting.kept / max(len(best.units), 1)
            if other.units and share:
                tried(Setting(grain, round(share * len(other.units))))
    best = _best(found)
    if not _enough(found, _bound(found)) and len(best.units) > 2:
        tried(Setting(best.setting.grain, best.setting.kept, prefetch=2))
    return BestSetting(_best(found), _bound(found))


Found = Mapping[Setting, Trial]


def _between(tried: Try, grain: Grain | None, found: Found) -> None:
    """Look for how many units to keep: halve the distance to the neighbours of the best so far.

    With memory enough, keeping all of them is the fastest: there is nothing to look for if that is reached.
    """
    for _ in range(_MOST_KEPT):
        fastest = min(one.free_seconds for one in found.values())
        known = sorted(setting.kept for setting in found)
        kept = _best(found).setting.kept
        place, gaps = known.index(kept), []
        if place > 0:
            gaps.append((kept - known[place - 1], (kept + known[place - 1]) // 2))
        if place + 1 < len(known):
            gaps.append((known[place + 1] - kept, (kept + known[place + 1]) // 2))
        width, middle = max(gaps, default=(0, 0))
        if width < 2 or _enough(found, fastest):
            return
        tried(Setting(grain, middle))


def _best(found: Found) -> Trial:
    fitting = [one for one in found.values() if one.fits]
    if not fitting:
        return min(found.values(), key=lambda one: one.plan.memory_bytes)
    return min(fitting, key=lambda one: (one.seconds, one.plan.memory_bytes))


def _bound(found: Found) -> float:
    """Return how long the step would take with nothing exposed and nothing recomputed."""
    return min(one.unexposed_seconds for one in found.values())


def _enough(found: Found, bound: float) -> bool:
    best = _best(found)
    return best.fits and best.seconds - bound <= _GOOD_ENOUGH * best.seconds
