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

import numpy as np

from eclip.core.plan import Plan, Promise, Tradeoff, unpartitioned
from eclip.planner.joints import JointRules
from eclip.planner.problem import Problem
from eclip.planner.search.candidates import Evaluate, turns
from eclip.planner.search.objective import Objective, Score
from eclip.planner.search.proposals import Proposal, Proposer, in_words
from eclip.planner.tiers import promising
from eclip.progress import Progress

_BATCH = 12
_PARENTS = 8
# What finalists may use of the bounds, in this order.
_SHARES_OF_BOUND = (1.0, 0.9, 0.8, 1.15, 0.7)
# On p99 where only lanes keep background away. On an H200, with two services beside one model each,
# at three loads, on three masks: the measured p99 was at most so many times the simulated one in 14
# of 18 rows, 1.14 times in the middle (docs/results/services.md).
LANES_MARGIN = 1.6
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


def _apart(one: Score, other: Score) -> bool:
    pairs = [
        *zip(one.ratios, other.ratios, strict=True),
        *zip(one.p99_ms, other.p99_ms, strict=True),
    ]
    return any(abs(mine - theirs) > _ALIKE * max(abs(theirs), 1e-9) for mine, theirs in pairs)


def _batched(proposals: Sequence[Proposal]) -> list[Sequence[Proposal]]:
    return [proposals[start : start + _BATCH] for start in range(0, len(proposals), _BATCH)]
