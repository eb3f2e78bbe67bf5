"""Which modules to checkpoint and how much of each to discard: the formulation of PyTorch's `sac_milp`.

Sets        units i                module calls that may be checkpointed
            stretches t            one per stretch of the step between two ends of such calls
            away(t)                units whose forward is done at t and whose backward has not begun
Data        bytes[i], seconds[i]   what storing, or computing again, all of its ops takes
            saved[i]               what autograd keeps of them without checkpointing
            held[i]                inputs that a unit keeps and that would otherwise be gone by backward
            rebuilt[i]             what rebuilding a unit needs above what its backward needs anyway
            slope, intercept[i,s]  lines of the trade-off: share discarded -> share of the seconds
            states[t]              parameters, gradients and optimizer state
            others[t]              everything else that is alive, such as activations and their gradients
            processes              that the states are divided among (the world size)
Variables   unit[i]                whether the module is an AC unit (binary)
            share[i]               of its bytes that is discarded
            time[i]                share of its seconds that is added
            freed[i]               bytes that are missing while it is away
Constraints not_nested             at most one unit along every chain of modules inside modules
            discard                only units discard: least[i] * unit[i] <= share[i] <= most[i] * unit[i]
            curve                  time[i] >= slope[i,s] * share[i] + intercept[i,s] * unit[i]
            freed                  freed[i] <= bytes[i] * share[i] - (bytes[i] - saved[i] + held[i]) * unit[i]
                                   (what autograd would not have kept frees nothing)
            fits                   states[t] / processes + others[t] - sum of freed over away(t)
                                   + sum of rebuilt over the units in backward at t <= budget
Objective   minimise sum of seconds[i] * time[i] (or, to find the smallest peak, the budget)

Besides PyTorch's: the optimizer's state and forward count too, a module may be called several times, the
trade-off is the exact lower hull instead of a fit of two lines, and the peak is not the solver's but that of
the replayed plan. `rebuilt` is that of a unit that stores nothing, and too much for others.

The data comes from a trace (`candidates.py`), or from PyTorch's own tables (`compat/sac_ilp.py`), where the
curve is the fit that they have, a stretch is the backward of one module, and a unit is away while modules
that finished their forward later are in backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainfit.planning.highs import Answer, Program
from trainfit.planning.modules.sac_stats import TradeOff

_NOTHING = 1e-6
"""MiB: less than this is the solver's rounding."""
_MEBIBYTE = float(1 << 20)
"""Bytes are counted in MiB inside the solver, whose tolerances are made for figures of this size."""


@dataclass(frozen=True)
class ModuleUnit:
    """A module call that may be checkpointed."""

    around: tuple[int, ...]
    """Units that it lies inside of."""
    away_from: int
    """The first op after its forward."""
    away_until: int
    """The first op of its backward."""
    curve: TradeOff
    held_bytes: int = 0
    rebuilt_until: int = 0
    """The first op after its backward."""
    rebuilt_bytes: int = 0

    @property
    def kept_anyway_bytes(self) -> int:
        """What has to be discarded before anything is freed: what autograd would not keep, and inputs."""
        return self.curve.bytes - self.curve.saved_bytes + self.held_bytes

    def change_bytes(self, share: float, op: int) -> float:
        """Return what discarding a share of the unit adds to (or takes from) the bytes at an op."""
        if self.away_from <= op < self.away_until:
            return -max(self.curve.bytes * share - self.kept_anyway_bytes, 0.0)
        return self.rebuilt_bytes if self.away_until <= op < self.rebuilt_until else 0.0


@dataclass(frozen=True)
class Stretch:
    """The op of a stretch of the step that needs the most bytes, without a plan."""

    op: int
    states_bytes: int
    other_bytes: int


@dataclass(frozen=True)
class ModuleSolution:
    """What the solver chose, and what it proved; all of it in its own model."""

    feasible: bool
    proven: bool
    shares: dict[int, float]
    """The units, and the share of its bytes that each discards."""
    seconds: float
    bound_seconds: float


@dataclass(frozen=True)
class ModuleProblem:
    """The data of the problem; solved for as many budgets as wanted."""

    units: Sequence[ModuleUnit]
    stretches: Sequence[Stretch]
    processes: int = 1

    def solve(
        self, budget_bytes: int, *, seconds_limit: float, gap_seconds: float, gap_share: float = 0.0
    ) -> ModuleSolution:
        """Return the units with the least recomputation whose modelled peak is within the budget.

        It is at most the gap, or this share of it, above the best.
        """
        model = _Model(self)
        model.fits(budget_bytes)
        return model.solution(
            model.program.minimise(seconds_limit=seconds_limit, gap=gap_seconds, gap_share=gap_share)
        )

    def smallest_peak(self, *, seconds_limit: float) -> ModuleSolution:
        """Return units with about the smallest modelled peak."""
        model = _Model(self, priced=False)
        model.fits(None)
        largest = max((self.peak_bytes(stretch) for stretch in self.stretches), default=0.0)
        return model.solution(
            model.program.minimise(seconds_limit=seconds_limit, gap=1e-3 * largest / _MEBIBYTE)
        )

    def peak_bytes(self, stretch: Stretch) -> float:
        """Return what a stretch needs without a plan."""
        return stretch.states_bytes / self.processes + stretch.other_bytes

    def planned_peak_bytes(self, shares: Mapping[int, float]) -> float:
        """Return the largest need of all stretches if these units discard these shares; in this model."""
        return max(
            self.peak_bytes(stretch)
            + sum(self.units[number].change_bytes(share, stretch.op) for number, share in shares.items())
            for stretch in self.stretches
        )

    def seconds(self, shares: Mapping[int, float]) -> float:
        """Return what these units take to compute again what they discard."""
        curves = {number: self.units[number].curve for number in shares}
        return sum(
            curves[number].seconds * curves[number].seconds_share(share) for number, share in shares.items()
        )


class _Model:
    """The program with its columns and constraints."""

    def __init__(self, problem: ModuleProblem, *, priced: bool = True) -> None:
        self.problem = problem
        self.program = Program()
        units, curves = problem.units, [unit.curve for unit in problem.units]
        self.unit = [self.program.binary() for _ in units]
        self.share = [self.program.continuous(0.0, curve.most_share) for curve in curves]
        self.time = [
            self.program.continuous(0.0, curve.most_seconds_share, cost=curve.seconds if priced else 0.0)
            for curve in curves
        ]
        self.freed = [self.program.continuous(0.0, curve.saved_bytes / _MEBIBYTE) for curve in curves]
        self._not_nested()
        for columns in zip(units, self.unit, self.share, self.time, self.freed):
            self._trade(*columns)

    def _not_nested(self) -> None:
        """Every unit that has no other inside, with all units around it, is a chain."""
        has_inside = {outer for unit in self.problem.units for outer in unit.around}
        for number, unit in enumerate(self.problem.units):
            if number not in has_inside and unit.around:
                chain = (number, *unit.around)
                self.program.at_most("not_nested", [(self.unit[member], 1.0) for member in chain], 1.0)

    def _trade(self, module: ModuleUnit, unit: int, share: int, time: int, freed: int) -> None:
        """Say what discarding a share of one module takes and frees."""
        curve = module.curve
        self.program.at_most("discard", [(share, 1.0), (unit, -curve.most_share)], 0.0)
        self.program.at_most("discard", [(unit, curve.least_share), (share, -1.0)], 0.0)
        for line in curve.lines:
            terms = [(share, line.slope), (unit, line.intercept), (time, -1.0)]
            self.program.at_most("curve", terms, 0.0)
        kept_anyway = module.kept_anyway_bytes / _MEBIBYTE
        terms = [(freed, 1.0), (share, -curve.bytes / _MEBIBYTE), (unit, kept_anyway)]
        self.program.at_most("freed", terms, 0.0)

    def fits(self, budget_bytes: int | None) -> None:
        """Hold every stretch within the budget; without one, within a peak that is to be minimised."""
        peak = [] if budget_bytes is not None else [(self.program.continuous(0.0, float("inf"), 1.0), -1.0)]
        limit = (budget_bytes or 0) / _MEBIBYTE
        for stretch in self.problem.stretches:
            terms = [
                (self.freed[number], -1.0)
                for number, unit in enumerate(self.problem.units)
                if unit.away_from <= stretch.op < unit.away_until
            ]
            terms += [
                (self.unit[number], unit.rebuilt_bytes / _MEBIBYTE)
                for number, unit in enumerate(self.problem.units)
                if unit.rebuilt_bytes and unit.away_until <= stretch.op < unit.rebuilt_until
            ]
            needed = self.problem.peak_bytes(stretch) / _MEBIBYTE
            self.program.at_most("fits", [*terms, *peak], limit - needed)

    def solution(self, answer: Answer) -> ModuleSolution:
        """Read the units off the solver's answer."""
        if not answer.feasible:
            return ModuleSolution(False, answer.proven, {}, 0.0, 0.0)
        curves = [unit.curve for unit in self.problem.units]
        shares = {
            number: min(max(answer.values[self.share[number]], curve.least_share), curve.most_share)
            for number, curve in enumerate(curves)
            # A unit that frees nothing may cost nothing in the model, but is none.
            if answer.values[self.unit[number]] > 0.5 and answer.values[self.freed[number]] > _NOTHING
        }
        seconds = self.problem.seconds(shares)
        return ModuleSolution(True, answer.proven, shares, seconds, min(max(answer.bound, 0.0), seconds))
