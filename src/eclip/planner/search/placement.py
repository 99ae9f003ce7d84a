"""Placement: a plan from a few numbers per worker, with exact planning inside.

A worker has a home slice from which its lanes grow in one direction, a largest size, a price for
units, a budget of switches, and kernels that libraries chose for so many units. Given these, the
dynamic programme finds the assignment of kernels to sizes with the least cost, where a kernel of t
ns on n of N units costs t·(1 + price·n/N): time plus what the units it holds are worth to others; a
switch costs its time. Where the lanes lie does not change that beyond how many units they have, so
routes are kept by (worker, kernels, units of the lanes, price, budget).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from eclip.core.plan import Lane, Plan
from eclip.core.topology import Mask
from eclip.errors import MismatchError
from eclip.files.observations import Groups
from eclip.planner.exact import best_route, count_switches
from eclip.planner.problem import Choice, Problem

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


class SizeRoute(NamedTuple):
    """A size for every kernel; the last may be all of the device, beyond those offered."""

    choice: Choice
    needs_all: bool


class Placer:
    """Plans for one problem; what they have in common is computed once."""

    def __init__(self, problem: Problem, switch_ns: float = 0.0) -> None:
        self.problem = problem
        self._switch_ns = switch_ns  # what a switch costs the request
        self.slices = len(problem.topology.slice_units)
        # One queue stays with the default stream, one per worker for a lane of the whole device.
        queues = problem.topology.hardware_queues - 1
        self._sizes = max(1, min(_MOST_SIZES, queues // len(problem.profiles) - 1))
        self._masks: dict[tuple[int, int, int], tuple[Mask, int]] = {}
        self._routes: dict[tuple[int, int, tuple[int, ...], float, int], SizeRoute] = {}

    def plan(
        self, homes: Sequence[Home], policy: str, why: str, routes: Sequence[Groups] = ()
    ) -> Plan:
        """The best plan of these homes, or the one along given routes."""
        topology = self.problem.topology
        lanes: list[Lane] = []
        choices: list[Choice] = []
        whys = []
        for worker, home in enumerate(homes):
            if routes:
                counts, choice = self._along(routes[worker], worker, home)
            else:
                counts, choice = self.route(worker, home)
            masks = [self.mask(home, count) for count in counts]
            choices.append(choice + len(lanes))
            lanes += [Lane(worker, mask, home.priority) for mask in masks]
            used = [topology.units_of(masks[index]) for index in np.unique(choice).tolist()]
            switches = count_switches(choice)
            whys.append(
                f"{', '.join(map(str, used))} {topology.unit_name}s from slice {home.first} "
                f"{'up' if home.step > 0 else 'down'}, {switches} switch{'es' * (switches != 1)}"
                + _thrift(home.price, topology.unit_name)
                + (f"; priority {home.priority}" if home.priority else "")
                + (
                    f"; kernels chosen for {home.kernels_for} {topology.unit_name}s"
                    if home.kernels_for
                    else ""
                )
            )
        problem = self.problem.choosing([home.kernels_for for home in homes])
        return problem.plan(policy=policy, lanes=lanes, choices=choices, whys=whys, why=why)

    def mask(self, home: Home, count: int) -> Mask:
        """So many slices, or one more where these alone could not hold a cluster."""
        return self._sized(home, count)[0]

    def _sized(self, home: Home, count: int) -> tuple[Mask, int]:
        """A mask and its units."""
        key = (home.first, home.step, count)
        if key not in self._masks:
            order = [(home.first + home.step * index) % self.slices for index in range(self.slices)]
            mask = Mask(order[:count])
            if not self.problem.topology.holds_clusters(mask):
                mask = Mask(order[: count + 1])
            self._masks[key] = mask, self.problem.topology.units_of(mask)
        return self._masks[key]

    def route(self, worker: int, home: Home) -> tuple[tuple[int, ...], Choice]:
        """The sizes offered, in slices, and the index of one of them for every kernel."""
        sizes = 1 if home.switch_max == 0 else min(self._sizes, home.most)
        counts = sorted({-(-home.most * (index + 1) // sizes) for index in range(sizes)})
        units = tuple(self._sized(home, count)[1] for count in counts)
        key = (worker, home.kernels_for, units, home.price, home.switch_max)
        if key not in self._routes:
            self._routes[key] = self._best(*key)
        route = self._routes[key]
        return (*counts, self.slices) if route.needs_all else tuple(counts), route.choice

    def _along(self, route: Groups, worker: int, home: Home) -> tuple[tuple[int, ...], Choice]:
        """The same of a given route."""
        counts = tuple(sorted({slices for slices, _ in route}))
        lanes = [counts.index(slices) for slices, _ in route]
        choice = np.repeat(lanes, [kernels for _, kernels in route])
        profile = self._choosing(worker, home.kernels_for).profiles[worker]
        if len(choice) != len(profile.trace.kernels):
            raise MismatchError(
                f"a route of {len(choice)} kernels is none for {profile.model}, which has "
                f"{len(profile.trace.kernels)}"
            )
        return counts, choice

    def _choosing(self, worker: int, kernels_for: int) -> Problem:
        choice = [0] * len(self.problem.profiles)
        choice[worker] = kernels_for
        return self.problem.choosing(choice)

    def _best(
        self,
        worker: int,
        kernels_for: int,
        units: tuple[int, ...],
        price: float,
        switch_max: int,
    ) -> SizeRoute:
        problem = self._choosing(worker, kernels_for)
        everything = self.problem.topology.units
        times = problem.times(worker, units)
        refused = int(np.isinf(times[:, -1]).sum())  # kernels whose clusters do not fit there
        if refused:
            units = (*units, everything)
            times = problem.times(worker, units)
            switch_max = max(switch_max, 2 * refused)
        cost = times * (1 + price * np.array(units) / everything)
        return SizeRoute(best_route(cost, switch_max, self._switch_ns), needs_all=refused > 0)


def _thrift(price: float, unit_name: str) -> str:
    """In words: how much the worker's kernels save units for the others."""
    if price == 0:
        return "; as fast as its lanes allow"
    return (
        f"; price per {unit_name} {price:g} (a kernel on all {unit_name}s counts {1 + price:g} "
        f"times its length)"
    )


def groups_of(plan: Plan) -> tuple[Groups, ...]:
    """The routes of a plan that has one home per worker."""
    return tuple(
        tuple((len(plan.lanes[group.lane].mask), group.kernels) for group in part.groups)
        for part in plan.main.assignments
    )
