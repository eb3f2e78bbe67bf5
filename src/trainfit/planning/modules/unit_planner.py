"""Plans by modules: AC units chosen by `milp.py`, their ops by `policy.py`, certified by replay.

A step that was captured as a rank of a cluster has what it gathers and sends in its trace: program and replay
read true figures, and its FSDP units are those of the capture. With a `world_size` a step of one process is
divided instead: program and replay alike are of one of so many processes, which has a part of the parameters,
gradients and optimizer state, and what FSDP gathers on top (`sharding.py`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from trainfit.allocator.allocator_options import AllocatorOptions
from trainfit.allocator.named_options import DEFAULT_OPTIONS
from trainfit.costs.schedule import schedule
from trainfit.costs.table import CostTable
from trainfit.errors import OptionError
from trainfit.planning import certify
from trainfit.planning.certify import Certified, Unplanned
from trainfit.planning.effects import effect_of
from trainfit.planning.model_calls import passes_in_step
from trainfit.planning.modules.candidates import Candidate, Reading, candidates_of, readings, rebuilt_bytes
from trainfit.planning.modules.milp import ModuleSolution
from trainfit.planning.modules.policy import optimal_policy
from trainfit.planning.modules.sac_stats import SacStats, choice_of
from trainfit.planning.modules.sharding import divided, gathered_by, what_is_divided, with_gathered
from trainfit.planning.modules.unit_names import allowed_modules, captured_units
from trainfit.traces.simulate import simulate
from trainfit.traces.trace import Trace
from trainfit.traces.trace_store import operators_hash

_MOST_ROUNDS = 5
_GAP_SHARE = 0.001
"""Of the step's time, for the program over modules; storing whole ops adds to it."""
_CLOSE_SHARE = 0.002
"""Of the budget: more precisely the program need not know it."""


@dataclass
class ModulePlanner:
    """Everything about one trace that does not depend on the budget; solved for as many as wanted."""

    whole_trace: Trace
    costs: CostTable
    ac_units: Sequence[str] | None = None
    """Names of the modules that may be checkpointed; without them, all that are not leaves."""
    fsdp_units: Sequence[str] = ()
    """Names of the modules that FSDP shards as a unit: no AC unit lies around one."""
    world_size: int = 1
    allocator: AllocatorOptions | None = DEFAULT_OPTIONS
    trace: Trace = field(init=False)
    """The step of one process."""
    step: Unplanned = field(init=False)
    candidates: list[Candidate] = field(init=False)
    warnings: tuple[str, ...] = ()
    _policies: dict[tuple[SacStats, float], list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the names, and read the statistics of every module off the trace."""
        if self.world_size < 1:
            raise OptionError(f"the world size must be at least 1, got {self.world_size}.")
        if (passes := passes_in_step(self.whole_trace)) > 1:
            raise OptionError(
                f"the step calls the model {passes} times, and the solver 'modules' knows one call only; "
                "use the solver 'regions'."
            )
        if self.whole_trace.cluster is not None:
            self.fsdp_units = captured_units(self.whole_trace, self.fsdp_units, self.world_size)
        allowed = allowed_modules(self.whole_trace, self.ac_units, self.fsdp_units)
        undivided = self.whole_trace
        if self.world_size > 1:
            gathered = gathered_by(undivided, self.fsdp_units)
            undivided = with_gathered(undivided, gathered)
            self.warnings += (what_is_divided(gathered, self.world_size),)
        self.trace = divided(undivided, self.world_size)
        times = schedule(self.trace, self.costs)
        trace_hash, peak_bytes = operators_hash(self.whole_trace), simulate(self.trace).peak_bytes
        self.step = Unplanned(
            *(self.trace, self.costs, trace_hash, peak_bytes, times.step_seconds),
            *(self.world_size, self.allocator),
        )
        self.candidates = candidates_of(self.trace, times.marginal_seconds.tolist(), allowed)
        self._everything, self._saved = readings(undivided, self.candidates, self.world_size)

    def plan(self, budget_bytes: int, *, seconds_limit: float = 30.0) -> Certified:
        """Return the fastest plan within the budget, or the one with the smallest peak if none fits."""
        nothing = self._certified(self._saved, {}, budget_bytes, 0.0)
        if nothing.fits:
            return nothing
        deadline = time.monotonic() + seconds_limit
        within = certify.peak_within(self.trace, budget_bytes)
        bound = self._solve(self._saved, within, deadline).bound_seconds
        found = [self._search(reading, budget_bytes, bound, deadline) for reading in self._with_working_sets]
        best = min((plan for plan in found if plan), key=lambda plan: plan.step_seconds, default=None)
        return best or self.smallest(budget_bytes, bound_seconds=bound)

    def smallest(
        self, budget_bytes: int = 0, *, bound_seconds: float = 0.0, seconds_limit: float = 10.0
    ) -> Certified:
        """Return the plan with the smallest peak that was found."""
        found = [
            self._certified(reading, solution.shares, budget_bytes, bound_seconds)
            for reading in (self._everything, *self._with_working_sets)
            for solution in [reading.problem.smallest_peak(seconds_limit=seconds_limit)]
        ]
        return min(found, key=lambda plan: plan.memory_bytes)

    def _search(self, reading: Reading, budget_bytes: int, bound: float, deadline: float) -> Certified | None:
        """Return the fastest plan that fits.

        The replay is the truth: the program gets as much more or less memory than the budget as it was wrong
        by, until both agree.
        """
        best: Certified | None = None
        modelled = certify.peak_within(self.trace, budget_bytes)
        fits, exceeds = 0, max(self.step.peak_bytes, budget_bytes)
        for _ in range(_MOST_ROUNDS):
            found = self._solve(reading, modelled, deadline)
            error = 0
            if found.feasible:
                plan = self._certified(reading, found.shares, budget_bytes, bound)
                error = plan.memory_bytes - budget_bytes
                if error <= 0 and (best is None or plan.step_seconds < best.step_seconds):
                    best = plan
            fits, exceeds = (fits, modelled) if error > 0 else (modelled, exceeds)
            if exceeds - fits < _CLOSE_SHARE * budget_bytes or time.monotonic() > deadline:
                break
            modelled -= error
            if not fits < modelled < exceeds:
                modelled = (fits + exceeds) // 2
        return best

    def _solve(self, reading: Reading, budget_bytes: int, deadline: float) -> ModuleSolution:
        return reading.problem.solve(
            budget_bytes,
            seconds_limit=max(deadline - time.monotonic(), 1.0),
            gap_seconds=_GAP_SHARE * self.step.step_seconds,
        )

    @cached_property
    def _with_working_sets(self) -> tuple[Reading, Reading]:
        sizes = rebuilt_bytes(self.trace, self.candidates)
        return self._everything.with_working_sets(sizes), self._saved.with_working_sets(sizes)

    def _certified(
        self, reading: Reading, shares: dict[int, float], budget_bytes: int, bound_seconds: float
    ) -> Certified:
        effects = []
        for number, share in shares.items():
            region = self.candidates[number].region
            choice = choice_of(region, self._policy(reading.stats[number], share))
            effects.append(effect_of(self.trace, region, choice))
        return certify.certified(self.step, effects, budget_bytes, bound_seconds, method="modules")

    def _policy(self, stats: SacStats, share: float) -> list[int]:
        """Return the policy of a module that discards a share; modules that are alike share one."""
        key = (stats, round(share, 9))
        if key not in self._policies:
            self._policies[key] = optimal_policy(stats, min(max(1.0 - share, 0.0), 1.0))
        return self._policies[key]
