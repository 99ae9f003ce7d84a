"""Variants: what a worker does while some of the others are idle.

The plan of a search is for all workers at once. At low load that is rare, and a worker that keeps
to its lanes while the rest of the device idles is slower than plain streams. So the plan gets, for
sets of active workers, an assignment each: alone a worker has the whole device; in company every
worker takes one of its lanes, or the whole device, as evaluation likes best. Variants add at most
one lane per worker, that of the whole device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import msgspec

from eclip.core.plan import MOST_VARIANTS, Assignment, Group, Lane, Plan, Variant
from eclip.planner.problem import Problem
from eclip.planner.search.objective import THROUGHPUT, Objective, Score

_ALL_SETS_UP_TO = 5  # workers: with five, each is in 16 sets

EvaluateActive = Callable[[Sequence[Plan], tuple[int, ...]], list[Score]]


def with_variants(
    plan: Plan, problem: Problem, evaluate: EvaluateActive, objective: Objective = THROUGHPUT
) -> Plan:
    """The plan with a variant for every set of workers that may be active, as far as they fit.

    One that has variants, or no masks, stays as it is.
    """
    if len(plan.variants) > 1 or all(lane.mask == plan.topology.full for lane in plan.lanes):
        return plan
    problem = problem.of(plan)
    workers = len(plan.workers)
    room = plan.topology.hardware_queues - 1 - len(plan.lanes)
    missing = [worker for worker in plan.everyone if _whole_lane(plan, worker) is None]
    if workers == 1 or len(missing) > room:
        return plan
    full = plan.topology.full
    plan = msgspec.structs.replace(
        plan, lanes=(*plan.lanes, *(Lane(worker, full) for worker in missing))
    )
    variants = []
    for active in _sets(workers):
        best = _best(plan, problem, active, evaluate, objective)
        variants.append(Variant(active, best))
    return msgspec.structs.replace(plan, variants=(*plan.variants, *variants))


def _sets(workers: int) -> list[tuple[int, ...]]:
    """Sets of active workers, without the set of all; no worker is in more than a device can
    keep."""
    sizes: Sequence[int] = range(1, workers)
    if workers > _ALL_SETS_UP_TO:
        sizes = (1, 2, workers - 1) if 2 * workers <= MOST_VARIANTS else (1,)
    return [chosen for size in sizes for chosen in itertools.combinations(range(workers), size)]


def _best(
    plan: Plan,
    problem: Problem,
    active: tuple[int, ...],
    evaluate: EvaluateActive,
    objective: Objective,
) -> tuple[Assignment, ...]:
    """One lane each: from the whole device for all, worker by worker what gives the most."""
    lanes = {worker: _whole_lane(plan, worker) or 0 for worker in active}
    if len(active) > 1:
        (plain,) = evaluate([_trial(plan, problem, lanes)], active)
        goal = Objective(fairness=objective.fairness)
        value = goal.value(plain, plain)
        for worker in active:
            mine = [index for index, lane in enumerate(plan.lanes) if lane.owner == worker]
            tried = [
                {**lanes, worker: lane} for lane in _largest(plan, mine) if lane != lanes[worker]
            ]
            scores = evaluate([_trial(plan, problem, each) for each in tried], active)
            for each, score in zip(tried, scores, strict=True):
                if (found := goal.value(score, plain)) > value:
                    value, lanes = found, each
    return tuple(_alone_on(problem, plan, worker, lanes[worker]) for worker in active)


def _largest(plan: Plan, lanes: Sequence[int]) -> list[int]:
    """Some lanes to choose from: small ones gain nothing while units are idle."""
    return sorted(lanes, key=plan.units, reverse=True)[:4]


def _trial(plan: Plan, problem: Problem, lanes: dict[int, int]) -> Plan:
    """The plan with this assignment for a set of workers, to be evaluated with them active."""
    parts = tuple(_alone_on(problem, plan, worker, lane) for worker, lane in lanes.items())
    return msgspec.structs.replace(plan, variants=(plan.main, Variant(tuple(lanes), parts)))


def _alone_on(problem: Problem, plan: Plan, worker: int, lane: int) -> Assignment:
    predicted_ns = problem.times(worker, [plan.units(lane)]).sum()
    return Assignment(worker, (Group(lane, plan.workers[worker].kernels, round(predicted_ns)),))


def _whole_lane(plan: Plan, worker: int) -> int | None:
    for index, lane in enumerate(plan.lanes):
        if lane.owner == worker and lane.mask == plan.topology.full:
            return index
    return None
