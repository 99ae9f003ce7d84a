"""Speed: how fast the solver, the simulator and the search are on this machine.

Every claim is the median of several repeats, held to a target.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np

from eclip.core.calibration import Calibration
from eclip.core.device import Window
from eclip.core.load import closed_loop
from eclip.core.mix import mix_of
from eclip.core.program import lower
from eclip.core.topology import Topology
from eclip.files import store
from eclip.models.synthetic import synthetic_profile
from eclip.planner.evaluate import SimEvaluator
from eclip.planner.exact import allocate
from eclip.planner.policies import make_plan
from eclip.planner.problem import Problem
from eclip.planner.search.placement import Home, Placer
from eclip.sim.device import SimDevice

REPEATS = 5


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """The median of the repeats, their range, and the target it is held to."""

    what: str
    median: float
    lowest: float
    highest: float
    unit: str
    target: str
    met: bool


def bench_solver() -> list[Claim]:
    figures = []
    for workers, kernels, count, limit_s in ((3, 300, 4, 0.5), (2, 1100, 16, 3.0)):
        sizes = [8 * (index + 1) for index in range(count)]
        device = Topology(
            name="bench",
            title="bench",
            unit_name="unit",
            compute="",
            slice_units=(8,) * count,
            lane_sizes=tuple(sizes),
            hardware_queues=32,
            memory_bytes=1 << 40,
            context_bytes=0,
            lane_bytes=0,
            source="",
        )
        times = []
        for seed in range(workers):
            profile = synthetic_profile(seed, kernels, device)
            times.append(np.array(profile.busy_ns, float) + np.array(profile.gap_ns, float))

        def solve(times: list[np.ndarray] = times, sizes: list[int] = sizes) -> float:
            started = time.perf_counter()
            allocate(times, sizes, sizes[-1], switch_max=14)
            return time.perf_counter() - started

        name = f"joint optimum, {workers} workers × {kernels} kernels × {count} sizes"
        figures.append(_claim(name, solve, "s", f"≤ {limit_s:g}", limit_s.__ge__))
    return figures


def bench_search() -> list[Claim]:
    """The time for one candidate of a search: exact planning, the plan, its simulation."""
    device = store.load_builtin("h200", Topology)
    calibration = store.load_builtin("h200", Calibration)

    def candidate(workers: int, kernels: int) -> Callable[[], float]:
        profiles = tuple(
            synthetic_profile(seed, kernels, device, name=f"m{seed}") for seed in range(workers)
        )
        mix = mix_of(profile.model for profile in profiles)
        problem = Problem(mix, device, profiles)
        evaluate = SimEvaluator(device, profiles, calibration)
        homes = [Home(2 * worker, 1, 12, 0.5, 14) for worker in range(workers)]

        def once() -> float:
            started = time.perf_counter()
            evaluate([Placer(problem).plan(homes, "search", "")])
            return time.perf_counter() - started

        once()
        return once

    small, large = candidate(2, 500), candidate(8, 2000)
    growth = (8 * 2000) / (2 * 500)
    return [
        _claim(
            "search, one candidate, 2 workers × 500 kernels", small, "s", "≤ 0.05", (0.05).__ge__
        ),
        _claim("search, one candidate, 8 workers × 2000 kernels", large, "s", "≤ 1", (1.0).__ge__),
        _claim(
            "search, cost per worker and kernel, large over small",
            lambda: large() / small() / growth,
            "×",
            "≤ 1.2",
            (1.2).__ge__,
        ),
    ]


def bench_simulator() -> list[Claim]:
    device = store.load_builtin("h200", Topology)
    models = [(f"model{index}", 300 + 100 * index) for index in range(4)]
    profiles = tuple(
        synthetic_profile(seed, kernels, device, name=name)
        for seed, (name, kernels) in enumerate(models)
    )
    problem = Problem(mix_of(profile.model for profile in profiles), device, profiles)
    load = closed_loop(4)
    simulator = SimDevice(device, store.load_builtin("h200", Calibration))

    def rate(policy: str, seconds: float) -> float:
        program = lower(make_plan(policy, problem), [profile.trace for profile in profiles])
        window = Window(seconds=seconds, warmup_seconds=0.0, trace_ms=20.0)
        with simulator.open(program, profiles) as session:
            started = time.perf_counter()
            log = session.run(load, window)
            elapsed = time.perf_counter() - started
        return sum(counters.kernels for counters in log.counters) / elapsed / 1e6

    figures = [
        _claim(
            f"simulator, 4 workers, {policy}",
            partial(rate, policy, 2.0),
            "M kernels/s",
            "≥ 1",
            lambda millions: millions >= 1.0,
        )
        for policy in ("shared", "model", "kernel", "eclip")
    ]
    figures.append(
        _claim(
            "simulator, cost per kernel of a run 10× as long",
            lambda: rate("eclip", 0.5) / rate("eclip", 5.0),
            "×",
            "≤ 1.2",
            lambda factor: factor <= 1.2,
        )
    )
    return figures


def _claim(
    what: str, measure: Callable[[], float], unit: str, target: str, meets: Callable[[float], bool]
) -> Claim:
    measure()  # compile, and warm the caches
    values = [measure() for _ in range(REPEATS)]
    median = statistics.median(values)
    return Claim(
        what=what,
        median=median,
        lowest=min(values),
        highest=max(values),
        unit=unit,
        target=target,
        met=meets(median),
    )


BENCHES: dict[str, Callable[[], list[Claim]]] = {
    "solver": bench_solver,
    "simulator": bench_simulator,
    "search": bench_search,
}
