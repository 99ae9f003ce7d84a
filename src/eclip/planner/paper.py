"""The ``eclip`` policy: the ECLIP paper's optimizer on the paper's pool of lanes.

All workers weigh the same; β is the profiled time, α the mix's average sizes over all units; at
most ``switch_max`` switches per request and worker (the paper chose 14 by profiling). The paper's
integer programme is imported when it is asked for: HiGHS is heavy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eclip.core.plan import Plan
from eclip.core.profile import Times
from eclip.errors import UsageError
from eclip.planner.exact import Allocation, allocate, count_switches
from eclip.planner.pool import build_pool
from eclip.planner.problem import Problem

DEFAULT_SWITCH_MAX = 14


def plan_as_the_paper(problem: Problem, switch_max: int, solver: str = "exact") -> Plan:
    pool = build_pool(problem.topology, len(problem.profiles))
    times = [problem.times(worker, pool.sizes) for worker in range(len(problem.profiles))]
    solve = allocate if solver == "exact" else _allocate_by_highs
    best = solve(times, pool.sizes, problem.topology.units, switch_max)
    unit = problem.topology.unit_name
    whys = []
    for table, choice in zip(times, best.choices, strict=True):
        average = float(np.array(pool.sizes)[choice].mean())
        time_ns = float(table[np.arange(len(table)), choice].sum())
        whys.append(
            f"{average:.1f} {unit}s on average, {count_switches(choice)} of at most {switch_max} "
            f"switches; {time_ns / float(table[:, -1].sum()):.2f}× as long as on all units"
        )
    return problem.plan(
        policy="eclip",
        lanes=pool.lanes,
        choices=[
            np.array(pool.lane_of[worker])[choice] for worker, choice in enumerate(best.choices)
        ],
        whys=whys,
        why=(
            f"proven optimum of (1 + α)·T = {best.objective / 1e6:.3f} ms, where α = "
            f"{best.alpha:.3f} and T = {best.total_ns / 1e6:.3f} ms; sizes offered: "
            f"{', '.join(map(str, pool.sizes))}"
        ),
    )


def _allocate_by_highs(
    times: Sequence[Times], sizes: Sequence[int], units: int, switch_max: int
) -> Allocation:
    """The same optimum by the paper's integer programme."""
    try:
        from eclip.planner.ilp import allocate_by_ilp
    except ModuleNotFoundError:
        raise UsageError(
            "--solver highs needs the package highspy; install it: pip install 'highspy<1.15'"
        ) from None
    choices, objective = allocate_by_ilp(times, sizes, units, switch_max)
    pairs = list(zip(times, choices, strict=True))
    return Allocation(
        choices=choices,
        alpha=sum(float(np.array(sizes)[choice].mean()) for _, choice in pairs) / units,
        total_ns=sum(float(table[np.arange(len(table)), choice].sum()) for table, choice in pairs),
        objective=objective,
        prices=0,
    )
