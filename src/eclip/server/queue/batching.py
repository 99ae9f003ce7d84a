"""Batching: which of the waiting requests run next, together, and in which bucket.

Pure functions over plain numbers. Requests wait in the order of ``urgency``. A batch is always a
beginning of that order, so no request is passed over for being large. Times are nanoseconds of one
clock.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

import msgspec

NEVER = math.inf  # due, of a request without a bound


class Buckets(msgspec.Struct, frozen=True):
    """The batch sizes of a service, rising, what each is expected to take, and what it costs: the
    time that it takes when all services on the device are busy, with a fair part for each."""

    sizes: tuple[int, ...]
    times_ns: tuple[float, ...]
    costs_ns: tuple[float, ...]

    @property
    def largest(self) -> int:
        return self.sizes[-1]

    def holding(self, rows: int) -> int:
        """The place of the smallest bucket for so many rows, at most the largest."""
        return min(bisect.bisect_left(self.sizes, rows), len(self.sizes) - 1)

    def time_of(self, rows: int) -> float:
        return self.times_ns[self.holding(rows)]


class Batch(msgspec.Struct, frozen=True):
    requests: int  # from the beginning of the queue
    rows: int
    bucket: int  # rows that the bucket holds


def urgency(priority: int, due_ns: float, sequence: int) -> tuple[int, float, float]:
    """Order of requests: the higher priority (1 is the highest, 0 is none given), then the earlier
    due time, then the earlier arrival."""
    return (priority or 1 << 31, due_ns, sequence)


def form_batch(
    rows: Sequence[int], dues_ns: Sequence[float], buckets: Buckets, now_ns: float
) -> Batch:
    """The best beginning of a queue: ``rows`` of every request and when it is due, the most urgent
    first.

    Of the buckets in which a request is in time, the one that serves most rows for its cost. The
    most urgent request may be late in it: under load, every first request would be in time in a
    small bucket only, and small batches would make all others late, too. A request that no bucket
    holds is the caller's to refuse.
    """
    best: tuple[bool, float, int] | None = None
    chosen = Batch(0, 0, 0)
    for size, time_ns, cost_ns in zip(
        buckets.sizes, buckets.times_ns, buckets.costs_ns, strict=True
    ):
        requests, total = _beginning(rows, size)
        if not requests:
            continue
        value = (now_ns + time_ns <= max(dues_ns[:requests]), total / cost_ns, total)
        if best is None or value > best:
            best, chosen = value, Batch(requests, total, size)
    return chosen


def wait_until(
    batch: Batch, due_ns: float, oldest_ns: float, wait_ns: float, buckets: Buckets
) -> float:
    """How long a batch may wait for more while the device is free: never when it is full, and never
    longer than lets the most urgent request still be in time in the next larger bucket.

    ``oldest_ns`` is the first arrival in it, ``wait_ns`` what the service may wait at most.
    """
    if batch.rows >= buckets.largest:
        return -math.inf
    return min(oldest_ns + wait_ns, due_ns - buckets.time_of(batch.rows + 1))


def _beginning(rows: Sequence[int], size: int) -> tuple[int, int]:
    """How many requests from the beginning fit, and their rows."""
    requests = total = 0
    for count in rows:
        if total + count > size:
            break
        requests += 1
        total += count
    return requests, total
