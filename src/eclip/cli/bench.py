"""``eclip bench``: how fast solver and simulator are here, and what lanes cost on a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated

import msgspec
import numpy as np
import typer

from eclip.artefacts import store
from eclip.artefacts.calibration import Calibration
from eclip.artefacts.topology import Topology
from eclip.cli import screen
from eclip.cli.options import GpuOption, JsonOption
from eclip.errors import unknown_name
from eclip.frontends.synthetic import synthetic_profile

_REPEATS = 5


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One claim: the median of the repeats, their range, and the target it is held to."""

    what: str
    median: float
    lowest: float
    highest: float
    unit: str
    target: str
    met: bool


def bench(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[WHAT]",
            help="solver, simulator, search (all if left out), or device: a GPU's lanes.",
        ),
    ] = None,
    gpu: GpuOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Measure solver, simulator and search on this machine, or a GPU's lanes."""
    if what == "device":
        _bench_device(gpu, as_json)
        return
    if what is not None and what not in BENCHES:
        raise unknown_name("bench", what, [*BENCHES, "device"])
    figures = []
    with screen.progress_bar("measuring") as progress:
        wanted = [what] if what else list(BENCHES)
        for index, name in enumerate(wanted):
            figures += BENCHES[name]()
            progress((index + 1) / len(wanted))
    if as_json:
        screen.print_json(figures)
        return
    screen.print_table(
        f"This machine, one core, median of {_REPEATS}",
        ["claim", "median", "range", "unit", "target", "met"],
        (
            [
                figure.what,
                f"{figure.median:.3g}",
                f"{figure.lowest:.3g} to {figure.highest:.3g}",
                figure.unit,
                figure.target,
                "yes" if figure.met else "NO",
            ]
            for figure in figures
        ),
    )


def _bench_device(gpu: int, as_json: bool) -> None:
    from eclip.devices.cuda.characterise import characterise

    with screen.progress_bar(f"characterising GPU {gpu}") as progress:
        figures = characterise(gpu, progress)
    if as_json:
        screen.print_json(figures)
        return
    for table in dict.fromkeys(figure.table for figure in figures):
        mine = [figure for figure in figures if figure.table == table]
        columns = list(dict.fromkeys(figure.column for figure in mine))
        value = {(figure.row, figure.column): figure for figure in mine}
        screen.print_table(
            table,
            ["", *(f"{column} ({value[mine[0].row, column].unit})" for column in columns)],
            (
                [row, *(f"{value[row, column].value:.2f}" for column in columns)]
                for row in dict.fromkeys(figure.row for figure in mine)
            ),
        )


def bench_solver() -> list[Figure]:
    from eclip.planning.exact import allocate

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
        figures.append(_figure(name, solve, "s", f"≤ {limit_s:g}", limit_s.__ge__))
    return figures


def bench_search() -> list[Figure]:
    """What one candidate of a search costs: exact planning, the plan, its simulation."""
    from eclip.artefacts.mix import mix_of
    from eclip.lab.evaluate import Evaluator
    from eclip.planning.problem import Problem
    from eclip.planning.search.placement import Home, Placer

    device = store.load_builtin(Topology, "h200")
    calibration = store.load_builtin(Calibration, "h200")

    def candidate(workers: int, kernels: int) -> Callable[[], float]:
        profiles = tuple(
            synthetic_profile(seed, kernels, device, name=f"m{seed}") for seed in range(workers)
        )
        mix = mix_of((profile.trace.model, profile.trace.batch) for profile in profiles)
        problem = Problem(mix, device, profiles)
        evaluate = Evaluator(device, profiles, calibration)
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
        _figure(
            "search, one candidate, 2 workers × 500 kernels", small, "s", "≤ 0.05", (0.05).__ge__
        ),
        _figure("search, one candidate, 8 workers × 2000 kernels", large, "s", "≤ 1", (1.0).__ge__),
        _figure(
            "search, cost per worker and kernel, large over small",
            lambda: large() / small() / growth,
            "×",
            "≤ 1.2",
            (1.2).__ge__,
        ),
    ]


def bench_simulator() -> list[Figure]:
    from eclip.artefacts.mix import mix_of
    from eclip.devices.base import Window
    from eclip.devices.load import CLOSED_LOOP, Load
    from eclip.devices.sim.device import SimDevice
    from eclip.planning.policies import make_plan
    from eclip.planning.problem import Problem
    from eclip.runtime.program import lower

    device = store.load_builtin(Topology, "h200")
    models = [(f"model{index}", 300 + 100 * index) for index in range(4)]
    profiles = tuple(
        synthetic_profile(seed, kernels, device, name=name)
        for seed, (name, kernels) in enumerate(models)
    )
    problem = Problem(mix_of((name, 1) for name, _ in models), device, profiles)
    load = Load(label="closed loop", seed=0, arrivals=(CLOSED_LOOP,) * 4)
    simulator = SimDevice(device, store.load_builtin(Calibration, "h200"))

    def rate(policy: str, seconds: float) -> float:
        program = lower(make_plan(policy, problem), [profile.trace for profile in profiles])
        window = Window(seconds=seconds, warmup_seconds=0.0, trace_ms=20.0)
        with simulator.open(program, profiles) as session:
            started = time.perf_counter()
            log = session.run(load, window, [1.0] * 4)
            elapsed = time.perf_counter() - started
        return sum(counters.kernels for counters in log.counters) / elapsed / 1e6

    figures = [
        _figure(
            f"simulator, 4 workers, {policy}",
            partial(rate, policy, 2.0),
            "M kernels/s",
            "≥ 1",
            lambda millions: millions >= 1.0,
        )
        for policy in ("shared", "model", "kernel", "eclip")
    ]
    figures.append(
        _figure(
            "simulator, cost per kernel of a run 10× as long",
            lambda: rate("eclip", 0.5) / rate("eclip", 5.0),
            "×",
            "≤ 1.2",
            lambda factor: factor <= 1.2,
        )
    )
    return figures


def _figure(
    what: str, measure: Callable[[], float], unit: str, target: str, meets: Callable[[float], bool]
) -> Figure:
    measure()  # compile, and warm the caches
    values = [measure() for _ in range(_REPEATS)]
    median = statistics.median(values)
    return Figure(
        what=what,
        median=median,
        lowest=min(values),
        highest=max(values),
        unit=unit,
        target=target,
        met=meets(median),
    )


BENCHES: dict[str, Callable[[], list[Figure]]] = {
    "solver": bench_solver,
    "simulator": bench_simulator,
    "search": bench_search,
}
