"""The measures: what a run log says about a policy, one meaning each.

- ratio: a worker's rate in the mix over its rate alone, same kernels, all units.
- STP, the throughput of a mix: the sum of the ratios.
- fairness: the smallest ratio over the largest.
- latency: from arrival to completion.
- efficiency: STP · seconds per joule, given per kilojoule.
"""

from __future__ import annotations

import msgspec
import numpy as np

from eclip.runlog import RunLog


class WorkerMeasures(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    model: str
    requests: int
    rate_rps: float
    alone_rps: float
    ratio: float
    p50_ms: float | None  # None: no request completed
    p95_ms: float | None
    p99_ms: float | None
    switches_per_request: int


class Measures(msgspec.Struct, frozen=True, kw_only=True):
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


def measure(log: RunLog) -> Measures:
    seconds = log.duration_ns / 1e9
    joules = log.energy_uj / 1e6
    owner = np.asarray(log.requests.worker, dtype=np.int64)
    latency_ms = (np.asarray(log.requests.end_ns) - np.asarray(log.requests.arrival_ns)) / 1e6
    workers = []
    for part in log.plan.main.assignments:
        planned = log.plan.workers[part.worker]
        mine = latency_ms[owner == part.worker]
        rate = len(mine) / seconds
        p50, p95, p99 = np.percentile(mine, [50, 95, 99]).tolist() if len(mine) else [None] * 3
        workers.append(
            WorkerMeasures(
                name=planned.name,
                model=planned.model,
                requests=len(mine),
                rate_rps=rate,
                alone_rps=log.alone_rps[part.worker],
                ratio=rate / log.alone_rps[part.worker],
                p50_ms=p50,
                p95_ms=p95,
                p99_ms=p99,
                switches_per_request=part.switches,
            )
        )
    ratios = [worker.ratio for worker in workers]
    stp = sum(ratios)
    return Measures(
        policy=log.plan.policy,
        device=log.device,
        modelled=log.modelled,
        seconds=seconds,
        stp=stp,
        fairness=min(ratios) / max(ratios) if max(ratios) > 0 else 0.0,
        power_w=joules / seconds,
        energy_j=joules,
        joules_per_request=joules / len(owner) if len(owner) else None,
        efficiency_per_kj=1000 * stp * seconds / joules if joules > 0 else 0.0,
        switches_per_request=sum(worker.switches_per_request for worker in workers),
        workers=tuple(workers),
    )
