"""Search for the objective slo: who gives way to services, how, and where to.

A candidate says for every worker at which slack of a busy service it yields and moves, how long its
stretches are and how many are in flight, and for all services how much slack counts as none and as
some. It is evaluated by simulation, with the same arrivals for all. The search begins with a grid
of what all background does alike, then changes the best candidates, one thing at a time. The same
seed and number of batches give the same result.

A plan protects its services by their accounts (core/credit.py): while credit is spent, background
launches nothing beside a busy service. Such *strict* operation must be as good as the policy yield.
So candidates count only with joints, and with grains, depths and kernels for which it is.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from eclip.core.plan import Plan, Promise, Slack, Tradeoff, unpartitioned
from eclip.planner.joints import JointRules
from eclip.planner.problem import Problem
from eclip.planner.search.candidates import Evaluate, turns
from eclip.planner.search.objective import Objective, Score
from eclip.planner.search.proposals import Proposal, Proposer, in_words, strict_of
from eclip.planner.tiers import promising
from eclip.progress import Progress

_BATCH = 12
_PARENTS = 8
# What finalists may use of the bounds, in this order.
_SHARES_OF_BOUND = (1.0, 0.9, 0.8, 1.15, 0.7)
_AS_GOOD = 0.01  # strict operation may cost so much of what yield gives background, or of its tails
_EASILY = 0.8  # of a bound: shorter tails are as good as any
_UNGUARDED = 1000.0  # taken from the value of a candidate that is worse than yield while strict
_ALIKE = 0.005  # of background and of tails: less apart are two candidates not


@dataclass(frozen=True)
class TriedProposal:
    """A candidate that was evaluated."""

    proposal: Proposal
    plan: Plan
    score: Score
    value: float
    background: float
    tail: float  # worst of all services, over its bound
    guarded: bool = True  # while strict it is as good as the policy yield


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
            fitting = [one for one in self.candidates if one.guarded and one.tail <= share]
            if share > 1:
                fitting.sort(key=lambda one: -one.background)
            apart = (one for one in fitting if all(_apart(one.score, two.score) for two in chosen))
            chosen += itertools.islice(apart, 1)
        return chosen or list(self.candidates[:1])

    def shortest_strict(self) -> TriedProposal | None:
        """Of what only yields and costs hardly more than the policy yield, the shortest tail."""
        strict = [one for one in self.candidates if one.guarded and is_strict(one.plan)]
        most = max((one.background for one in strict), default=0.0)
        near = [one for one in strict if one.background >= (1 - _AS_GOOD) * most]
        return min(near, key=lambda one: one.tail, default=None)

    def best_with(self, rules: JointRules) -> TriedProposal | None:
        """The best in which all background has these rules and this depth; lanes, grain and kernels
        may differ."""
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
    ``services``: what all of them do; None: the one with less slack goes first, or none waits."""
    progress = progress or Progress()
    objective.check(len(problem.profiles))
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


def is_guarded(plan: Plan) -> bool:
    """Whether all background has rules, so that spent accounts of services can hold it."""
    return all(
        worker.joints is not None and worker.joints.rules
        for worker in plan.workers
        if worker.promise is None
    )


def is_strict(plan: Plan) -> bool:
    """Whether all background yields to every busy service, whatever its credit."""
    return is_guarded(plan) and all(
        rule.lane is None and rule.slack is Slack.PLENTY
        for worker in plan.workers
        if worker.promise is None and worker.joints is not None
        for rule in worker.joints.rules
    )


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
        self._yields = proposer.all_alike(JointRules())  # the policy yield
        self._evaluate = evaluate
        self._objective = objective
        self._plain = plain
        self._random = random
        self.known: dict[Proposal, TriedProposal] = {}

    def try_all(self, wanted: Sequence[Proposal]) -> bool:
        """Evaluate those that are new, and how they are while strict; False: none is."""
        new = [one for one in dict.fromkeys(wanted) if one not in self.known]
        strict = [strict_of(one, self._proposer.background) for one in new]
        every = [self._yields, *(one for one in strict if one is not None), *new]
        every = [one for one in dict.fromkeys(every) if one not in self.known]
        plans = [self._proposer.plan(one) for one in every]
        for one, plan, score in zip(every, plans, self._evaluate(plans), strict=True):
            value = self._objective.value(score, self._plain)
            background, tail = self._objective.background(score), self._objective.worst_tail(score)
            self.known[one] = TriedProposal(one, plan, score, value, background, tail)
        for one in every:
            if not self._is_guarded(one):
                tried = self.known[one]
                self.known[one] = replace(tried, value=tried.value - _UNGUARDED, guarded=False)
        return bool(new)

    def _is_guarded(self, proposal: Proposal) -> bool:
        strict = strict_of(proposal, self._proposer.background)
        if strict is None:
            return False
        mine, usual = self.known[strict], self.known[self._yields]
        if usual.tail > 1 and mine.score != usual.score:
            return mine.tail < usual.tail
        short = mine.tail <= max(_EASILY, (1 + _AS_GOOD) * usual.tail)
        return short and mine.background >= (1 - _AS_GOOD) * usual.background

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


def _apart(one: Score, other: Score) -> bool:
    pairs = [
        *zip(one.ratios, other.ratios, strict=True),
        *zip(one.p99_ms, other.p99_ms, strict=True),
    ]
    return any(abs(mine - theirs) > _ALIKE * max(abs(theirs), 1e-9) for mine, theirs in pairs)


def _batched(proposals: Sequence[Proposal]) -> list[Sequence[Proposal]]:
    return [proposals[start : start + _BATCH] for start in range(0, len(proposals), _BATCH)]
