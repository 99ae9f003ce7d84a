"""The paper's allocation problem, solved to proven optimality.

Minimise (1 + α)·T, where T is the sum of all workers' times and α the sum of their average sizes
over all units, with at most ``switch_max`` switches per worker. The product of two positive sums
is quasi-concave, so its minimum lies on a corner of the lower hull of the (α, T) points. Under a
price per unit the workers separate, and a dynamic programme over (kernel, size, switches) finds a
worker's best route; the price that makes two hull points equally good finds the corner between
them, if there is one. Between two points the triangle under their supporting lines bounds every
value, so most of the hull is never visited. The search ends when no triangle can hold a better
point: that is the proof.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eclip.core.profile import Times
from eclip.errors import PlanningError
from eclip.jit import compiled
from eclip.planner.problem import Choice

# Objectives closer than this, relatively, are equal: above rounding, far below a nanosecond.
_EQUAL = 1e-12


@dataclass(frozen=True)
class Allocation:
    choices: tuple[Choice, ...]  # per worker and kernel: index of the size
    alpha: float
    total_ns: float  # T
    objective: float  # (1 + α)·T, or T where α is left out
    prices: int  # how many prices were tried


@dataclass(frozen=True)
class _Point:
    alpha: float
    total_ns: float
    price: float  # of a unit: T + price·α is nowhere lower than here
    choices: tuple[Choice, ...]

    @property
    def objective(self) -> float:
        return (1 + self.alpha) * self.total_ns


def allocate(
    times: Sequence[Times],
    sizes: Sequence[int],
    units: int,
    switch_max: int,
    with_alpha: bool = True,
) -> Allocation:
    """The best size for every kernel; ``times[w][k, c]`` belongs to ``sizes[c]``.

    An infinite time is a size the kernel cannot take; the last size must suit every kernel.
    """
    if switch_max < 0:
        raise PlanningError(f"the switch budget cannot be {switch_max}")
    if any(np.isinf(table[:, -1]).any() for table in times):
        raise PlanningError("a kernel fits not even the largest lane, so there is no plan")
    search = _HullSearch(times, sizes, units, switch_max)
    best = search.run() if with_alpha else search.solve(0.0)
    return Allocation(
        choices=best.choices,
        alpha=best.alpha,
        total_ns=best.total_ns,
        objective=best.objective if with_alpha else best.total_ns,
        prices=search.prices,
    )


class _HullSearch:
    def __init__(
        self, times: Sequence[Times], sizes: Sequence[int], units: int, switch_max: int
    ) -> None:
        self.times = [np.ascontiguousarray(table, dtype=np.float64) for table in times]
        self.switch_max = switch_max
        # What one kernel of worker w on size c adds to α.
        self.shares = [np.array(sizes) / (len(table) * units) for table in times]
        self.prices = 0

    def solve(self, price: float, timed: bool = True) -> _Point:
        """A point that minimises T + price·α, or α alone where ``timed`` is off."""
        self.prices += 1
        choices = []
        alpha = total_ns = 0.0
        for table, share in zip(self.times, self.shares, strict=True):
            cost = table + price * share if timed else np.where(np.isinf(table), np.inf, share)
            choice = best_route(cost, self.switch_max)
            choices.append(choice)
            total_ns += float(table[np.arange(len(table)), choice].sum())
            alpha += float(share[choice].sum())
        return _Point(alpha, total_ns, price, tuple(choices))

    def run(self) -> _Point:
        smallest = self.solve(np.inf, timed=False)
        fastest = self.solve(0.0)
        best = _better(fastest, smallest)
        segments = [(smallest, fastest)]
        while segments:
            left, right = segments.pop()
            if right.alpha <= left.alpha or left.total_ns <= right.total_ns:
                continue
            if _lowest_between(left, right) >= best.objective * (1 - _EQUAL):
                continue
            price = (left.total_ns - right.total_ns) / (right.alpha - left.alpha)
            middle = self.solve(price)
            best = _better(best, middle)
            on_line = right.total_ns + price * right.alpha
            if middle.total_ns + price * middle.alpha >= on_line * (1 - _EQUAL):
                continue  # nothing below the line: left and right are neighbours on the hull
            segments += [(left, middle), (middle, right)]
        return best


def _lowest_between(left: _Point, right: _Point) -> float:
    """No point between them has a lower objective: its value where their supporting lines meet."""
    if np.isinf(left.price):
        alpha = left.alpha
    else:
        left_line = left.total_ns + left.price * left.alpha
        right_line = right.total_ns + right.price * right.alpha
        if left.price - right.price <= _EQUAL * left.price:
            return min(left.objective, right.objective)
        alpha = (left_line - right_line) / (left.price - right.price)
    total_ns = right.total_ns + right.price * (right.alpha - alpha)
    return (1 + alpha) * total_ns


def _better(first: _Point, second: _Point) -> _Point:
    """The lower objective; of equal ones the one with fewer switches."""
    if abs(first.objective - second.objective) > _EQUAL * first.objective:
        return min(first, second, key=lambda point: point.objective)
    return min(first, second, key=lambda point: sum(map(count_switches, point.choices)))


def count_switches(choice: Choice) -> int:
    return int(np.count_nonzero(np.diff(choice)))


@compiled
def best_route(cost: Times, switch_max: int, switch_cost: float = 0.0) -> Choice:
    """The cheapest size per kernel with at most so many switches; of equal ones the fewest.

    State: (kernel, size, switches so far). Staying keeps the count, coming from the cheapest other
    size adds one. Time O(kernels × sizes × switches), memory one byte per state.
    """
    kernels, sizes = cost.shape
    budget = min(switch_max, kernels - 1)
    best = np.empty((sizes, budget + 1))
    stayed = np.ones((kernels, sizes, budget + 1), dtype=np.bool_)
    source = np.zeros((kernels, budget + 1), dtype=np.int64)
    cheapest = np.empty(budget + 1)
    for c in range(sizes):
        for s in range(budget + 1):
            best[c, s] = cost[0, c]
    for k in range(1, kernels):
        for s in range(budget + 1):
            cheapest[s] = np.inf
            for c in range(sizes):
                if best[c, s] < cheapest[s]:
                    cheapest[s] = best[c, s]
                    source[k, s] = c
        for c in range(sizes):
            for s in range(1, budget + 1):
                if cheapest[s - 1] + switch_cost < best[c, s]:
                    best[c, s] = cheapest[s - 1] + switch_cost + cost[k, c]
                    stayed[k, c, s] = False
                else:
                    best[c, s] += cost[k, c]
            best[c, 0] += cost[k, c]
    lowest = np.inf
    for c in range(sizes):
        lowest = min(lowest, best[c, budget])
    size = -1
    switches = 0
    while size < 0:
        for c in range(sizes):
            if best[c, switches] <= lowest + abs(lowest) * 1e-12:
                size = c
                break
        else:
            switches += 1
    choice = np.empty(kernels, dtype=np.int64)
    for k in range(kernels - 1, -1, -1):
        choice[k] = size
        if k > 0 and not stayed[k, size, switches]:
            switches -= 1
            size = source[k, switches]
    return choice
