"""Excess: the latency that sharing adds to each request of a service.

The excess of a request is its latency minus the latency of the same request alone. The p99 of a
service alone is mostly its own queueing, so a ratio of p99s hides a wait. The ratio's interval is
wide unless both runs have the same arrivals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from eclip.core.measures import LEVELS, bound_of, busy_share, falls_behind, quantiles
from eclip.core.runlog import OTHERS_IDLE, RunLog
from eclip.errors import UsageError

ENOUGH_FOR_P999 = 20_000  # requests: twenty lie above it
RESAMPLES = 1000
# A queue spans many requests, so consecutive requests are drawn together. On queues with a known
# ratio, 89 to 100 of 100 intervals hold it at loads up to 0.6. At 0.9 a single queue makes the p99
# of a run: 72 of 100 intervals hold it with 1,000 requests, and 85 with 4,000.
_BLOCKS = 25
_MOST_WEIGHTS = 4_000_000  # at once: 16 MB

Floats = npt.NDArray[np.float64]
Pair = tuple[RunLog, RunLog]  # shared, and alone with the same arrivals


class Spread(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    p50: float
    p99: float
    longest: float
    p999: float | None  # None: too few requests
    curve: tuple[float, ...] = ()  # at measures.LEVELS; empty: not kept

    def __post_init__(self) -> None:
        if len(self.curve) not in (0, len(LEVELS)):
            raise ValueError(f"a curve has {len(LEVELS)} values, or none")


class PairedRatio(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shared over alone, with its 95% interval."""

    value: float
    low: float
    high: float


class Excess(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A service beside others, against the same requests alone."""

    name: str
    requests: int  # that ended in both runs
    left_out: int  # that ended in one run only: at its beginning or end
    shared_ms: Spread
    alone_ms: Spread
    excess_us: Spread
    p50_ratio: PairedRatio
    p99_ratio: PairedRatio
    busy: float  # part of the time alone in which a request was begun and not ended
    bound_ms: float | None  # None: no bound
    goodput_rps: float | None  # answered within the bound
    kept: bool | None  # p99 within the bound; False if the queue grows


def measure_excess(pairs: Sequence[Pair], worker: int, *, seed: int = 0) -> Excess:
    """The excess of a service over all pairs of runs.

    A pair is a run beside others and a run alone, with the same arrivals. Two pairs may have
    different arrivals::

        excess = measure_excess([(shared, alone)], worker=0)
        print(excess.excess_us.p99, excess.p99_ratio.high)
    """
    matched = [_matched(shared, alone, worker) for shared, alone in pairs]
    shared, alone = (np.concatenate([part[side] for part in matched]) for side in (0, 1))
    ended = sum(_count(log, worker) for pair in pairs for log in pair)
    p50, p99 = paired_ratios(shared, alone, (0.5, 0.99), seed)
    alone_ms = _spread(alone / 1e6)
    shared_logs = [log for log, _ in pairs]
    planned = shared_logs[0].plan.mix.workers[worker]
    bound_ms = bound_of(shared_logs[0].plan.workers[worker])
    shared_ms = _spread(shared / 1e6)
    return Excess(
        name=planned.name,
        requests=len(shared),
        left_out=ended - 2 * len(shared),
        shared_ms=shared_ms,
        alone_ms=alone_ms,
        excess_us=_spread((shared - alone) / 1e3),
        p50_ratio=p50,
        p99_ratio=p99,
        busy=busy_share([log for _, log in pairs], worker),
        bound_ms=bound_ms,
        goodput_rps=None if bound_ms is None else _goodput(shared_logs, worker, bound_ms),
        kept=None
        if bound_ms is None
        else shared_ms.p99 <= bound_ms and not _queue_grew(shared_logs, worker),
    )


def paired_ratios(
    shared: Floats, alone: Floats, quantiles: Sequence[float], seed: int = 0
) -> tuple[PairedRatio, ...]:
    """The ratio of shared to alone at every quantile, with its interval by block bootstrap: blocks
    of consecutive requests are drawn with replacement, the same blocks of both."""
    drawn = _resampled([shared, alone], quantiles, seed)
    low, high = np.percentile(drawn[0] / drawn[1], [2.5, 97.5], axis=0)
    value = np.quantile(shared, quantiles) / np.quantile(alone, quantiles)
    return tuple(
        PairedRatio(value=float(value[i]), low=float(low[i]), high=float(high[i]))
        for i in range(len(quantiles))
    )


def _resampled(samples: Sequence[Floats], quantiles: Sequence[float], seed: int) -> Floats:
    """Quantiles of every sample in every resample: sample × resample × quantile.

    A resample is a count for each request. Samples are sorted once. A quantile is the value at
    which the running sum of the counts, in sorted order, passes the quantile's rank."""
    count = len(samples[0])
    random = np.random.default_rng(seed)
    orders = [np.argsort(sample) for sample in samples]
    length = max(1, count // _BLOCKS)
    blocks = -(-count // length)
    ranks = (blocks * length - 1) * np.array(quantiles)
    wanted = np.concatenate([np.floor(ranks), np.ceil(ranks)])
    part = ranks - np.floor(ranks)
    found = np.empty((len(samples), RESAMPLES, len(quantiles)))
    at_once = max(1, _MOST_WEIGHTS // count)
    for begin in range(0, RESAMPLES, at_once):
        rows = min(at_once, RESAMPLES - begin)
        weights = _times_drawn(random.integers(count, size=(rows, blocks)), length, count)
        for sample, order, into in zip(samples, orders, found, strict=True):
            passed = np.cumsum(weights[:, order], axis=1)
            places = np.array([np.searchsorted(row, wanted, side="right") for row in passed])
            below, above = np.split(sample[order][places], 2, axis=1)
            into[begin : begin + rows] = below + part * (above - below)
    return found


def _times_drawn(starts: npt.NDArray[np.int64], length: int, count: int) -> npt.NDArray[np.int32]:
    """How often each request is drawn by blocks that begin at ``starts``. Blocks wrap around."""
    rows = len(starts)
    row = np.arange(rows)[:, None] * count
    change = np.bincount((row + starts).ravel(), minlength=rows * count)
    change -= np.bincount((row + (starts + length) % count).ravel(), minlength=rows * count)
    change = change.reshape(rows, count).astype(np.int32)
    change[:, 0] += (starts + length >= count).sum(axis=1).astype(np.int32)
    return np.cumsum(change, axis=1, dtype=np.int32)


def _matched(shared: RunLog, alone: RunLog, worker: int) -> tuple[Floats, Floats]:
    """Latencies, in ns, of the requests that ended in both runs, in order of arrival."""
    name = shared.plan.workers[worker].name
    _check_same_load(shared, alone, worker)
    (arrived, latency), (arrived_alone, latency_alone) = (
        _in_order(log, worker) for log in (shared, alone)
    )
    if not len(arrived) or not len(arrived_alone):
        raise UsageError(f"no request of {name} ended both beside others and alone; run longer")
    # A worker's requests end in order of arrival, so only the ends of the two lists may differ.
    first = max(arrived[0], arrived_alone[0])
    skip, skip_alone = (np.searchsorted(times, first) for times in (arrived, arrived_alone))
    count = min(len(arrived) - skip, len(arrived_alone) - skip_alone)
    both = slice(skip, skip + count), slice(skip_alone, skip_alone + count)
    if count < 1 or not np.array_equal(arrived[both[0]], arrived_alone[both[1]]):
        raise UsageError(f"the two runs have different arrivals of {name}; run both with one load")
    return latency[both[0]], latency_alone[both[1]]


def _check_same_load(shared: RunLog, alone: RunLog, worker: int) -> None:
    name = shared.plan.workers[worker].name
    if [one.name for one in shared.plan.workers] != [one.name for one in alone.plan.workers]:
        raise UsageError(f"the two runs are of different mixes; {name} cannot be compared")
    if shared.offered[worker] is None or alone.offered[worker] is None:
        raise UsageError(f"{name} runs back to back: it has no arrivals that could be the same")
    loads = [(log.load.removesuffix(OTHERS_IDLE), log.seed) for log in (shared, alone)]
    if loads[0] != loads[1]:
        words = " and ".join(f"{load!r} with seed {seed}" for load, seed in loads)
        raise UsageError(f"the two runs have different arrivals: {words}")


def _in_order(log: RunLog, worker: int) -> tuple[npt.NDArray[np.int64], Floats]:
    """Arrivals and latencies of a worker, by arrival."""
    owner = np.array(log.requests.worker, dtype=np.int64)
    arrived = np.array(log.requests.arrival_ns, dtype=np.int64)[owner == worker]
    ended = np.array(log.requests.end_ns, dtype=np.int64)[owner == worker]
    order = np.argsort(arrived, kind="stable")
    return arrived[order], (ended - arrived)[order].astype(np.float64)


def _spread(values: Floats) -> Spread:
    p50, p99, p999 = np.percentile(values, [50, 99, 99.9]).tolist()
    return Spread(
        p50=p50,
        p99=p99,
        longest=float(values.max()),
        p999=p999 if len(values) >= ENOUGH_FOR_P999 else None,
        curve=tuple(float(f"{value:.5g}") for value in quantiles(values)),
    )


def _count(log: RunLog, worker: int) -> int:
    return log.requests.worker.count(worker)


def _goodput(logs: Sequence[RunLog], worker: int, bound_ms: float) -> float:
    good = sum(np.count_nonzero(_in_order(log, worker)[1] <= bound_ms * 1e6) for log in logs)
    return float(good) * 1e9 / sum(log.duration_ns for log in logs)


def _queue_grew(logs: Sequence[RunLog], worker: int) -> bool:
    seconds = sum(log.duration_ns for log in logs) / 1e9
    offered = math.fsum(log.offered[worker] or 0 for log in logs)
    served = sum(_count(log, worker) for log in logs)
    return falls_behind(offered / seconds, served / seconds, seconds)
