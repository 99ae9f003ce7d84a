"""From what ran on a GPU to the columns of a run log.

Kernels come from a tracer, which knows executables; ``Placed`` says which kernels of which worker
an executable holds. Within one launch kernels are told apart by their start, since a worker's
kernels are a chain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from eclip.core.device import Window
from eclip.core.load import Load
from eclip.core.plan import Plan
from eclip.core.program import Route
from eclip.core.requests import (
    ARRIVAL,
    BARRIERS,
    END,
    MOVES,
    PAUSE_NS,
    START,
    VERDICT,
    YIELDS,
    Ints,
)
from eclip.core.runlog import (
    MOST_LAG_NS,
    KernelRecords,
    Prepared,
    Requests,
    RunLog,
    WorkerCounters,
)
from eclip.errors import TracingError

_ENERGY_SECONDS = 3.0  # that a figure to report needs

NO_KERNELS = KernelRecords(
    window_ns=0, worker=(), position=(), lane=(), start_ns=(), end_ns=(), own_run=True
)


class Span(NamedTuple):
    """One kernel. A launch is one call; all kernels of a graph's launch share it."""

    start_ns: int
    end_ns: int
    executable: int  # the tracer's id of the graph's executable; 0: not launched by a graph
    launch: int


@dataclass(frozen=True)
class Placed:
    """What an executable launches: these consecutive kernels of a worker, on its route's lanes."""

    route: Route
    kernels: range


def record_kernels(
    spans: Sequence[Span], placed: Mapping[int, Placed], zero_ns: int, window_ns: int
) -> KernelRecords:
    """The kernels that ended in the window after ``zero_ns``; ``placed`` by the executable's id."""
    rows = []
    ours = sorted((span for span in spans if span.executable in placed), key=_by_launch)
    for (_, executable), launch in groupby(ours, attrgetter("launch", "executable")):
        part = placed[executable]
        ran = list(launch)
        if len(ran) != len(part.kernels):
            raise TracingError(
                f"CUPTI recorded {len(ran)} of the {len(part.kernels)} kernels of a launch; "
                f"trace a shorter time, or nothing (0 ms)"
            )
        rows += [
            (
                span.end_ns - zero_ns,
                part.route.worker,
                position,
                int(part.route.lane[position]),
                span.start_ns - zero_ns,
            )
            for position, span in zip(part.kernels, ran, strict=True)
        ]
    rows = sorted(row for row in rows if 0 <= row[0] < window_ns)
    return KernelRecords(
        window_ns=window_ns,
        worker=tuple(row[1] for row in rows),
        position=tuple(row[2] for row in rows),
        lane=tuple(row[3] for row in rows),
        start_ns=tuple(row[4] for row in rows),
        end_ns=tuple(row[0] for row in rows),
        own_run=True,
    )


def _by_launch(span: Span) -> tuple[int, int, int]:
    return span.launch, span.executable, span.start_ns


def window_warnings(window: Window) -> list[str]:
    """What a run this long will not measure well."""
    if window.seconds >= _ENERGY_SECONDS:
        return []
    return [
        f"energy is measured over {window.seconds:g} s; a figure to report needs at least "
        f"{_ENERGY_SECONDS:g} s"
    ]


def make_log(
    plan: Plan,
    device: str,
    load: Load,
    served: Sequence[Ints],  # per worker: a row a request; time 0 is where measuring began
    launched: Sequence[int],  # per worker: kernels of a request
    kernels: KernelRecords,
    duration_ns: int,
    power: float | None,  # None: there is nothing to measure it with
    warnings: Sequence[str],
    prepared: Prepared | None = None,
) -> RunLog:
    """The log of a measured run, in one process or several."""
    requests, unfinished = record_requests(served, load, duration_ns)
    if not plan.has_accounts:
        requests = msgspec.structs.replace(requests, verdict=())
    lag_ns = lags_ns(served)
    short = "the run was too short for the energy counter: no energy was measured"
    return RunLog(
        plan=plan,
        device=device,
        modelled=False,
        load=load.label,
        seed=load.seed,
        duration_ns=duration_ns,
        energy_uj=round((power or 0.0) * duration_ns / 1e3),
        requests=requests,
        kernels=kernels,
        counters=tuple(
            _counters(rows[_inside(rows, duration_ns)], count)
            for rows, count in zip(served, launched, strict=True)
        ),
        unfinished=unfinished,
        offered=load.offered(duration_ns),
        lag_ns=lag_ns,
        prepared=prepared,
        warnings=(
            *warnings,
            *([short] if power == 0.0 else []),
            *_lag_warnings(plan, lag_ns),
        ),
    )


def since(rows: Ints, zero_ns: int) -> Ints:
    """Served requests with their times counted from then."""
    moved = rows.copy()
    moved[:, [ARRIVAL, START, END]] -= zero_ns
    return moved


def _inside(rows: Ints, duration_ns: int) -> npt.NDArray[np.bool_]:
    """Which requests ended in the measured part."""
    return (rows[:, END] >= 0) & (rows[:, END] < duration_ns)


def _counters(rows: Ints, kernels: int) -> WorkerCounters:
    return WorkerCounters(
        kernels=len(rows) * kernels,
        barriers=int(rows[:, BARRIERS].sum()),
        lane_waits=None,
        false_waits=None,
        false_wait_ns=None,
        yields=int(rows[:, YIELDS].sum()),
        moves=int(rows[:, MOVES].sum()),
        longest_pause_ns=int(rows[:, PAUSE_NS].max(initial=0)),
    )


def lags_ns(served: Sequence[Ints]) -> tuple[int, ...]:
    """Per worker: the longest time from when a request could begin (it had arrived, and the one
    before it was done) to when the loop began it. It is the host's, not the policy's."""
    lags = []
    for rows in served:
        could = np.maximum(rows[1:, ARRIVAL], rows[:-1, END])
        lags.append(int((rows[1:, START] - could).max(initial=0)))
    return tuple(lags)


def _lag_warnings(plan: Plan, lag_ns: Sequence[int]) -> list[str]:
    late = [
        f"{worker.name} {lag / 1e6:.1f} ms"
        for worker, lag in zip(plan.workers, lag_ns, strict=True)
        if lag > MOST_LAG_NS
    ]
    if not late:
        return []
    return [f"the load generator lagged ({', '.join(late)}): the host was busy; run again"]


def record_requests(
    served: Sequence[Ints], load: Load, duration_ns: int
) -> tuple[Requests, tuple[int, ...]]:
    """Requests that ended in the measured part, and how many of each worker's did not."""
    rows = []
    unfinished = []
    for worker, (spans, arrivals) in enumerate(zip(served, load.arrivals, strict=True)):
        inside = spans[_inside(spans, duration_ns)][:, [ARRIVAL, START, END, VERDICT]].tolist()
        rows += [(end, worker, arrival, start, verdict) for arrival, start, end, verdict in inside]
        late = int(np.count_nonzero(spans[:, END] >= duration_ns))
        waiting = (
            0 if arrivals is None else int(np.count_nonzero(arrivals < duration_ns)) - len(spans)
        )
        unfinished.append(late + waiting)
    rows.sort()
    requests = Requests(
        worker=tuple(row[1] for row in rows),
        arrival_ns=tuple(row[2] for row in rows),
        start_ns=tuple(row[3] for row in rows),
        end_ns=tuple(row[0] for row in rows),
        verdict=tuple(row[4] for row in rows),
    )
    return requests, tuple(unfinished)
