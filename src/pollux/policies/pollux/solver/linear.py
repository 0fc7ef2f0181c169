"""An integer program, put together column by column and row by row, and solved by HiGHS."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pollux.goodput.numerics import FloatArray

INFEASIBLE = 2  # as scipy.optimize.milp tells
PRESOLVED = 100
"""Columns from which HiGHS simplifies a program first. With small ones that gains nothing, and it now and then makes
HiGHS write a line of its own to the terminal."""


class Answer(NamedTuple):
    """What HiGHS found."""

    x: FloatArray | None  # int, by column; None if nothing was found
    bound: float
    """No solution costs less; infinity if there is none at all."""


class Linear:
    """Minimise cost · x over integers 0 ≤ x ≤ upper with all rows within their limits."""

    def __init__(self) -> None:
        self.num_columns = 0
        self._columns: list[tuple[FloatArray, FloatArray]] = []  # cost, upper
        self._entries: list[tuple[int, FloatArray, FloatArray]] = []  # row, columns, factors
        self._limits: list[tuple[float, float]] = []

    def columns(self, upper: FloatArray, cost: FloatArray | float = 0.0) -> FloatArray:
        """New columns, one for each `upper`; their numbers."""
        self._columns.append((np.broadcast_to(cost, len(upper)), np.asarray(upper, dtype=float)))
        self.num_columns += len(upper)
        return np.arange(self.num_columns - len(upper), self.num_columns)

    def row(self, low: float, high: float, *terms: tuple[FloatArray, FloatArray | int]) -> None:
        """low ≤ Σ factors · x[columns] ≤ high; each term is (columns, factors)."""
        for columns, factors in terms:
            if len(columns):
                self._entries.append((len(self._limits), columns, np.broadcast_to(factors, len(columns))))
        self._limits.append((low, high))

    def cost_below(self, most: float) -> None:
        cost = np.concatenate([each[0] for each in self._columns])
        costly = np.flatnonzero(cost)
        self.row(-np.inf, most, (costly, cost[costly]))

    def solve(self, node_limit: int) -> Answer:
        """To the optimum, unless the search tree grows beyond so many nodes."""
        return self._solve(
            np.concatenate([each[0] for each in self._columns]), np.empty(0, int), np.empty(0), node_limit
        )

    def solve_rest(self, columns: FloatArray, x: FloatArray, counted: FloatArray, node_limit: int) -> Answer:
        """With `columns` as in x and, instead of the cost, the sum of the `counted` columns."""
        cost = np.zeros(self.num_columns)
        cost[counted] = 1.0
        return self._solve(cost, columns, x[columns], node_limit)

    def _solve(self, cost: FloatArray, columns: FloatArray, fixed: FloatArray, node_limit: int) -> Answer:
        # scipy.optimize takes half a second to load: only those who come here wait for it.
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csc_array

        upper = np.concatenate([each[1] for each in self._columns])
        lower = np.zeros(len(upper))
        lower[columns] = upper[columns] = fixed
        row = np.repeat([each[0] for each in self._entries], [len(each[1]) for each in self._entries])
        column = np.concatenate([each[1] for each in self._entries])
        factor = np.concatenate([each[2] for each in self._entries]).astype(float)
        low, high = np.array(self._limits, dtype=float).T
        answer = milp(
            cost,
            integrality=np.ones(len(cost)),
            bounds=Bounds(lower, upper),
            constraints=LinearConstraint(csc_array((factor, (row, column)), shape=(len(low), len(cost))), low, high),
            options={"node_limit": node_limit, "mip_rel_gap": 0.0, "presolve": len(cost) >= PRESOLVED},
        )
        if answer.status == INFEASIBLE:
            return Answer(None, np.inf)
        bound = -np.inf if answer.mip_dual_bound is None else float(answer.mip_dual_bound)
        return Answer(None if answer.x is None else np.rint(answer.x).astype(np.int64), bound)
