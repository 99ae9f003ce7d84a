"""A service that is always busy, as a decode loop is: its next request comes as the last one ends.

Background that only yields would get nothing beside it. What lanes and moves leave it, and what
that costs a request, is measured as in measuring.py: all ways are open at once and run in turns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from lab.support import sharing
from lab.support.contenders import Scene
from lab.support.effort import Task
from lab.support.entrants import Entrant, Opening
from lab.support.measuring import mix_of_pair, reference_of
from lab.support.pairs import PAIRS
from lab.support.workshop import Bench, KeptStand

from eclip.core.device import Window
from eclip.core.load import closed_loop
from eclip.core.runlog import RunLog
from eclip.planner.case import Case
from eclip.rig.rounds import rotation

SERVICE, BACKGROUND = 0, 1


def run_always_busy(bench: Bench, task: Task) -> None:
    """A row for every way: a service and background, both back to back."""
    models = PAIRS[task.pair].models
    with contextlib.ExitStack() as stack:
        profiles = tuple(bench.profile(model, index) for index, model in enumerate(models))
        mix = mix_of_pair([one.model for one in profiles], profiles, task.floor)
        case = Case(mix, bench.shelf.topology, bench.shelf.calibration, profiles)
        scene = Scene(mix, bench.shelf.topology, profiles, bench.grain_ns)
        stand = KeptStand(case, bench.device, bench.made)
        entrants = Opening(bench, task, scene, stand, stack).all()
        if entrants:
            for row in _rows(entrants, task):
                bench.keep(
                    {"stage": task.stage, "pair": task.pair, "device": bench.device.title, **row}
                )


def _rows(entrants: Sequence[Entrant], task: Task) -> list[dict[str, Any]]:
    window = Window(task.effort.most_s, task.effort.warmup_s, trace_ms=0.0)
    reference = reference_of(entrants)
    jobs = [(reference, SERVICE), (reference, BACKGROUND), *((one, None) for one in entrants)]
    logs: list[list[RunLog]] = [[] for _ in jobs]
    for _, job in rotation(len(jobs), task.effort.rounds):
        entrant, only = jobs[job]
        logs[job].append(entrant.session.run(closed_loop(2, only=only), window))
    alone, background_alone, *shared = logs
    alone_ns = _took_ns(alone)
    rows = []
    for entrant, mine in zip(entrants, shared, strict=True):
        ours_ns = _took_ns(mine)
        p50, p99 = np.percentile(ours_ns, [50, 99]) / np.percentile(alone_ns, [50, 99])
        rate, rate_alone = (sharing.rate_of(each, BACKGROUND) for each in (mine, background_alone))
        rows.append(
            {
                "way": entrant.name,
                "requests": len(ours_ns),
                "latency_alone": sharing.percentiles_ms(alone_ns),
                "latency": sharing.percentiles_ms(ours_ns),
                "p50_ratio": float(p50),
                "p99_ratio": float(p99),
                "background_part": rate / rate_alone,
            }
        )
    return rows


def _took_ns(logs: Sequence[RunLog]) -> sharing.Values:
    """Of the service's requests."""
    parts = []
    for log in logs:
        mine = np.array(log.requests.worker, dtype=np.int64) == SERVICE
        start, end = (
            np.array(column, dtype=np.float64)[mine]
            for column in (log.requests.start_ns, log.requests.end_ns)
        )
        parts.append(end - start)
    return np.concatenate(parts)
