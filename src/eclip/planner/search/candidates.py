"""The ``search`` policy: exact planning inside, evaluation outside.

A candidate is one home per worker (placement.py); the dynamic programme makes the best plan of it,
and ``evaluate``, handed in by the caller, says what running that plan gives. The search keeps the
best candidates found so far and tries changed and mixed copies of them until its time is over. It
can be stopped at any moment and has a result from the first batch on; the same seed and the same
number of batches give the same result. On the device it goes on in refine.py.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from eclip.core.plan import Plan, Tradeoff, unpartitioned
from eclip.planner.problem import Problem
from eclip.planner.search.objective import THROUGHPUT, Objective, Score
from eclip.planner.search.placement import Home, Placer
from eclip.progress import Progress

Evaluate = Callable[[Sequence[Plan]], list[Score]]
Homes = tuple[Home, ...]

DEFAULT_SECONDS = 20.0
MOST_SECONDS = 3600.0
_BATCH = 32
_PARENTS = 24
_PRICES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
_BUDGETS = (0, 4, 14)


@dataclass(frozen=True)
class Candidate:
    homes: Homes
    plan: Plan
    score: Score
    value: float


@dataclass(frozen=True)
class Found:
    """The best first; ``plain`` is the score of plain streams by the same evaluation."""

    candidates: tuple[Candidate, ...]
    plain: Score
    batches: int
    evaluated: int
    frontier: tuple[tuple[float, float], ...]  # (STP, efficiency) that nothing else beats in both
    tradeoffs: tuple[Tradeoff, ...] = ()  # of services: not looked for

    @property
    def points(self) -> tuple[tuple[float, float], ...]:
        """(STP, efficiency) of every candidate that ran."""
        scores = [one.score for one in self.candidates if one.score.stp > 0]
        return tuple((score.stp, score.efficiency) for score in scores)

    def finalists(self, count: int) -> list[Candidate]:
        """The best ones that are not all alike: no two give nearly the same to all workers. What
        gave nothing, as the device refused it, is none."""
        chosen: list[Candidate] = []
        for one in self.candidates:
            if one.score.stp > 0 and all(apart(one.score, other.score) for other in chosen):
                chosen.append(one)
            if len(chosen) == count:
                break
        return chosen

    @property
    def static(self) -> list[Candidate]:
        """Those with one mask per worker and nothing else."""
        return [
            one
            for one in self.candidates
            if not any(home.switch_max or home.priority or home.kernels_for for home in one.homes)
        ]

    @property
    def unmasked(self) -> list[Candidate]:
        """Candidates in which all workers have all units and some have other kernels than their
        own."""
        return [
            one
            for one in self.candidates
            if any(home.kernels_for for home in one.homes)
            and all(lane.mask == one.plan.topology.full for lane in one.plan.lanes)
        ]


def search(
    problem: Problem,
    evaluate: Evaluate,
    objective: Objective = THROUGHPUT,
    *,
    seconds: float = DEFAULT_SECONDS,
    batches: int | None = None,
    seed: int = 0,
    switch_ns: float = 0.0,
    progress: Progress | None = None,
) -> Found:
    """Search for so many seconds, or exactly so many batches of candidates."""
    progress = progress or Progress()
    objective.check(len(problem.profiles))
    (plain,) = evaluate([unpartitioned(problem.topology, problem.profiles, problem.mix)])
    deadline = time.monotonic() + seconds  # the first evaluation may compile for as long as that
    placer = Placer(problem, switch_ns)
    hunt = Hunt(placer, evaluate, objective, plain, np.random.default_rng(seed))
    hunt.try_all(_starts(problem, placer.slices))
    done = 0
    for _ in turns(deadline, seconds, batches, progress):
        if not hunt.try_all(hunt.children(_BATCH)):
            break  # everything there is was tried
        done += 1
    return hunt.found(done)


def turns(
    deadline: float, seconds: float, batches: int | None, progress: Progress
) -> Iterator[int]:
    """Numbers of batches, until there are so many or, without ``batches``, the time is over."""
    for done in itertools.count():
        left = deadline - time.monotonic()
        if progress.stopped:
            return
        progress.part(done / max(1, batches) if batches is not None else 1 - max(left, 0) / seconds)
        if done >= batches if batches is not None else left <= 0:
            return
        yield done


class Hunt:
    """Candidates that were evaluated, and where to look next."""

    def __init__(
        self,
        placer: Placer,
        evaluate: Evaluate,
        objective: Objective,
        plain: Score,
        random: np.random.Generator,
        priorities: int = 1,  # levels to use; 1 for an evaluation that does not know them
    ) -> None:
        self.placer = placer
        self._priorities = priorities
        problem = placer.problem
        self._kernels = [problem.kernels_for(worker) for worker in range(len(problem.profiles))]
        self._evaluate = evaluate
        self._objective = objective
        self._plain = plain
        self._random = random
        self._known: dict[Homes, Candidate] = {}
        self.best: list[Candidate] = []  # of which the next ones are made

    def try_all(self, wanted: Sequence[Homes]) -> list[Candidate]:
        """Evaluate those that are new."""
        new = [homes for homes in dict.fromkeys(wanted) if homes not in self._known]
        plans = [self._plan(homes) for homes in new]
        for homes, plan, score in zip(new, plans, self._evaluate(plans), strict=True):
            value = self._objective.value(score, self._plain)
            self._known[homes] = Candidate(homes, plan, score, value)
        self.best = self.ranked()[:_PARENTS]
        return [self._known[homes] for homes in new]

    def knows(self, one: Candidate) -> bool:
        return one.homes in self._known

    def ranked(self) -> list[Candidate]:
        """All of them, the best first."""
        return sorted(self._known.values(), key=lambda one: -one.value)

    def _plan(self, homes: Homes) -> Plan:
        return self.placer.plan(homes, "search", "")

    def rescored(self, evaluate: Evaluate, plain: Score) -> Hunt:
        """The same candidates by another evaluation; what gave nothing still gives nothing."""
        other = Hunt(self.placer, evaluate, self._objective, plain, self._random, self._priorities)
        ran = [one for one in self._known.values() if min(one.score.ratios) > 0]
        other._known = {one.homes: one for one in self._known.values()}
        for one, score in zip(ran, evaluate([each.plan for each in ran]), strict=True):
            value = self._objective.value(score, plain)
            other._known[one.homes] = replace(one, score=score, value=value)
        other.best = other.ranked()[:_PARENTS]
        return other

    def children(self, count: int) -> list[Homes]:
        """Changed copies of good candidates, the best ones more often, and mixtures of two."""
        made: dict[Homes, None] = {}
        for _ in range(50 * count):
            if len(made) == count:
                break
            child = list(self._parent())
            if len(child) > 1 and self._random.random() < 0.25:
                other = self._parent()
                for worker in np.flatnonzero(self._random.random(len(child)) < 0.5).tolist():
                    child[worker] = other[worker]
            for _ in range(1 + int(self._random.random() < 0.4)):
                worker = int(self._random.integers(len(child)))
                child[worker] = self._changed(child[worker], worker)
            if tuple(child) not in self._known:
                made[tuple(child)] = None
        return list(made)

    def _parent(self) -> Homes:
        rank = int(self._random.exponential(_PARENTS / 4))
        return self.best[min(rank, len(self.best) - 1)].homes

    def _changed(self, home: Home, worker: int) -> Home:
        random, slices = self._random, self.placer.slices
        step = int(random.choice([-3, -2, -1, 1, 2, 3]))
        kernels = self._kernels[worker]
        ways = ["most", "most", "first", "turn", "budget", "price"]
        ways += ["priority"] * 2 if self._priorities > 1 else []
        ways += ["kernels"] * 2 if len(kernels) > 1 else []
        way = ways[int(random.integers(len(ways)))]
        if way == "most":
            return replace(home, most=int(np.clip(home.most + step, 1, slices)))
        if way == "first":
            return replace(home, first=(home.first + step) % slices)
        if way == "turn":
            # Turned round on the spot: the same largest mask, grown from its other end.
            last = (home.first + home.step * (home.most - 1)) % slices
            return replace(home, first=last, step=-home.step)
        if way == "budget":
            return replace(home, switch_max=int(random.choice(_BUDGETS)))
        if way == "priority":
            return replace(home, priority=int(random.integers(self._priorities)))
        if way == "kernels":
            return replace(home, kernels_for=int(random.choice(kernels)))
        return replace(
            home, price=float(random.choice(_PRICES)), switch_max=max(home.switch_max, 4)
        )

    def found(self, batches: int) -> Found:
        everything = self.ranked()
        frontier: list[tuple[float, float]] = []
        points = sorted({(one.score.stp, one.score.efficiency) for one in everything}, reverse=True)
        for stp, efficiency in points:
            if not frontier or efficiency > frontier[-1][1]:
                frontier.append((stp, efficiency))
        return Found(tuple(everything), self._plain, batches, len(everything), tuple(frontier))


def _starts(problem: Problem, slices: int) -> list[Homes]:
    """Where the search sets out: all workers on all units, equal parts, and parts that overlap.

    Homes are spread evenly and grow up, or in turns up and down from the same places; once as one
    mask each, and once with lanes to choose from at two prices. All that with everybody's own
    kernels, and again with others that fit.
    """
    workers = len(problem.profiles)
    starts: list[Homes] = []
    for most in sorted({slices, *(min(slices, -(-slices * part // 8)) for part in range(1, 9))}):
        for turned in (False, True):
            firsts = [slices * worker // workers for worker in range(workers)]
            steps = [-1 if turned and worker % 2 else 1 for worker in range(workers)]
            if turned:
                firsts = [
                    (first - 1) % slices if step < 0 else first
                    for first, step in zip(firsts, steps, strict=True)
                ]
            for price, budget in ((0.0, 0), (0.5, 14), (2.0, 14)):
                starts.append(
                    tuple(
                        Home(first, step, most, price, budget)
                        for first, step in zip(firsts, steps, strict=True)
                    )
                )
    return [*starts, *(fitted(homes, problem) for homes in starts)]


def fitted(homes: Homes, problem: Problem) -> Homes:
    """The same with every worker's kernels chosen for about the units of its largest lane, or for
    its share of the device where it has all of it; a worker without others keeps its own."""
    topology = problem.topology
    chosen = []
    for worker, home in enumerate(homes):
        units = min(topology.slice_units) * home.most
        if home.most == len(topology.slice_units):
            units = topology.units // max(2, len(homes))
        others = [number for number in problem.kernels_for(worker) if number]
        nearest = min(others, key=lambda number: abs(number - units), default=0)
        chosen.append(replace(home, kernels_for=nearest))
    return tuple(chosen)


def apart(one: Score, other: Score) -> bool:
    """True if any worker's ratio differs by more than 2%."""
    pairs = zip(one.ratios, other.ratios, strict=True)
    return max(abs(mine - theirs) / max(theirs, 1e-9) for mine, theirs in pairs) > 0.02
