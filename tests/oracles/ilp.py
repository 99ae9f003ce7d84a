"""The paper's allocation problem as integer linear programmes on HiGHS.

A second, independent way to the optimum: tests hold it against ``exact.allocate``. β·α is a
product of decisions; with z = α·x it becomes linear, and it is exact because each kernel takes one
size, so that Σ z = α for every kernel. The relaxation is only as tight as the bounds on α, so α's
range is cut into bins: a bin whose relaxation cannot beat the best plan known is dropped, the
others are solved as integer programmes. As one programme over the whole range, 3 workers × 40
kernels take minutes. Every (kernel, size) has its own arrival variable; one switch variable per
kernel is far slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import highspy
import numpy as np

from eclip.core.profile import Times
from eclip.errors import PlanningError
from eclip.planner.problem import Choice

_BINS = 48
Row = tuple[float, float, Sequence[int], Sequence[float]]  # least, most, columns, values


def allocate_by_ilp(
    times: Sequence[Times],
    sizes: Sequence[int],
    units: int,
    switch_max: int,
) -> tuple[tuple[Choice, ...], float]:
    """Proven best sizes and their objective (1 + α)·T."""
    model = _Model(times, sizes, units, switch_max)
    edges = np.linspace(len(times) * min(sizes) / units, len(times) * max(sizes) / units, _BINS + 1)
    bins = []
    for low, high in pairwise(edges.tolist()):
        bound = model.solve(low, high, relaxed=True)
        if bound is not None:
            bins.append((bound[0], low, high))
    best: tuple[float, tuple[Choice, ...]] | None = None
    for lowest, low, high in sorted(bins):
        if best is not None and lowest >= best[0]:
            break
        found = model.solve(low, high, below=None if best is None else best[0])
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    if best is None:
        raise PlanningError("the allocation problem has no solution")
    return best[1], best[0]


class _Model:
    """Columns: x per (worker, kernel, size), then arrivals, then z, likewise; last α."""

    def __init__(
        self, times: Sequence[Times], sizes: Sequence[int], units: int, switch_max: int
    ) -> None:
        self.sizes = len(sizes)
        self.first = np.concatenate([[0], np.cumsum([len(table) for table in times])]).tolist()
        self.cells = self.first[-1] * self.sizes
        self.alpha = 3 * self.cells
        flat = np.concatenate([np.asarray(table, dtype=np.float64).ravel() for table in times])
        self.possible = np.isfinite(flat)
        flat = np.where(self.possible, flat, 0.0)
        self.cost = np.concatenate([flat, np.zeros(self.cells), flat, [0.0]])
        self.rows: list[Row] = []
        share_columns: list[int] = [self.alpha]
        share_values: list[float] = [-1.0]
        for start, end in zip(self.first[:-1], self.first[1:], strict=True):
            for kernel in range(start, end):
                x = range(kernel * self.sizes, (kernel + 1) * self.sizes)
                self.add(1.0, 1.0, x, [1.0] * self.sizes)
                z = [2 * self.cells + column for column in x]
                self.add(0.0, 0.0, [*z, self.alpha], [1.0] * self.sizes + [-1.0])
                share_columns += x
                share_values += [size / ((end - start) * units) for size in sizes]
                if kernel > start:
                    for column in x:  # arrival ≥ x here - x one kernel earlier
                        self.add(
                            0.0,
                            highspy.kHighsInf,
                            [self.cells + column, column, column - self.sizes],
                            [1.0, -1.0, 1.0],
                        )
            arrivals = [
                self.cells + column for column in range((start + 1) * self.sizes, end * self.sizes)
            ]
            self.add(-highspy.kHighsInf, float(switch_max), arrivals, [1.0] * len(arrivals))
        self.add(0.0, 0.0, share_columns, share_values)

    def add(self, least: float, most: float, columns: Sequence[int], values: list[float]) -> None:
        self.rows.append((least, most, columns, values))

    def solve(
        self,
        alpha_low: float,
        alpha_high: float,
        *,
        relaxed: bool = False,
        below: float | None = None,
    ) -> tuple[float, tuple[Choice, ...]] | None:
        """The optimum with α inside these bounds and under ``below``, or None if there is none."""
        rows = [*self.rows]
        for column in range(self.cells):
            pair = [2 * self.cells + column, column]
            rows.append((0.0, highspy.kHighsInf, pair, [1.0, -alpha_low]))
            rows.append((-highspy.kHighsInf, 0.0, pair, [1.0, -alpha_high]))
        if below is not None:
            priced = np.flatnonzero(self.cost)
            rows.append((-highspy.kHighsInf, below, priced.tolist(), self.cost[priced].tolist()))
        model = highspy.HighsLp()
        model.num_col_ = len(self.cost)
        model.col_cost_ = self.cost
        model.col_lower_ = np.concatenate([np.zeros(3 * self.cells), [alpha_low]])
        model.col_upper_ = np.concatenate(
            [self.possible, np.ones(self.cells), np.full(self.cells + 1, alpha_high)]
        )
        lower, upper, columns, values = zip(*rows, strict=True)
        model.num_row_ = len(rows)
        model.row_lower_, model.row_upper_ = np.array(lower), np.array(upper)
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.cumsum([0, *map(len, columns)], dtype=np.int32)
        model.a_matrix_.index_ = np.concatenate(columns).astype(np.int32)
        model.a_matrix_.value_ = np.concatenate(values).astype(np.float64)
        if not relaxed:
            model.integrality_ = [highspy.HighsVarType.kInteger] * self.cells + [
                highspy.HighsVarType.kContinuous
            ] * (2 * self.cells + 1)
        solver = highspy.Highs()
        for option, value in (("output_flag", False), ("mip_rel_gap", 1e-9), ("mip_abs_gap", 1e-6)):
            solver.setOptionValue(option, value)
        solver.passModel(model)
        solver.run()
        status = solver.getModelStatus()
        if status == highspy.HighsModelStatus.kInfeasible:
            return None
        if status != highspy.HighsModelStatus.kOptimal:
            raise PlanningError(f"HiGHS stopped with {solver.modelStatusToString(status)}")
        taken = np.array(solver.getSolution().col_value)[: self.cells].reshape(-1, self.sizes)
        sizes_taken = taken.argmax(axis=1).astype(np.int64)
        choices = tuple(np.split(sizes_taken, self.first[1:-1]))
        return float(solver.getInfo().objective_function_value), choices
