"""Admission: refuse at once what could not be answered in time.

Pure functions over plain numbers. A request is accepted only if its queue has room and its
expected answer is within its limit. A service with nothing to do accepts any request: else a
wrong expectation could never be corrected.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from eclip.server.queue.batching import Buckets

_LEAST_RETRY_S = 0.001


class Backlog(msgspec.Struct, frozen=True):
    """What stands before a request."""

    waiting: int  # requests in the queue, of any order
    rows_before: int  # of requests that go before it
    running_ns: float  # what is left of the batches on the device, per instance


@dataclass(frozen=True, slots=True)
class Refusal:
    line: str
    retry_after_s: float


def expected_ns(rows: int, backlog: Backlog, buckets: Buckets, instances: float) -> float:
    """Until the answer: what runs, then those before it and itself."""
    return backlog.running_ns + _served_ns(backlog.rows_before + rows, rows, buckets, instances)


def _served_ns(rows: int, least: int, buckets: Buckets, instances: float) -> float:
    """What so many rows take on all instances, in the bucket that suits them best. One request has
    ``least`` rows, and no batch takes less than its own time."""
    return min(
        max(rows / (size * instances), 1.0) * time_ns
        for size, time_ns in zip(buckets.sizes, buckets.times_ns, strict=True)
        if size >= min(least, buckets.largest)
    )


def refuse(
    rows: int,
    limit_ns: float,
    backlog: Backlog,
    queue: int,
    buckets: Buckets,
    instances: float,
) -> Refusal | None:
    """None: accepted. ``limit_ns`` is what is left until its bound or timeout; ``queue`` is the
    most requests that may wait."""
    drain_ns = buckets.times_ns[-1] / instances
    if backlog.waiting >= queue:
        return Refusal(f"{queue} requests wait already", _seconds(drain_ns))
    if backlog.waiting == 0 and backlog.running_ns <= 0:
        return None
    expected = expected_ns(rows, backlog, buckets, instances)
    if expected <= limit_ns:
        return None
    line = (
        f"its answer would take about {expected / 1e6:.1f} ms and has {max(limit_ns, 0) / 1e6:.1f}"
    )
    return Refusal(line, _seconds(expected - limit_ns))


def _seconds(time_ns: float) -> float:
    return max(time_ns / 1e9, _LEAST_RETRY_S)
