"""A service that is always busy, as a decode loop is: its next request comes as the last one ends.

Background that only yields gets nothing beside it. What lanes, moves and MPS leave it, and what
that costs a request, is measured with all sessions open at once, in turns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from lab.support.contenders import plan_of
from lab.support.kept import Row
from lab.support.stages import WARMUP_S, Part
from lab.support.workshop import Bench, KeptRig

from eclip.core.device import Session, Window
from eclip.core.load import closed_loop
from eclip.core.runlog import RunLog
from eclip.errors import EclipError
from eclip.planner.case import Case
from eclip.rig.rounds import rotation

SERVICE, BACKGROUND = 0, 1
ALONE = "shared"  # where both are alone
FOR_PLANS = 0.5  # of what the service can serve: plans are made for a rate


def run_always_busy(bench: Bench, part: Part) -> None:
    """A row for every way: a service and background, both back to back."""
    shelf = bench.shelf
    profiles = tuple(bench.profile(model, index) for index, model in enumerate(part.models))
    mix = replace(part, load=FOR_PLANS).mix(shelf)
    case = Case(mix, shelf.topology, shelf.calibration, profiles, usual_kernels=True)
    rig = KeptRig(case, bench.device, bench.made)
    with contextlib.ExitStack() as stack:
        sessions: dict[str, Session] = {}
        for name in dict.fromkeys((ALONE, *part.contenders)):
            try:
                sessions[name] = stack.enter_context(rig.open(plan_of(name, case)))
            except EclipError as error:
                bench.keep({"part": part.name, "stage": part.stage, "error": f"{name}: {error}"})
        for row in _rows(sessions, part):
            bench.keep(
                {
                    "part": part.name,
                    "stage": part.stage,
                    "pair": part.pair,
                    "device": bench.device.title,
                    **row,
                }
            )


def _rows(sessions: dict[str, Session], part: Part) -> list[Row]:
    window = Window(part.most_s, WARMUP_S, trace_ms=0.0)
    jobs: list[tuple[str, int | None]] = [(ALONE, SERVICE), (ALONE, BACKGROUND)]
    jobs += [(name, None) for name in sessions]
    logs: list[list[RunLog]] = [[] for _ in jobs]
    for _, job in rotation(len(jobs), part.rounds):
        name, only = jobs[job]
        logs[job].append(sessions[name].run(closed_loop(2, only=only), window))
    alone, background_alone, *shared = logs
    rows = []
    for name, mine in zip(sessions, shared, strict=True):
        ours, base = (np.percentile(_took_ms(each), (50, 99)) for each in (mine, alone))
        rows.append(
            {
                "way": name,
                "requests": len(_took_ms(mine)),
                "p99_ms": float(ours[1]),
                "alone_p99_ms": float(base[1]),
                "p50_ratio": float(ours[0] / base[0]),
                "p99_ratio": float(ours[1] / base[1]),
                "background": _count(mine) / _count(background_alone),
            }
        )
    return rows


def _took_ms(logs: Sequence[RunLog]) -> npt.NDArray[np.float64]:
    """Of the service's requests."""
    parts = []
    for log in logs:
        mine = np.array(log.requests.worker, dtype=np.int64) == SERVICE
        start, end = (
            np.array(column, dtype=np.float64)[mine]
            for column in (log.requests.start_ns, log.requests.end_ns)
        )
        parts.append((end - start) / 1e6)
    return np.concatenate(parts)


def _count(logs: Sequence[RunLog]) -> int:
    """Of the background's requests, in as many runs of the same length."""
    return sum(log.requests.worker.count(BACKGROUND) for log in logs)
