"""Which placements of a mix are measured to fit the simulator, and measuring one on a device.

The placements of a mix are one endless seeded sequence without repeats, so a measurement that was
interrupted goes on with those it has not seen yet.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from eclip.core.device import Window
from eclip.core.load import closed_loop
from eclip.core.measures import steady_rates
from eclip.files.observations import ObservedHome, ObservedRun
from eclip.planner.search.placement import Placer, groups_of
from eclip.rig.rig import Rig
from eclip.tune.fit import plan_of

ObservedHomes = tuple[ObservedHome, ...]

WINDOW = Window(seconds=0.45, warmup_seconds=0.05, trace_ms=0.0)
# One in five has several lanes per worker: they are not fitted yet, only compared with.
_KINDS = ("split", "static", "split", "static", "lanes")
_PRICES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
_SWITCH_MAX = 14
_TRIES = 200  # in a row that were all known: there are no more


def placements(workers: int, slices: int, seed: int) -> Iterator[tuple[str, ObservedHomes]]:
    """Kind and homes: plain streams first, then at random.

    ``split``: disjoint masks that fill the device; ``static``: one mask each, which may overlap;
    ``lanes``: as static, with several lanes to choose from and switches between them.
    """
    yield "shared", ()
    random = np.random.default_rng([seed, workers, slices])
    known: set[ObservedHomes] = set()
    tries = 0
    for kind in itertools.cycle(_KINDS):
        if kind == "split" and workers > slices:
            continue
        homes = (
            _split(random, workers, slices) if kind == "split" else _draw(random, workers, slices)
        )
        if kind == "lanes":
            homes = tuple(
                ObservedHome(h.first, h.step, h.most, float(random.choice(_PRICES)), _SWITCH_MAX)
                for h in homes
            )
        tries += 1
        if homes not in known:
            known.add(homes)
            tries = 0
            yield kind, homes
        elif tries > _TRIES:
            return


def _split(random: np.random.Generator, workers: int, slices: int) -> ObservedHomes:
    cuts = np.sort(random.choice(slices - 1, workers - 1, replace=False)) + 1
    borders = [0, *cuts.tolist(), slices]
    return tuple(ObservedHome(a, 1, b - a) for a, b in itertools.pairwise(borders))


def _draw(random: np.random.Generator, workers: int, slices: int) -> ObservedHomes:
    """At least an equal share each, from either end, evenly spread, or from anywhere."""
    homes = []
    for worker in range(workers):
        most = int(random.integers(max(1, slices // workers), slices + 1))
        ends, spread = worker % 2 * (slices - 1), worker * slices // workers
        first = int(random.choice([ends, spread, int(random.integers(slices))]))
        homes.append(ObservedHome(first, 1 if first < slices // 2 else -1, most))
    return tuple(homes)


def observe(rig: Rig, placer: Placer, kind: str, homes: ObservedHomes) -> ObservedRun | None:
    """Run the placement for a moment; None if a worker completed too little to tell its rate."""
    plan = plan_of(kind, homes, placer)
    log = rig.run_once(plan, closed_loop(len(plan.workers)), WINDOW)
    rates = steady_rates(log)
    if min(rates) == 0:
        return None
    return ObservedRun(
        mix=placer.problem.mix.name,
        kind=kind,
        homes=homes,
        routes=groups_of(plan) if homes else (),
        alone_rps=log.alone_rps,
        rates_rps=rates,
        power_w=log.energy_uj * 1e3 / log.duration_ns,
        seconds=WINDOW.seconds,
    )
