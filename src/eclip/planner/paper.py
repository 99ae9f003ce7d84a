"""The ``eclip`` policy: the ECLIP paper's optimizer on the paper's pool of lanes.

All workers weigh the same; β is the profiled time, α the mix's average sizes over all units; at
most ``switch_max`` switches per request and worker (the paper chose 14 by profiling).
"""

from __future__ import annotations

import numpy as np

from eclip.core.plan import Plan
from eclip.planner.exact import allocate, count_switches
from eclip.planner.pool import build_pool
from eclip.planner.problem import Problem

DEFAULT_SWITCH_MAX = 14


def plan_as_the_paper(problem: Problem, switch_max: int) -> Plan:
    pool = build_pool(problem.topology, len(problem.profiles))
    times = [problem.times(worker, pool.sizes) for worker in range(len(problem.profiles))]
    best = allocate(times, pool.sizes, problem.topology.units, switch_max)
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
