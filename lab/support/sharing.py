"""What sharing cost services and left to background, from runs with the same arrivals.

Latency counts from arrival. *Excess* is a request's latency less the same request's latency alone.
A request that had not ended when its run did counts with the time it had waited by then, so that
an overloaded way of sharing does not look better than it is: its tail is a lower limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from eclip.core.excess import paired_ratios
from eclip.core.load import Load
from eclip.core.runlog import RunLog

Values = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

ALLOWED_NS = 50_000  # of excess beyond the stretches in flight
SHORT = 0.3  # depth × stretch over the latency at rest, up to which ratios are promised


@dataclass(frozen=True)
class Latencies:
    """Of all requests that arrived in the measured parts of runs, in order of arrival."""

    ns: Values
    ended: Flags

    def first(self, count: int) -> Latencies:
        """Of these runs, the first ones may have been made in another way, too."""
        return Latencies(self.ns[:count], self.ended[:count])

    @classmethod
    def of(cls, logs: Sequence[RunLog], loads: Sequence[Load], worker: int) -> Latencies:
        """``loads``: of every round, in order; not all may have been run."""
        parts = [_latencies(log, load, worker) for log, load in zip(logs, loads, strict=False)]
        return cls(np.concatenate([ns for ns, _ in parts]), np.concatenate([ok for _, ok in parts]))


def _latencies(log: RunLog, load: Load, worker: int) -> tuple[Values, Flags]:
    times = load.arrivals[worker]
    assert times is not None
    due = times[(times >= 0) & (times < log.duration_ns)]
    mine = np.array(log.requests.worker, dtype=np.int64) == worker
    arrival = np.array(log.requests.arrival_ns, dtype=np.int64)[mine]
    end = np.array(log.requests.end_ns, dtype=np.int64)[mine]
    order = np.argsort(arrival, kind="stable")
    order = order[arrival[order] >= 0]  # what came during the warm-up is not measured
    # First come, first served: those that ended are the first ones.
    done = min(len(order), len(due))
    latency = (log.duration_ns - due).astype(np.float64)
    latency[:done] = end[order[:done]] - due[:done]
    return latency, np.arange(len(due)) < done


def rate_of(logs: Sequence[RunLog], worker: int) -> float:
    """Requests per second between the first and the last completion of every run: in a short one,
    a request more or less in the window would be percents."""
    requests, span_ns = 0, 0
    for log in logs:
        mine = np.array(log.requests.worker, dtype=np.int64) == worker
        end = np.array(log.requests.end_ns, dtype=np.int64)[mine]
        if len(end) > 1:
            requests, span_ns = requests + len(end) - 1, span_ns + int(end[-1] - end[0])
    return requests * 1e9 / span_ns if span_ns else 0.0


def percentiles_ms(values: Values) -> dict[str, float]:
    if not len(values):
        return dict.fromkeys(("p50_ms", "p99_ms", "max_ms"), 0.0)
    p50, p99 = np.percentile(values, [50, 99]) / 1e6
    return {"p50_ms": float(p50), "p99_ms": float(p99), "max_ms": float(values.max()) / 1e6}


def where_time_went(logs: Sequence[RunLog], worker: int) -> dict[str, Any]:
    """Of a service alone: how long the device took for a request, and how long the host let one
    wait that could have begun. Together they say why a tail is long."""
    took, lag = [], []
    for log in logs:
        mine = np.array(log.requests.worker, dtype=np.int64) == worker
        arrival, start, end = (
            np.array(column, dtype=np.float64)[mine]
            for column in (log.requests.arrival_ns, log.requests.start_ns, log.requests.end_ns)
        )
        took.append(end - start)
        lag.append(start[1:] - np.maximum(arrival[1:], end[:-1]))
    served, waited = np.concatenate(took), np.concatenate(lag)
    if not len(waited):
        return {}
    return {
        "served": percentiles_ms(served),
        "late": percentiles_ms(waited),
        "late_by_1ms": int(np.count_nonzero(waited > 1e6)),
        "lag_ms": max(log.lag_ns[worker] for log in logs if log.lag_ns) / 1e6
        if any(log.lag_ns for log in logs)
        else None,
        "warnings": sorted({text for log in logs for text in log.warnings}),
    }


def service_figures(shared: Latencies, alone: Latencies) -> dict[str, Any]:
    """Without intervals, which take long (``with_intervals``)."""
    alone = alone.first(len(shared.ns))
    known = alone.ended
    ours, base = shared.ns[known], alone.ns[known]
    p50, p99 = np.percentile(ours, [50, 99]) / np.percentile(base, [50, 99])
    return {
        "requests": len(base),
        "unfinished": int(np.count_nonzero(~shared.ended[known])),
        "latency": percentiles_ms(ours),
        "alone": percentiles_ms(base),
        "excess": percentiles_ms(ours - base),
        "p50_ratio": {"value": float(p50)},
        "p99_ratio": {"value": float(p99)},
    }


def with_intervals(figures: dict[str, Any], shared_ns: Values, alone: Latencies) -> dict[str, Any]:
    alone = alone.first(len(shared_ns))
    p50, p99 = paired_ratios(shared_ns[alone.ended], alone.ns[alone.ended], (0.5, 0.99))
    return figures | {"p50_ratio": msgspec.to_builtins(p50), "p99_ratio": msgspec.to_builtins(p99)}


def checks(figures: dict[str, Any], waits_ns: float, rest_ns: float) -> dict[str, bool]:
    """What issue 16 promises of a service whose background has so much in flight."""
    held = {"excess": figures["excess"]["p99_ms"] * 1e6 <= waits_ns + ALLOWED_NS}
    if waits_ns <= SHORT * rest_ns:
        held["p50"] = figures["p50_ratio"]["value"] <= 1.15
        held["p99"] = figures["p99_ratio"]["value"] <= 1.10
    return held
