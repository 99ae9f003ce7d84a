"""Admission: refuse at once what could not be answered in time.

Pure functions over plain numbers. A request is accepted only if its queue has room and its
expected answer is within its limit. A service with nothing to do accepts whatever comes: else a
wrong expectation could never be corrected.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from eclip.serving.batching import Buckets

_LEAST_RETRY_S = 0.001


class Backlog(msgspec.Struct, frozen=True):
    """What stands before a request."""

    waiting: int  # requests in the queue, whatever their order
    rows_before: int  # of requests that go before it
    running_ns: float  # what is left of the batches on the device, per instance


@dataclass(frozen=True, slots=True)
class Refusal:
    line: str
    retry_after_s: float


def expected_ns(rows: int, backlog: Backlog, buckets: Buckets, instances: int) -> float:
    """Until the answer: what runs, then full batches of those before it, then its own batch."""
    full, rest = divmod(backlog.rows_before + rows, buckets.largest)
    if rest == 0:
        full, rest = full - 1, buckets.largest
    queued_ns = full * buckets.times_ns[-1] / instances
    return backlog.running_ns + queued_ns + buckets.time_of(rest)


def refuse(
    rows: int,
    limit_ns: float,
    backlog: Backlog,
    queue: int,
    buckets: Buckets,
    instances: int,
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
