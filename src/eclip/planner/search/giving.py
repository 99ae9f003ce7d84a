"""Search for the objective slo: who gives way to services, how, and where to.

A candidate says for every worker at which slack of a busy service it yields and moves, how long its
stretches are and how many are in flight, and for all services how much slack counts as none and as
some. It is evaluated by simulation, with the same arrivals for all. The search begins with a grid
of what all background does alike, then changes the best candidates, one thing at a time. The same
seed and number of batches give the same result.

Where only lanes keep background away from a service, the service is slower on a GPU than the
simulator says. So the search takes its p99 to be ``LANES_MARGIN`` times the simulated one there.
Plans say so.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from eclip.core.plan import Lane, Plan, Promise, Slack, Tradeoff, unpartitioned
from eclip.core.topology import Mask
from eclip.planner.joints import GRAIN_NS, JointRules, cut_by_time, far_mask, longest_piece_ns
from eclip.planner.problem import Problem
from eclip.planner.search.candidates import Evaluate, turns
from eclip.planner.search.objective import Objective, Score
from eclip.planner.tiers import giving_way, promising
from eclip.progress import Progress

_BATCH = 12
_PARENTS = 8
_GRAINS_NS = (GRAIN_NS // 2, GRAIN_NS, 2 * GRAIN_NS)
_DEPTHS = (1, 2)
# Limits of slack, in times of a service's request.
_NONE = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
_SOME = (0.5, 1.0, 2.0, 4.0)
# What finalists may use of the bounds, in this order.
_SHARES_OF_BOUND = (1.0, 0.9, 0.8, 1.15, 0.7)
# On p99 where only lanes keep background away. On an H200, with two services beside one model each,
# at three loads, on three masks: the measured p99 was at most so many times the simulated one in 14
# of 18 rows, 1.14 times in the middle (docs/results/services.md).
LANES_MARGIN = 1.6
_ALIKE = 0.005  # of background and of tails: less apart are two candidates not

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


@dataclass(frozen=True)
class TriedProposal:
    """A candidate that was evaluated."""

    proposal: Proposal
    plan: Plan
    score: Score
    value: float
    background: float
    tail: float  # worst of all services, over its bound


@dataclass(frozen=True)
class FoundProposals:
    """The best first; ``plain`` is the score of plain streams by the same evaluation."""

    candidates: tuple[TriedProposal, ...]
    plain: Score
    batches: int
    evaluated: int
    tradeoffs: tuple[Tradeoff, ...]
    frontier: tuple[tuple[float, float], ...] = ()  # of throughput and efficiency: not looked for

    @property
    def points(self) -> tuple[tuple[float, float], ...]:
        """(background, worst p99 over its bound) of every candidate whose services answered."""
        return tuple(
            (one.background, one.tail) for one in self.candidates if math.isfinite(one.tail)
        )

    def finalists(self, count: int) -> list[TriedProposal]:
        """The best ones that are not all alike, with less and less use of the bounds: on a device
        tails are not those of the simulator. One may be beyond them."""
        chosen: list[TriedProposal] = []
        for share in itertools.islice(itertools.cycle(_SHARES_OF_BOUND), 3 * len(_SHARES_OF_BOUND)):
            if len(chosen) == count:
                break
            fitting = [one for one in self.candidates if one.tail <= share]
            if share > 1:
                fitting.sort(key=lambda one: -one.background)
            apart = (one for one in fitting if all(_apart(one.score, two.score) for two in chosen))
            chosen += itertools.islice(apart, 1)
        return chosen or list(self.candidates[:1])

    def best_with(self, rules: JointRules) -> TriedProposal | None:
        """The best in which all background has these rules and, with joints, this depth; whatever
        their lanes, grain and kernels are."""
        for one in self.candidates:
            background = [
                replace(mine, lane=None, grain_ns=rules.grain_ns, kernels_for=0)
                for mine, worker in zip(one.proposal.each, one.plan.workers, strict=True)
                if worker.promise is None
            ]
            if all(mine == rules for mine in background):
                return one
        return None


def search_rules(
    problem: Problem,
    promises: Mapping[int, Promise],
    evaluate: Evaluate,
    objective: Objective,
    *,
    seconds: float,
    batches: int | None = None,
    seed: int = 0,
    services: JointRules | None = None,
    progress: Progress | None = None,
) -> FoundProposals:
    """Search for so many seconds, or exactly so many batches after the beginning of the grid.
    ``services``: what all of them do; None: the one with less slack goes first, or nobody waits."""
    progress = progress or Progress()
    objective.check(len(problem.profiles))
    evaluate = _carefully(evaluate)
    shared = promising(unpartitioned(problem.topology, problem.profiles, problem.mix), promises)
    (plain,) = evaluate([shared])
    deadline = time.monotonic() + seconds  # the first evaluation may compile for as long as that
    proposer = Proposer(problem, promises, services)
    hunt = _Hunt(proposer, evaluate, objective, plain, np.random.default_rng(seed))
    first, *grid = _batched(proposer.starts())
    hunt.try_all(first)
    done = 0
    for turn in turns(deadline, seconds, batches, progress):
        # By turns: what is left of the grid, and changes of the best.
        from_grid = bool(grid) and turn % 2 == 0
        if not hunt.try_all(grid.pop(0) if from_grid else hunt.children(_BATCH)) and not grid:
            break  # nothing new is left near the best
        done += 1
    return hunt.found(done)


def shares_by_lanes(plan: Plan) -> bool:
    """Whether some background never gives way to services, and only lanes keep it away from them:
    plain streams do not even have these."""
    background = [worker for worker in plan.workers if worker.promise is None]
    stays = any(worker.joints is None for worker in background)
    masked = any(plan.confines(worker) for worker in plan.everyone)
    return len(background) < len(plan.workers) and stays and masked


def _carefully(evaluate: Evaluate) -> Evaluate:
    """The same with the margin on tails of services, where it is due."""

    def reckon(plan: Plan, score: Score) -> Score:
        if not shares_by_lanes(plan):
            return score
        tails = [
            tail if worker.promise is None else LANES_MARGIN * tail
            for worker, tail in zip(plan.workers, score.p99_ms, strict=True)
        ]
        return replace(score, p99_ms=tuple(tails))

    return lambda plans: [
        reckon(plan, score) for plan, score in zip(plans, evaluate(plans), strict=True)
    ]


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
        """Whether all kernels of a worker, whichever it chooses, can run on so many units."""
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
        grid += [self.apart(half), self.apart(quarter), self.all_alike(patient)]
        grid += [
            self.all_alike(moving, part, none) for part in (half, most) for none in (1.0, 0.5, 2.0)
        ]
        grid.append(self.all_alike(stepwise, most))
        grid += [self.apart(size) for size in topology.lane_sizes[:-1]]
        grid += [self.all_alike(JointRules(grain_ns=grain)) for grain in _GRAINS_NS]
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
            limits[service] = msgspec.structs.replace(promise, none_ns=none_ns, some_ns=some_ns)
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


class _Hunt:
    """Candidates that were evaluated, and where to look next."""

    def __init__(
        self,
        proposer: Proposer,
        evaluate: Evaluate,
        objective: Objective,
        plain: Score,
        random: np.random.Generator,
    ) -> None:
        self._proposer = proposer
        self._evaluate = evaluate
        self._objective = objective
        self._plain = plain
        self._random = random
        self.known: dict[Proposal, TriedProposal] = {}

    def try_all(self, wanted: Sequence[Proposal]) -> bool:
        """Evaluate those that are new; False: none is."""
        new = [one for one in dict.fromkeys(wanted) if one not in self.known]
        plans = [self._proposer.plan(one) for one in new]
        for one, plan, score in zip(new, plans, self._evaluate(plans), strict=True):
            value = self._objective.value(score, self._plain)
            background, tail = self._objective.background(score), self._objective.worst_tail(score)
            self.known[one] = TriedProposal(one, plan, score, value, background, tail)
        return bool(new)

    def ranked(self) -> list[TriedProposal]:
        return sorted(self.known.values(), key=lambda one: -one.value)

    def children(self, count: int) -> list[Proposal]:
        best = self.ranked()[:_PARENTS]
        made: dict[Proposal, None] = {}
        for _ in range(50 * count):
            if len(made) == count:
                break
            rank = min(int(self._random.exponential(_PARENTS / 4)), len(best) - 1)
            child = best[rank].proposal
            for _ in range(1 + int(self._random.random() < 0.3)):
                child = self._proposer.changed(child, self._random).plainly
            if child not in self.known:
                made[child] = None
        return list(made)

    def found(self, batches: int) -> FoundProposals:
        ranked = self.ranked()
        tradeoffs = _tradeoffs(ranked, self._plain, self._objective)
        return FoundProposals(tuple(ranked), self._plain, batches, len(ranked), tradeoffs)


def _tradeoffs(
    ranked: Sequence[TriedProposal], plain: Score, objective: Objective
) -> tuple[Tradeoff, ...]:
    """What nothing beats in background and in tails, and plain streams."""
    points = sorted(ranked, key=lambda one: (-one.background, one.tail))
    frontier = [tradeoff_of("plain streams", plain, objective)]
    lowest = float("inf")
    for one in points:
        if one.tail < lowest:
            lowest = one.tail
            frontier.append(tradeoff_of(in_words(one.proposal, one.plan), one.score, objective))
    return tuple(frontier)


def tradeoff_of(label: str, score: Score, objective: Objective) -> Tradeoff:
    tail = objective.worst_tail(score)
    return Tradeoff(
        label=label,
        background=round(objective.background(score), 4),
        worst_tail=None if np.isinf(tail) else round(tail, 4),
    )


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


def _apart(one: Score, other: Score) -> bool:
    pairs = [
        *zip(one.ratios, other.ratios, strict=True),
        *zip(one.p99_ms, other.p99_ms, strict=True),
    ]
    return any(abs(mine - theirs) > _ALIKE * max(abs(theirs), 1e-9) for mine, theirs in pairs)


def _batched(proposals: Sequence[Proposal]) -> list[Sequence[Proposal]]:
    return [proposals[start : start + _BATCH] for start in range(0, len(proposals), _BATCH)]
