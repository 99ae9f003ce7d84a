"""The measures of a run log.

- ratio: a worker's rate in the mix over its rate alone, same kernels, all units.
- STP, the throughput of a mix: the sum of the ratios.
- fairness: the smallest ratio over the largest.
- latency: from arrival to completion.
- busy: the part of a run in which a worker had a request begun and not ended.
- efficiency: STP · seconds per joule, given per kilojoule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from eclip.core.display import told_apart
from eclip.core.model_key import ModelKey
from eclip.core.plan import Plan, PlannedWorker
from eclip.core.runlog import RunLog
from eclip.errors import UsageError

# Quantiles that are kept of a distribution, enough to draw it.
LEVELS = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0)
_STEADY = 3  # completions, at least
_KEEPS_UP = 0.9  # of what is offered
_UNDER_WAY = 5  # requests that may be unfinished when a run ends


class WorkerMeasures(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    model: ModelKey
    requests: int
    rate_rps: float
    alone_rps: float
    ratio: float
    p50_ms: float | None  # None: no request completed
    p95_ms: float | None
    p99_ms: float | None
    switches_per_request: int
    offered_rps: float | None = None  # None: closed loop, as many as it can serve
    busy: float = 0.0  # part of the run
    bound_ms: float | None = None  # on its p99; None: no service
    floor: float = 0.0  # the least part of its rate alone
    yields: int = 0  # stops at a joint for another worker
    moves: int = 0  # stretches on another lane than planned
    longest_pause_ms: float = 0.0  # at a joint

    @property
    def kept(self) -> bool:
        """True if the p99 is within the bound, or if there is no bound."""
        return self.bound_ms is None or (self.p99_ms is not None and self.p99_ms <= self.bound_ms)

    @property
    def overloaded(self) -> bool:
        """True if more requests arrive than are served, so that the queue grows."""
        if self.offered_rps is None:
            return False
        return falls_behind(self.offered_rps, self.rate_rps, self._seconds)

    @property
    def starved(self) -> bool:
        """True if the ratio is below the floor."""
        over = floor_over_served(
            self.floor, self.requests, self.alone_rps, self._seconds, self.offered_rps
        )
        return over > 1

    @property
    def _seconds(self) -> float:
        return self.requests / self.rate_rps if self.rate_rps else math.inf


class Measures(msgspec.Struct, frozen=True, kw_only=True):
    """Throughput, fairness and power of a run, and every worker's latencies."""

    policy: str
    device: str
    modelled: bool
    seconds: float
    stp: float
    fairness: float
    power_w: float
    energy_j: float
    joules_per_request: float | None
    efficiency_per_kj: float
    switches_per_request: int  # summed over the workers, as in the paper's Table I
    workers: tuple[WorkerMeasures, ...]
    missed: tuple[str, ...] = ()  # sentences about overload and missed bounds and floors
    background: float | None = None  # weighted mean ratio of unbounded workers; None: no tiers


def steady_rates(log: RunLog) -> tuple[float, ...]:
    """Requests per second of every worker between its first and its last completion; 0 below
    ``_STEADY`` completions. A count over a short window would be wrong by up to one request."""
    owner, ends = np.array(log.requests.worker), np.array(log.requests.end_ns)
    rates = []
    for worker in log.plan.everyone:
        own = ends[owner == worker]
        many = len(own) >= _STEADY
        rates.append((len(own) - 1) * 1e9 / float(own[-1] - own[0]) if many else 0.0)
    return tuple(rates)


def busy_share(logs: Sequence[RunLog], worker: int) -> float:
    """The part of the runs in which the worker had a request begun and not ended. A request that
    was unfinished at the end of a run is not in the log and does not count."""
    busy_ns = 0
    for log in logs:
        own = np.array(log.requests.worker, dtype=np.int64) == worker
        start = np.array(log.requests.start_ns, dtype=np.int64)[own]
        end = np.array(log.requests.end_ns, dtype=np.int64)[own]  # rising, as the log is
        # The next request may begin before the last one ends: that time counts once.
        begun = np.maximum(start, np.concatenate([[0], end[:-1]])[: len(start)])
        busy_ns += int(np.maximum(end - begun, 0).sum())
    return busy_ns / sum(log.duration_ns for log in logs)


def latencies_ms(logs: Sequence[RunLog], worker: int) -> npt.NDArray[np.float64]:
    """Latencies of a worker's requests in these runs, in order of completion."""
    parts = []
    for log in logs:
        own = np.array(log.requests.worker, dtype=np.int64) == worker
        parts.append(np.subtract(log.requests.end_ns, log.requests.arrival_ns)[own] / 1e6)
    return np.concatenate(parts)


def quantiles(values: npt.NDArray[np.float64]) -> tuple[float, ...]:
    """Quantiles at LEVELS; empty without values."""
    return tuple(np.quantile(values, LEVELS).tolist()) if len(values) else ()


def worst_off(p99_ms: Sequence[float | None], alone_rps: Sequence[float]) -> int:
    """The worker with the largest p99 relative to its time alone. None and infinity mean that no
    request completed; such workers are left out."""
    pairs = zip(p99_ms, alone_rps, strict=True)
    waits = [0.0 if tail is None or np.isinf(tail) else tail * rate for tail, rate in pairs]
    return waits.index(max(waits))


def measure(log: RunLog) -> Measures:
    """The measures of one run.

    Throughput and fairness are relative to the rates alone, which are in the log::

        log = eclip.run(plan)
        print(eclip.measure(log).stp)
    """
    return measure_together([log])


def measure_together(logs: Sequence[RunLog]) -> Measures:
    """The measures of several runs of a plan, counted as a single run. All have the same rates
    alone."""
    first = logs[0]
    if not first.alone_rps:
        raise UsageError("the run log has no rates alone to measure against; run it by eclip.run")
    seconds = sum(log.duration_ns for log in logs) / 1e9
    # A run too short for the energy counter has none; it used as much as the others.
    metered = [log for log in logs if log.energy_uj > 0]
    metered_ns = sum(log.duration_ns for log in metered)
    power_w = sum(log.energy_uj for log in metered) * 1e3 / metered_ns if metered else 0.0
    joules = power_w * seconds
    owner = np.concatenate([np.asarray(log.requests.worker, dtype=np.int64) for log in logs])
    latency_ns = [np.subtract(log.requests.end_ns, log.requests.arrival_ns) for log in logs]
    latency_ms = np.concatenate(latency_ns) / 1e6
    workers = []
    for part in first.plan.main.assignments:
        planned = first.plan.workers[part.worker]
        latencies = latency_ms[owner == part.worker]
        rate = len(latencies) / seconds
        p50, p95, p99 = _percentiles(latencies)
        workers.append(
            WorkerMeasures(
                name=planned.name,
                model=planned.model,
                requests=len(latencies),
                rate_rps=rate,
                alone_rps=first.alone_rps[part.worker],
                ratio=rate / first.alone_rps[part.worker],
                p50_ms=p50,
                p95_ms=p95,
                p99_ms=p99,
                switches_per_request=part.switches,
                offered_rps=_offered_rps(logs, part.worker, seconds),
                bound_ms=bound_of(planned),
                floor=planned.floor,
                busy=busy_share(logs, part.worker),
                **_counted(logs, part.worker),
            )
        )
    ratios = [worker.ratio for worker in workers]
    stp = sum(ratios)
    return Measures(
        policy=first.plan.policy,
        device=first.device,
        modelled=first.modelled,
        seconds=seconds,
        stp=stp,
        fairness=min(ratios) / max(ratios) if max(ratios) > 0 else 0.0,
        power_w=power_w,
        energy_j=joules,
        joules_per_request=joules / len(owner) if len(owner) else None,
        efficiency_per_kj=1000 * stp * seconds / joules if joules > 0 else 0.0,
        switches_per_request=sum(worker.switches_per_request for worker in workers),
        workers=tuple(workers),
        missed=_missed(first.plan, workers),
        background=_background(first.plan, workers),
    )


def _counted(logs: Sequence[RunLog], worker: int) -> dict[str, Any]:
    """The worker's counters of joints."""
    counters = [log.counters[worker] for log in logs]
    return {
        "yields": sum(one.yields for one in counters),
        "moves": sum(one.moves for one in counters),
        "longest_pause_ms": max(one.longest_pause_ns for one in counters) / 1e6,
    }


def _percentiles(latencies: npt.NDArray[np.float64]) -> list[float | None]:
    """p50, p95 and p99; None where no request completed."""
    if len(latencies) == 0:
        return [None] * 3
    percentiles: list[float | None] = np.percentile(latencies, [50, 95, 99]).tolist()
    return percentiles


def falls_behind(offered_rps: float, served_rps: float, seconds: float) -> bool:
    """True if fewer requests are served than arrive in ``seconds``, beyond the requests that may be
    under way at the end."""
    behind = (offered_rps - served_rps) * seconds
    return served_rps < _KEEPS_UP * offered_rps and behind >= _UNDER_WAY


def overload_sentence(name: str, offered_rps: float, served_rps: float) -> str:
    return (
        f"{name} is overloaded: {offered_rps:.0f} requests/s are offered and {served_rps:.0f} "
        f"served, so its queue grows"
    )


def bounds_missed(
    workers: Sequence[PlannedWorker], p99_ms: Sequence[float | None]
) -> tuple[str, ...]:
    """A sentence for every service with a p99 above its bound. A p99 of None: no completed
    request."""
    words = []
    for worker, p99 in zip(workers, p99_ms, strict=True):
        bound_ms = bound_of(worker)
        if bound_ms is not None and (p99 is None or p99 > bound_ms):
            tail, most = "none completed", f"{bound_ms:.2f}"
            if p99 is not None:
                tail, most = told_apart(p99, bound_ms)
                tail += " ms"
            words.append(f"{worker.name} misses its bound: p99 {tail}, at most {most} ms wanted")
    return tuple(words)


def floor_over_served(
    floor: float, requests: int, alone_rps: float, seconds: float, offered_rps: float | None
) -> float:
    """The promised rate over the served rate; above 1 the floor is not kept. The request under way
    at the end counts as served. A worker with arrivals has no floor."""
    if floor == 0 or offered_rps is not None:
        return 0.0
    return floor * alone_rps * seconds / (requests + 1)


def bound_of(worker: PlannedWorker) -> float | None:
    """The bound on the worker's p99, in ms; None: no service."""
    return None if worker.promise is None else worker.promise.bound_ns / 1e6


def _missed(plan: Plan, workers: Sequence[WorkerMeasures]) -> tuple[str, ...]:
    """A sentence for every overloaded worker, missed bound and missed floor."""
    overloaded = tuple(
        overload_sentence(worker.name, worker.offered_rps, worker.rate_rps)
        for worker in workers
        if worker.overloaded and worker.offered_rps is not None
    )
    late = bounds_missed(plan.workers, [worker.p99_ms for worker in workers])
    starved = tuple(
        f"{worker.name} is below its floor: {worker.ratio:.1%} of its rate alone, at least "
        f"{worker.floor:.1%} wanted"
        for worker in workers
        if worker.starved
    )
    return overloaded + late + starved


def _background(plan: Plan, workers: Sequence[WorkerMeasures]) -> float | None:
    """The weighted mean ratio of workers without a bound; None if all or no workers have bounds."""
    weights = [
        0.0
        if planned.promise is not None
        else 1.0
        if asked.background is None
        else asked.background.weight
        for planned, asked in zip(plan.workers, plan.mix.workers, strict=True)
    ]
    if sum(weights) == 0 or all(planned.promise is None for planned in plan.workers):
        return None
    ratios = [worker.ratio for worker in workers]
    return float(np.dot(ratios, weights)) / sum(weights)


def _offered_rps(logs: Sequence[RunLog], worker: int, seconds: float) -> float | None:
    offered = [log.offered[worker] for log in logs]
    known = [count for count in offered if count is not None]
    return sum(known) / seconds if len(known) == len(offered) else None
