"""Placement: a plan from a few numbers per worker, with exact planning inside.

A worker has a home slice from which its lanes grow in one direction, a largest size, a price for
units, a budget of switches, and kernels that libraries chose for so many units. Given these, the
dynamic programme finds the assignment of kernels to sizes with the least cost, where a kernel of t
ns on n of N units costs t·(1 + price·n/N): time plus what the units it holds are worth to others; a
switch costs its time. Where the lanes lie does not change that, so routes are kept by (worker,
kernels, largest size, price, budget).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eclip.plan import Lane, Plan
from eclip.planning.exact import best_route, count_switches
from eclip.planning.problem import Choice, Problem
from eclip.topology import Mask

_MOST_SIZES = 8  # of one worker's lanes; more gain little and cost hardware queues


@dataclass(frozen=True)
class Home:
    """Where one worker's lanes lie and what they may cost."""

    first: int  # the slice that all its lanes have
    step: int  # 1 or -1: where they grow to, around the end and on from the other
    most: int  # slices of the largest lane
    price: float  # of all units, as a part of the time they are held
    switch_max: int
    priority: int = 0  # of all its lanes; more goes first where kernels compete
    kernels_for: int = 0  # units that its kernels are chosen for; 0: all, its own kernels


class Placer:
    """Plans for one problem; what they have in common is computed once."""

    def __init__(self, problem: Problem, switch_ns: float = 0.0) -> None:
        self.problem = problem
        self._switch_ns = switch_ns  # what a switch costs the request
        self.slices = len(problem.topology.slice_units)
        # One queue stays with the default stream, one per worker for a lane of the whole device.
        queues = problem.topology.hardware_queues - 1
        self._sizes = max(1, min(_MOST_SIZES, queues // len(problem.profiles) - 1))
        self._routes: dict[tuple[int, int, int, float, int], tuple[tuple[int, ...], Choice]] = {}

    def plan(self, homes: Sequence[Home], policy: str, why: str) -> Plan:
        topology = self.problem.topology
        lanes: list[Lane] = []
        choices: list[Choice] = []
        whys = []
        for worker, home in enumerate(homes):
            counts, choice = self.route(worker, home)
            masks = [self.mask(home, count) for count in counts]
            choices.append(choice + len(lanes))
            lanes += [Lane(worker, mask, home.priority) for mask in masks]
            used = [topology.units_of(masks[index]) for index in np.unique(choice).tolist()]
            whys.append(
                f"{' '.join(map(str, used))} {topology.unit_name}s from slice {home.first} "
                f"{'up' if home.step > 0 else 'down'}, {count_switches(choice)} switches; units "
                f"priced at {home.price:g}"
                + (f"; priority {home.priority}" if home.priority else "")
                + (f"; kernels chosen for {home.kernels_for}" if home.kernels_for else "")
            )
        problem = self.problem.choosing([home.kernels_for for home in homes])
        return problem.plan(policy=policy, lanes=lanes, choices=choices, whys=whys, why=why)

    def mask(self, home: Home, count: int) -> Mask:
        """So many slices, or one more where these alone could not hold a cluster."""
        order = [(home.first + home.step * index) % self.slices for index in range(self.slices)]
        mask = Mask(order[:count])
        return mask if self.problem.topology.holds_clusters(mask) else Mask(order[: count + 1])

    def route(self, worker: int, home: Home) -> tuple[tuple[int, ...], Choice]:
        """The sizes offered, in slices, and the index of one of them for every kernel."""
        key = (worker, home.kernels_for, home.most, home.price, home.switch_max)
        if key not in self._routes:
            self._routes[key] = self._best(*key)
        return self._routes[key]

    def _best(
        self, worker: int, kernels_for: int, most: int, price: float, switch_max: int
    ) -> tuple[tuple[int, ...], Choice]:
        sizes = 1 if switch_max == 0 else min(self._sizes, most)
        counts = sorted({-(-most * (index + 1) // sizes) for index in range(sizes)})
        units = self.problem.topology.units
        smallest = min(self.problem.topology.slice_units)
        times = self._times(worker, kernels_for, counts)
        if np.isinf(times[:, -1]).any():  # a kernel whose clusters do not fit there
            counts.append(self.slices)
            times = self._times(worker, kernels_for, counts)
            switch_max = max(switch_max, 2 * int(np.isinf(times[:, -2]).sum()))
        held = np.array([units if n == self.slices else smallest * n for n in counts]) / units
        return tuple(counts), best_route(times * (1 + price * held), switch_max, self._switch_ns)

    def _times(self, worker: int, kernels_for: int, counts: Sequence[int]) -> np.ndarray:
        topology = self.problem.topology
        choice = [0] * len(self.problem.profiles)
        choice[worker] = kernels_for
        smallest = min(topology.slice_units)
        sizes = [topology.units if n == self.slices else smallest * n for n in counts]
        return self.problem.choosing(choice).times(worker, sizes)
