"""Proposals: candidates of a search for services, their plans, and what may be varied in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from eclip.core.plan import P99_GAIN, Lane, Plan, Promise, Slack
from eclip.core.topology import Mask
from eclip.planner.joints import GRAIN_NS, JointRules, cut_by_time, far_mask, longest_piece_ns
from eclip.planner.problem import Problem
from eclip.planner.tiers import giving_way

_GRAINS_NS = (GRAIN_NS // 2, GRAIN_NS, 2 * GRAIN_NS)
_DEPTHS = (1, 2)
# Limits of slack, in times of a service's request.
_NONE = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
_SOME = (0.5, 1.0, 2.0, 4.0)
STAYS = JointRules(joints=False)
# What background may do at joints: yield and move at these levels of slack.
_LEVELS: tuple[tuple[Slack | None, Slack | None], ...] = (
    (Slack.PLENTY, None),
    (Slack.NONE, None),
    (None, Slack.PLENTY),
    (Slack.NONE, Slack.PLENTY),
    (Slack.NONE, Slack.SOME),
)


@dataclass(frozen=True)
class Proposal:
    """A candidate: rules for every worker, and limits of slack in times of a request."""

    each: tuple[JointRules, ...]
    none: float = 1.0
    some: float = 1.0

    @property
    def plainly(self) -> Proposal:
        """The same without what its rules do not ask for."""
        each = tuple(_plainly(rules) for rules in self.each)
        asked = {slack for rules in each for slack, _ in rules.by_slack} - {Slack.PLENTY}
        if not asked:
            return Proposal(each)
        return Proposal(each, self.none, self.some if Slack.SOME in asked else 1.0)


def _plainly(rules: JointRules) -> JointRules:
    if not rules.joints:
        return replace(STAYS, lane=rules.lane, kernels_for=rules.kernels_for)
    return rules if rules.moves else replace(rules, lane=None)


def strict_of(proposal: Proposal, background: Sequence[int]) -> Proposal | None:
    """The same joints with background that only yields; None: some background has no joints."""
    if not all(proposal.each[worker].joints for worker in background):
        return None
    each = [
        replace(rules, yields=Slack.PLENTY, moves=None, lane=None)
        if worker in background
        else rules
        for worker, rules in enumerate(proposal.each)
    ]
    return Proposal(tuple(each))


class Proposer:
    """Candidates, their plans, and what may be varied."""

    def __init__(
        self, problem: Problem, promises: Mapping[int, Promise], services: JointRules | None = None
    ) -> None:
        """``services``: what all of them do; None: as is best."""
        self.problem = problem
        self._promises = promises
        self._services = services
        everyone = range(len(problem.profiles))
        self.background = [worker for worker in everyone if worker not in promises]
        self.kernels = [problem.kernels_for(worker) for worker in everyone]
        sizes = problem.topology.lane_sizes
        self.sizes = [[size for size in sizes if self._fits(worker, size)] for worker in everyone]

    @property
    def _in_turn(self) -> bool:
        """Whether services may let each other go first."""
        return len(self._promises) > 1 and self._services is None

    def _fits(self, worker: int, units: int) -> bool:
        """True if all kernels that a worker may choose can run on so many units."""
        for kernels_for in self.problem.kernels_for(worker):
            choice = [0] * len(self.problem.profiles)
            choice[worker] = kernels_for
            if np.isinf(self.problem.choosing(choice).times(worker, [units])).any():
                return False
        return units < self.problem.topology.units

    def all_alike(
        self, rules: JointRules, units: int = 0, none: float = 1.0, some: float = 1.0
    ) -> Proposal:
        """These rules and lanes of about so many units for all background, if its kernels fit them;
        services have all units."""
        each = [self._services or STAYS] * len(self.problem.profiles)
        if self._in_turn and rules.joints:
            each = [JointRules(grain_ns=rules.grain_ns, depth=rules.depth)] * len(each)
        for worker in self.background:
            each[worker] = replace(rules, lane=self._near(worker, units))
        return Proposal(tuple(each), none, some).plainly

    def _side_by_side(self, proposal: Proposal) -> Proposal:
        """The same, with services that never wait for each other."""
        each = [
            STAYS if worker in self._promises else rules
            for worker, rules in enumerate(proposal.each)
        ]
        return replace(proposal, each=tuple(each))

    def apart(self, units: int) -> Proposal:
        """Static masks: background on so many units from the far end, services on the others."""
        topology = self.problem.topology
        units = min(topology.lane_sizes[:-1], key=lambda size: abs(size - units), default=0)
        rest = topology.units - units
        each = []
        for worker in range(len(self.problem.profiles)):
            wanted = rest if worker in self._promises else units
            fits = worker in self._promises and self._fits(worker, rest)
            lane = self._lane(worker, rest) if fits else self._near(worker, wanted)
            each.append(replace(STAYS, lane=lane))
        return Proposal(tuple(each))

    def _near(self, worker: int, units: int) -> Mask | None:
        """The lane nearest to so many units among those that the worker's kernels fit."""
        if not units or not self.sizes[worker]:
            return None
        return self._lane(worker, min(self.sizes[worker], key=lambda size: abs(size - units)))

    def _lane(self, worker: int, units: int) -> Mask:
        """Background's are at the far end."""
        topology = self.problem.topology
        if worker in self._promises:
            return topology.take(units, range(len(topology.slice_units)))
        return far_mask(topology, units)

    def starts(self) -> list[Proposal]:
        """The grid, the most telling first: a few of every kind at the usual grain, then more."""
        topology = self.problem.topology
        quarter, half, most = (round(part * topology.units) for part in (0.25, 0.5, 0.75))
        patient, moving = JointRules(Slack.NONE), JointRules(Slack.NONE, Slack.PLENTY)
        stepwise = JointRules(Slack.NONE, Slack.SOME)
        grid = [self.all_alike(JointRules(depth=depth)) for depth in (2, 1)]
        if self._in_turn and self.background:
            grid += [self._side_by_side(proposal) for proposal in grid]
        # What strict operation may be: a search holds all others against these.
        others = [grain for grain in _GRAINS_NS if grain != GRAIN_NS]
        grid += [
            self.all_alike(JointRules(grain_ns=grain, depth=depth))
            for grain in others
            for depth in _DEPTHS[::-1]
        ]
        grid += [self.apart(half), self.apart(quarter), self.all_alike(patient)]
        grid += [
            self.all_alike(moving, part, none) for part in (half, most) for none in (1.0, 0.5, 2.0)
        ]
        grid.append(self.all_alike(stepwise, most))
        grid += [self.apart(size) for size in topology.lane_sizes[:-1]]
        grid += [self.all_alike(patient, none=none) for none in _NONE]
        for part in (half, most, quarter):
            grid.append(self.all_alike(STAYS, part))
            grid.append(self.all_alike(JointRules(None, Slack.PLENTY), part))
            grid += [self.all_alike(moving, part, none) for none in _NONE]
        grid += [
            self.all_alike(stepwise, part, none, some)
            for part in (half, most)
            for none in (0.5, 1.0, 2.0)
            for some in (1.0, 2.0)
        ]
        return list(dict.fromkeys(grid))

    def plan(self, proposal: Proposal) -> Plan:
        each = proposal.each
        problem = self.problem.choosing([rules.kernels_for for rules in each])
        full = problem.topology.full
        homes = [full if rules.joints or not rules.lane else rules.lane for rules in each]
        lanes = [Lane(worker, home) for worker, home in enumerate(homes)]
        base = problem.plan(
            policy="search",
            lanes=lanes,
            choices=problem.on_own_lanes(),
            whys=[self._why(rules, lane) for rules, lane in zip(each, lanes, strict=True)],
            why="",
        )
        promises = self._limits(problem, proposal)
        return giving_way(base, problem.profiles, promises, dict(enumerate(each)))

    def _why(self, rules: JointRules, lane: Lane) -> str:
        topology = self.problem.topology
        words = f"{topology.units_of(lane.mask)} {topology.unit_name}s"
        if rules.kernels_for:
            words += f", kernels chosen for {rules.kernels_for}"
        return words

    def _limits(self, problem: Problem, proposal: Proposal) -> dict[int, Promise]:
        """Promises with limits of slack: none is left when what is in flight, and so many requests,
        would use it up."""
        in_flight_ns = 0
        for worker in self.background:
            rules, profile = proposal.each[worker], problem.profiles[worker]
            if rules.joints:
                units = problem.topology.units
                at = cut_by_time(profile, units, rules.grain_ns)
                longest_ns = longest_piece_ns(profile, at)
                in_flight_ns = max(in_flight_ns, rules.depth * longest_ns)
        limits = {}
        for service, promise in self._promises.items():
            none_ns = in_flight_ns + round(proposal.none * promise.request_ns)
            some_ns = none_ns + round(proposal.some * promise.request_ns)
            limits[service] = msgspec.structs.replace(
                promise, none_ns=none_ns, some_ns=some_ns, gain=P99_GAIN
            )
        return limits

    def changed(self, proposal: Proposal, random: np.random.Generator) -> Proposal:
        """One thing different: a limit, or one worker's rules."""
        levels = {slack for rules in proposal.each for slack, _ in rules.by_slack}
        if levels - {Slack.PLENTY} and random.random() < 0.4:
            if random.random() < 0.7:
                factor = float(random.choice((0.7, 0.85, 1.2, 1.4)))
                return replace(proposal, none=round(proposal.none * factor, 3))
            return replace(proposal, some=float(random.choice(_SOME)))
        service = self._in_turn and random.random() < 0.15
        among = list(self._promises) if service or not self.background else self.background
        worker = int(random.choice(among))
        each = list(proposal.each)
        each[worker] = self._otherwise(worker, each[worker], random)
        return replace(proposal, each=tuple(each))

    def _otherwise(self, worker: int, rules: JointRules, random: np.random.Generator) -> JointRules:
        kernels = self.kernels[worker]
        if worker in self._promises:
            return replace(rules, joints=not rules.joints)
        changes: list[dict[str, Any]] = [
            {"grain_ns": int(random.choice(_GRAINS_NS))},
            {"depth": int(random.choice(_DEPTHS))},
        ]
        if self.sizes[worker]:
            changes += [{"lane": self._any_lane(worker, random)}] * 2
            yields, moves = _LEVELS[int(random.integers(len(_LEVELS)))]
            changes += [{"joints": True, "yields": yields, "moves": moves}]
        if len(kernels) > 1:
            changes.append({"kernels_for": int(random.choice(kernels))})
        change = changes[int(random.integers(len(changes)))]
        changed = replace(rules, **change)
        if changed.joints and changed.moves and not changed.lane:
            changed = replace(changed, lane=self._any_lane(worker, random))
        return changed

    def _any_lane(self, worker: int, random: np.random.Generator) -> Mask:
        return self._lane(worker, int(random.choice(self.sizes[worker])))


def in_words(proposal: Proposal, plan: Plan) -> str:
    """``yields when slack is below 1.2 requests, else moves to 64 SMs, 150 µs, depth 2``; of static
    masks, every worker's size"""
    unit = f"{plan.topology.unit_name}s"
    topology = plan.topology
    sizes = [topology.units_of(rules.lane or topology.full) for rules in proposal.each]
    if not any(rules.joints for rules in proposal.each):
        return f"{'+'.join(map(str, sizes))} {unit}"
    parts = []
    for rules, size, worker in zip(proposal.each, sizes, plan.workers, strict=True):
        if worker.promise is not None:
            continue
        words = [f"stays on {size} {unit}"]
        if rules.joints:
            room = f"{size} {unit}"
            words = _rules_in_words(rules, f"slack is below {proposal.none:g} requests", room)
            words += [f"{rules.grain_ns / 1e3:g} µs", f"depth {rules.depth}"]
        parts.append(", ".join(words))
    return "; ".join(dict.fromkeys(parts)) or "services among themselves"


def _rules_in_words(rules: JointRules, no_slack: str, room: str) -> list[str]:
    words = []
    if rules.yields:
        words.append("yields" if rules.yields is Slack.PLENTY else f"yields when {no_slack}")
    if rules.moves:
        when = "" if rules.moves is Slack.PLENTY else " when there is some"
        otherwise = "else " if words and not when else ""
        words.append(f"{otherwise}moves to {room}{when}")
    return words if Slack.PLENTY in (rules.yields, rules.moves) else [*words, "else goes on"]
