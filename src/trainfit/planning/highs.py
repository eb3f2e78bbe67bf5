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

    _cost: list[float] = field(default_factory=list)
    _upper: list[float] = field(default_factory=list)
    _lower: list[float] = field(default_factory=list)
    _integer: list[bool] = field(default_factory=list)
    _starts: list[int] = field(default_factory=lambda: [0])
    _columns: list[int] = field(default_factory=list)
    _values: list[float] = field(default_factory=list)
    _row_lower: list[float] = field(default_factory=list)
    _row_upper: list[float] = field(default_factory=list)
    row_names: list[str] = field(default_factory=list)

    def binary(self, cost: float = 0.0) -> int:
        """Add a variable that is 0 or 1, and return its column."""
        return self._column(0.0, 1.0, cost, integer=True)

    def continuous(self, lower: float, upper: float, cost: float = 0.0) -> int:
        """Add a variable between two values, and return its column."""
        return self._column(lower, upper, cost, integer=False)

    def at_most(self, name: str, terms: Iterable[Term], limit: float) -> None:
        """Add a constraint: the sum of the terms is at most the limit."""
        self._row(name, terms, -np.inf, limit)

    def equal(self, name: str, terms: Iterable[Term], value: float) -> None:
        """Add a constraint: the sum of the terms is the value."""
        self._row(name, terms, value, value)

    def minimise(self, *, seconds_limit: float, gap: float, gap_share: float = 0.0) -> Answer:
        """Solve to an objective at most `gap`, or this share of it, above the best.

        When the time is over, return the best so far.
        """
        highspy: Any = importlib.import_module("highspy")  # has no types, and takes time to load
        largest = max((abs(cost) for cost in self._cost), default=0.0)
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
            return Answer(feasible=False, proven=status == highspy.HighsModelStatus.kInfeasible)
        bound = info.mip_dual_bound if any(self._integer) else info.objective_function_value
        return Answer(
            feasible=True,
            proven=status == highspy.HighsModelStatus.kOptimal,
            values=tuple(solver.getSolution().col_value),
            bound=float(bound) / scale,
        )

    def _column(self, lower: float, upper: float, cost: float, *, integer: bool) -> int:
        self._lower.append(lower)
        self._upper.append(upper)
        self._cost.append(cost)
        self._integer.append(integer)
        return len(self._cost) - 1

    def _row(self, name: str, terms: Iterable[Term], lower: float, upper: float) -> None:
        for column, value in terms:
            self._columns.append(column)
            self._values.append(value)
        self._starts.append(len(self._columns))
        self._row_lower.append(lower)
        self._row_upper.append(upper)
        self.row_names.append(name)

    def _model(self, highspy: Any, scale: float) -> Any:
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(self._cost), len(self._row_lower)
        model.col_cost_ = np.array(self._cost) * scale
        model.col_lower_, model.col_upper_ = np.array(self._lower), np.array(self._upper)
        model.row_lower_, model.row_upper_ = np.array(self._row_lower), np.array(self._row_upper)
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.array(self._starts)
        model.a_matrix_.index_ = np.array(self._columns)
        model.a_matrix_.value_ = np.array(self._values)
        kinds = highspy.HighsVarType
        model.integrality_ = [kinds.kInteger if whole else kinds.kContinuous for whole in self._integer]
        return model
