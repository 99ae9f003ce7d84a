"""Swept baselines: which static masks to try, and which of the settings tried is the best.

A user who partitions a GPU by hand tries a few splits and keeps what runs best. So do these: equal
shares and right-sized ones from disjoint to overlapping, then random ones, then neighbours of the
best so far. Everything follows from the seed and from what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eclip.core.plan import Plan
from eclip.core.topology import Mask
from eclip.planner.policies import make_plan
from eclip.planner.problem import Problem
from eclip.planner.search.objective import Objective, Score
from eclip.planner.search.placement import Home, Placer

_SHARES = (0.5, 0.625, 0.75, 0.875)  # of the slices, for each worker
_STRETCHES = (1.0, 1.25, 1.5, 1.75, 2.0)  # of the right size
_NEIGHBOURS_FROM = 0.6  # of the trials are spread out, the others near the best
_STEP = 3  # slices that a neighbour may differ by
_DRAWS = 64  # for a placement that was not tried; a small device has few

Homes = tuple[Home, ...]


def best_setting(scores: Sequence[Score], objective: Objective, plain: Score) -> int:
    """The index of what the objective likes best, as it does for plans; ``plain``: streams."""
    return max(range(len(scores)), key=lambda index: objective.value(scores[index], plain))


class StaticMasks:
    """One mask for every worker, proposed one after another."""

    def __init__(self, problem: Problem, trials: int, seed: int) -> None:
        self._placer = Placer(problem)
        self._slices = self._placer.slices
        self._workers = len(problem.profiles)
        self._random = np.random.default_rng(seed)
        self._spread_out = round(_NEIGHBOURS_FROM * trials)
        self._grid = self._make_grid(problem)
        self._tried: set[tuple[Mask, ...]] = set()
        self._proposed = 0

    def propose(self, best: Homes | None) -> Homes | None:
        """The next to try, given the best so far; None where nothing new was found."""
        self._proposed += 1
        while self._grid and self._proposed <= self._spread_out:
            if self._is_new(homes := self._grid.pop(0)):
                return homes
        if best is not None and self._proposed > self._spread_out:
            for _ in range(_DRAWS):
                if self._is_new(homes := self._neighbour(best)):
                    return homes
        for _ in range(_DRAWS):
            if self._is_new(homes := self._anywhere()):
                return homes
        return None

    def plan(self, homes: Homes) -> Plan:
        return self._placer.plan(homes, "masks", "one mask per model, the best of those tried")

    def _make_grid(self, problem: Problem) -> list[Homes]:
        sizes = [len(lane.mask) for lane in make_plan("model", problem).lanes]
        equal = [[max(1, self._slices // self._workers)] * self._workers]
        equal += [[round(share * self._slices)] * self._workers for share in _SHARES]
        stretched = [[round(stretch * size) for size in sizes] for stretch in _STRETCHES]
        even = [worker * self._slices // self._workers for worker in range(self._workers)]
        packed = [sum(sizes[:worker]) for worker in range(self._workers)]
        return [
            *(self._homes(even, counts) for counts in equal),
            *(self._homes(packed, counts) for counts in stretched),
        ]

    def _homes(self, firsts: Sequence[int], counts: Sequence[int]) -> Homes:
        return tuple(
            self._home(first, 1, count) for first, count in zip(firsts, counts, strict=True)
        )

    def _home(self, first: int, step: int, count: int) -> Home:
        most = min(max(1, count), self._slices)
        return Home(first=first % self._slices, step=step, most=most, price=0.0, switch_max=0)

    def _anywhere(self) -> Homes:
        least = max(1, self._slices // (2 * self._workers))
        return tuple(
            self._home(
                int(self._random.integers(self._slices)),
                int(self._random.choice((-1, 1))),
                int(self._random.integers(least, self._slices + 1)),
            )
            for _ in range(self._workers)
        )

    def _neighbour(self, best: Homes) -> Homes:
        """One worker's mask, or its place, a little different."""
        worker = int(self._random.integers(self._workers))
        change = int(self._random.integers(1, _STEP + 1)) * int(self._random.choice((-1, 1)))
        old = best[worker]
        if self._random.integers(2):
            new = self._home(old.first, old.step, old.most + change)
        else:
            new = self._home(old.first + change, old.step, old.most)
        return (*best[:worker], new, *best[worker + 1 :])

    def _is_new(self, homes: Homes) -> bool:
        masks = tuple(self._placer.mask(home, home.most) for home in homes)
        new = masks not in self._tried
        self._tried.add(masks)
        return new


def masks_setting(plan: Plan) -> str:
    """``64+96 SMs, overlapping``: the units of every worker's largest lane."""
    masks = [
        max((plan.lanes[group.lane].mask for group in part.groups), key=len)
        for part in plan.main.assignments
    ]
    units = "+".join(str(plan.topology.units_of(mask)) for mask in masks)
    apart = sum(len(mask) for mask in masks) == len({index for mask in masks for index in mask})
    return f"{units} {plan.topology.unit_name}s, {'disjoint' if apart else 'overlapping'}"
