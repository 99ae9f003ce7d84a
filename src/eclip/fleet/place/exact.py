"""The exact optimum of small fleets: every set that keeps its bounds, then HiGHS.

All sets of instances that one GPU holds are found by simulation. A set is not simulated if a part
of it clearly misses a bound, or if a set that contains it keeps all: fewer requests are never
worse. A p99 of a few hundred requests is not exact, so a set that misses by little says nothing of
larger ones. An integer programme then chooses how many GPUs of each group take which set. HiGHS is
heavy and optional (the extra ``fleet``), so it is imported when it is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from eclip.errors import StoppedError, UsageError
from eclip.fleet.place.problem import Bin, Held, Packing, PackingProblem
from eclip.fleet.place.scores import CLEARLY
from eclip.progress import Progress

MOST_SERVICES = 12
_MOST_SETS = 200_000
_LOOK_S = 0.1  # between two looks for a stop request


@dataclass(frozen=True)
class FeasibleSet:
    kind: str
    held: Held


def solve(problem: PackingProblem, progress: Progress | None = None) -> Packing:
    """The best packing there is, by the simulator's scores."""
    if len(problem.fleet.services) > MOST_SERVICES:
        raise UsageError(
            f"the exact optimum is for at most {MOST_SERVICES} services, not "
            f"{len(problem.fleet.services)}; place it by search instead"
        )
    sets = [
        found for kind in problem.fleet.kinds for found in feasible_sets(problem, kind, progress)
    ]
    if progress is not None and progress.stopped:
        raise StoppedError("stopped before all sets were known, so nothing is proven")
    return _choose(problem, sets, progress or Progress())


def feasible_sets(
    problem: PackingProblem, kind: str, progress: Progress | None = None
) -> Iterator[FeasibleSet]:
    """Every set that keeps its bounds on this kind, the empty one left out."""
    services = len(problem.fleet.services)
    most = [parts // least for parts, least in zip(problem.parts, problem.least, strict=True)]
    kept: list[tuple[int, ...]] = []
    hopeless: list[tuple[int, ...]] = []
    count = 0
    # Depth first, each service from most parts to none: large sets come first and settle others.
    stack: list[tuple[int, ...]] = [()]
    while stack:
        head = stack.pop()
        if len(head) == services:
            if any(head) and _keeps(problem, kind, head, kept):
                count += 1
                if count > _MOST_SETS:
                    raise UsageError(
                        "too many sets fit a GPU for an exact optimum; place it by search instead"
                    )
                yield FeasibleSet(kind, _held(head))
            continue
        for parts in range(most[len(head)] + 1):
            longer = (*head, parts)
            whole = longer + (0,) * (services - len(longer))
            if parts == 0 or not _is_hopeless(problem, kind, whole, hopeless):
                stack.append(longer)
        if progress is not None and progress.stopped:
            return


def _keeps(
    problem: PackingProblem, kind: str, parts: tuple[int, ...], kept: list[tuple[int, ...]]
) -> bool:
    if any(_within(parts, other) for other in kept):
        return True
    keeps = problem.scorer.score(kind, problem.members(_held(parts))).kept
    if keeps:
        kept.append(parts)
    return keeps


def _is_hopeless(
    problem: PackingProblem, kind: str, parts: tuple[int, ...], hopeless: list[tuple[int, ...]]
) -> bool:
    """Whether it and every set that contains it surely miss a bound."""
    if any(_within(other, parts) for other in hopeless):
        return True
    misses = problem.scorer.estimate(kind, problem.members(_held(parts))) > CLEARLY
    if misses:
        hopeless.append(parts)
    return misses


def _within(less: tuple[int, ...], more: tuple[int, ...]) -> bool:
    return all(one <= two for one, two in zip(less, more, strict=True))


def _held(parts: tuple[int, ...]) -> Held:
    return {service: count for service, count in enumerate(parts) if count}


def _run(solver: Any, progress: Progress) -> None:
    """Solve in a thread of the solver, so that a stop request is heard meanwhile."""
    solver.HandleUserInterrupt = True
    solver.startSolve()
    while not solver.wait(_LOOK_S)[0]:
        if progress.stopped:
            solver.cancelSolve()  # it ends at its next callback
    if progress.stopped:
        raise StoppedError("stopped before the solver had ended, so nothing is proven")


def _choose(problem: PackingProblem, sets: list[FeasibleSet], progress: Progress) -> Packing:
    """Columns: how often a group of GPUs takes a set; for goodput, then the parts served."""
    try:
        import highspy
    except ImportError:
        raise UsageError("the exact optimum needs HiGHS: pip install 'eclip[fleet]'") from None
    fleet = problem.fleet
    columns = [(one, group) for group in fleet.gpus for one in sets if one.kind == group.kind]
    goodput = problem.objective == "goodput"
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("mip_rel_gap", 1e-9)
    solver.setOptionValue("mip_abs_gap", 1e-6)
    taken = [
        solver.addIntegral(
            0, group.count, 0.0 if goodput else problem.cost(Bin(one.kind, one.held))
        )
        for one, group in columns
    ]
    for group in fleet.gpus:
        mine = [var for var, (_, where) in zip(taken, columns, strict=True) if where is group]
        solver.addConstr(solver.qsum(mine) <= group.count)
    machines = {group.machine for group in fleet.gpus}
    for service, parts in enumerate(problem.parts):
        holding = [
            (var, one.held[service], group.machine)
            for var, (one, group) in zip(taken, columns, strict=True)
            if service in one.held
        ]
        placed = solver.qsum([held * var for var, held, _ in holding])
        if goodput:
            worth = problem.value({service: 1})
            served = solver.addIntegral(0, parts, -worth)
            solver.addConstr(served - placed <= 0)
        else:
            solver.addConstr(placed >= parts)
        if problem.least[service] > 1 and len(machines) > 1:
            for machine in machines:
                inside = [held * var for var, held, where in holding if where == machine]
                if inside:
                    solver.addConstr(solver.qsum(inside) <= parts - 1)
    _run(solver, progress)
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        raise UsageError(
            f"the fleet's {fleet.count} GPUs do not hold all services within their bounds; add "
            f"GPUs, or take a smaller reserve ({fleet.reserve:g} now) or the objective goodput"
        )
    counts = np.rint(solver.getSolution().col_value[: len(columns)]).astype(int)
    left = problem.instances()
    bins = []
    for (one, group), count in zip(columns, counts.tolist(), strict=True):
        for _ in range(count):
            held: Held = {}
            for service, parts in one.held.items():  # no more than there is
                if fitting := min(parts, left.get(service, 0)):
                    held[service] = fitting
                    left[service] -= fitting
            if held:
                bins.append(Bin(group.kind, held))
    return Packing(bins, {service: parts for service, parts in left.items() if parts})
