"""Mixed-integer programs, written down constraint by constraint and solved by HiGHS.

Costs are scaled before they reach the solver, whose tolerances are absolute: the seconds of one operator
would otherwise count as rounding.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Term = tuple[int, float]
"""A column and its coefficient."""

_LARGEST_COST = 100.0


@dataclass(frozen=True)
class Answer:
    """What the solver found, and what it proved."""

    feasible: bool
    proven: bool
    """Optimal within the gap, or infeasible; false if the time was over before."""
    values: tuple[float, ...] = ()
    bound: float = 0.0
    """No solution has a smaller objective."""


@dataclass
class Program:
    """Minimise the cost of columns (variables) under rows (constraints)."""

    _columns: list[tuple[float, float, float, bool]] = field(default_factory=list)
    """Least and largest value, cost, and whether it is a whole number."""
    _rows: list[tuple[str, list[Term], float, float]] = field(default_factory=list)
    """Name, terms, and the least and largest value of their sum."""

    def binary(self, cost: float = 0.0) -> int:
        """Add a variable that is 0 or 1, and return its column."""
        self._columns.append((0.0, 1.0, cost, True))
        return len(self._columns) - 1

    def continuous(self, lower: float, upper: float, cost: float = 0.0) -> int:
        """Add a variable between two values, and return its column."""
        self._columns.append((lower, upper, cost, False))
        return len(self._columns) - 1

    def at_most(self, name: str, terms: Iterable[Term], limit: float) -> None:
        """Add a constraint: the sum of the terms is at most the limit."""
        self._rows.append((name, list(terms), -np.inf, limit))

    def equal(self, name: str, terms: Iterable[Term], value: float) -> None:
        """Add a constraint: the sum of the terms is the value."""
        self._rows.append((name, list(terms), value, value))

    def minimise(self, *, seconds_limit: float, gap: float, gap_share: float = 0.0) -> Answer:
        """Solve to an objective at most `gap`, or this share of it, above the best.

        When the time is over, return the best so far.
        """
        highspy: Any = importlib.import_module("highspy")  # has no types, and takes time to load
        largest = max((abs(cost) for _, _, cost, _ in self._columns), default=0.0)
        scale = _LARGEST_COST / largest if largest else 1.0
        solver = highspy.Highs()
        for name, value in (
            ("output_flag", False),
            ("time_limit", seconds_limit),
            ("mip_rel_gap", gap_share),
            ("mip_abs_gap", gap * scale),
            ("threads", 1),
            ("random_seed", 0),
        ):
            solver.setOptionValue(name, value)
        solver.passModel(self._model(highspy, scale))
        solver.run()
        status = solver.getModelStatus()
        info = solver.getInfo()
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            proven = status == highspy.HighsModelStatus.kInfeasible
            known = not proven and np.isfinite(info.mip_dual_bound)
            return Answer(False, proven, bound=float(info.mip_dual_bound) / scale if known else 0.0)
        has_integers = any(whole for *_, whole in self._columns)
        bound = info.mip_dual_bound if has_integers else info.objective_function_value
        return Answer(
            feasible=True,
            proven=status == highspy.HighsModelStatus.kOptimal,
            values=tuple(solver.getSolution().col_value),
            bound=float(bound) / scale,
        )

    def _model(self, highspy: Any, scale: float) -> Any:
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(self._columns), len(self._rows)
        model.col_lower_ = np.array([lower for lower, _, _, _ in self._columns])
        model.col_upper_ = np.array([upper for _, upper, _, _ in self._columns])
        model.col_cost_ = np.array([cost for _, _, cost, _ in self._columns]) * scale
        model.row_lower_ = np.array([lower for _, _, lower, _ in self._rows])
        model.row_upper_ = np.array([upper for _, _, _, upper in self._rows])
        terms = [term for _, row, _, _ in self._rows for term in row]
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.cumsum([0, *(len(row) for _, row, _, _ in self._rows)])
        model.a_matrix_.index_ = np.array([column for column, _ in terms])
        model.a_matrix_.value_ = np.array([value for _, value in terms])
        kinds = highspy.HighsVarType
        model.integrality_ = [kinds.kInteger if whole else kinds.kContinuous for *_, whole in self._columns]
        return model
