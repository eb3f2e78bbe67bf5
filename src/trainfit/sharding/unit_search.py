"""The fastest setting of FSDP's units within a budget: one problem, solved by branching.

Which units stay whole after forward trades memory for gathers, and memory is what a plan trades for
recomputation: both are chosen by one program (`planning/kept_problem.py`), and the choice is replayed with
the fastest plan for it. Which modules are units, and how many are gathered ahead, changes what there is to
choose from, and is branched on: each of the few combinations is captured and has its own program, whose bound
says whether anything in that branch can be faster than what was found. So the best of all branches is found,
as far as the programs are right about seconds (`_MODEL_ERROR`). No unit kept and all of them are always
tried, so that no uniform setting is faster.

PyTorch's proposed `fsdp_ilp` (which modules to wrap, so that exposed communication is least under a budget)
is the special case without checkpointing and without units that are kept, with figures per module instead of
a replay.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from trainfit.models.parallel.unit_grain import Grain
from trainfit.sharding.unit_trials import Proposal, Setting, Trial

_GOOD_ENOUGH = 2e-3
"""Of a step: what is left to gain is not worth further captures."""
_MOST_ANSWERS = 3
"""How many answers of the solver are tried for one choice of units."""
_MODEL_ERROR = 0.01
"""By how much the program may be wrong about seconds, which the replay knows."""
_AHEAD = 2


class UnitSettings(Protocol):
    """What the search asks: how a setting does, and which units to keep."""

    def trial(self, setting: Setting) -> Trial:
        """Return the step with a setting."""
        ...

    def propose(self, setting: Setting, less_bytes: int = 0) -> Proposal | None:
        """Return which units to keep, with what the allocator needs left free; None if there is no answer."""
        ...


@dataclass(frozen=True)
class BestSetting:
    """The best setting, and how long the step takes at least, whatever is set: what it computes."""

    best: Trial
    bound_seconds: float


Found = Mapping[Setting, Trial]


def search(settings: UnitSettings, grains: Sequence[Grain | None]) -> BestSetting:
    """Try settings, the usual ones first; return the fastest that fits or, if none does, the smallest."""
    found: dict[Setting, Trial] = {}

    def tried(setting: Setting) -> Trial:
        found[setting] = settings.trial(setting)
        return found[setting]

    def solved(setting: Setting) -> None:
        """Try what the solver would keep, then with room for what the allocator needed of that."""
        less_bytes = 0
        for _ in range(_MOST_ANSWERS):
            answer = settings.propose(setting, less_bytes)
            if answer is None or replace(setting, kept=answer.kept) in found:
                return
            best = _best(found)
            if best.fits and answer.bound_seconds > best.seconds * (1 + _MODEL_ERROR):
                return
            plan = tried(replace(setting, kept=answer.kept)).plan
            more = max(plan.memory_bytes - plan.peak_bytes, 0)
            if more <= less_bytes or _enough(found):
                return
            less_bytes = more

    first = Setting(grains[0])
    units = tried(first).units
    tried(replace(first, kept=units))
    # Others can hide what is exposed, or spare the host what each unit takes, and nothing else.
    for prefetch, grain in itertools.product((1, _AHEAD), grains):
        branch = Setting(grain, prefetch=prefetch)
        several = grain != "whole" and len(units) > _AHEAD
        if branch == first or ((prefetch == 1 or several) and not _enough(found)):
            solved(branch)
    return BestSetting(_best(found), _bound(found))


def _best(found: Found) -> Trial:
    fitting = [one for one in found.values() if one.fits]
    if not fitting:
        return min(found.values(), key=lambda one: one.plan.memory_bytes)
    return min(fitting, key=lambda one: (one.seconds, one.plan.memory_bytes))


def _bound(found: Found) -> float:
    """Return how long the step takes at least: nothing is exposed or recomputed, and the host is ahead."""
    return min(one.computing_seconds for one in found.values())


def _enough(found: Found) -> bool:
    best = _best(found)
    return best.fits and best.seconds - _bound(found) <= _GOOD_ENOUGH * best.seconds
