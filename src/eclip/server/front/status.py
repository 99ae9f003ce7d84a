"""Server status: what a server says of itself, from the counters that all its processes share.

Rates and percentiles are those of the last few seconds: every front keeps a few samples of the
counters and shows the difference between now and the oldest.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import math
import time
from collections.abc import Callable, Sequence

from eclip.core.device import Closing
from eclip.server.control import Offer, ServiceSpec
from eclip.server.counters import WORDS, Count, CounterPages
from eclip.server.descriptions import describe_server
from eclip.server.messages import (
    BUCKETS_S,
    Counters,
    DeviceCounters,
    DeviceState,
    ProcessCounters,
    Reason,
    ServerState,
    ServiceCounters,
    ServiceState,
)

SAMPLE_S = 1.0
_SAMPLES = 5
_NOBODY = 0  # the row of what is no service's


class ServerStatus(Closing):
    def __init__(self, counters: CounterPages) -> None:
        self._counters = counters
        self._began_s = time.monotonic()
        self._next: asyncio.TimerHandle | None = None
        self._samples: collections.deque[tuple[float, dict[int, list[int]]]] = collections.deque(
            maxlen=_SAMPLES
        )

    def keep_sampling(self, loop: asyncio.AbstractEventLoop, offer: Callable[[], Offer]) -> None:
        """Now and once every ``SAMPLE_S``, of what is on offer then."""
        self.sample(offer())
        self._next = loop.call_later(SAMPLE_S, self.keep_sampling, loop, offer)

    def close(self) -> None:
        if self._next is not None:
            self._next.cancel()

    def sample(self, offer: Offer) -> None:
        rows = {spec.row: self._words(spec.row) for spec in offer.specs}
        rows[_NOBODY] = self._words(_NOBODY)
        self._samples.append((time.monotonic(), rows))

    def counters(self, offer: Offer) -> Counters:
        pages = self._counters
        services = {}
        for spec in offer.specs:
            row = spec.row
            services[spec.name] = ServiceCounters(
                statistics=pages.statistics(row),
                latency=pages.durations(row, Count.LATENCIES, Count.SUCCESS),
                queue=pages.durations(row, Count.QUEUED, Count.QUEUE),
                refused=pages.refused(row),
                running=pages.total(row, Count.RUNNING),
                waiting=pages.total(row, Count.WAITING),
                bound_s=None if spec.bound_ns is None else spec.bound_ns / 1e9,
                slack_s=self._slack_s(spec),
                busy_share=self._busy_share(row),
                late=pages.total(row, Count.LATE),
                yields=pages.of_device(row)[Count.YIELDS],
                run_again=pages.total(row, Count.AGAIN),
            )
        if nobody := pages.refused(_NOBODY):
            services[""] = ServiceCounters(refused=nobody)
        device = DeviceCounters(
            busy_share=self._busy_share(_NOBODY),
            power_w=self._power_w(),
            restarts=offer.restarts,
        )
        return Counters(
            services,
            {offer.device: device},
            connections=pages.total(_NOBODY, Count.CONNECTIONS),
            connected=pages.total(_NOBODY, Count.CONNECTED),
            processes=self._processes(),
            failed=[name for name, why in offer.idle.items() if why],
        )

    def _processes(self) -> dict[str, ProcessCounters]:
        pages = self._counters
        rows = {f"front {front}": pages.row(front, _NOBODY) for front in range(pages.fronts)}
        rows["device"] = pages.of_device(_NOBODY)
        return {
            name: ProcessCounters(
                row[Count.CPU_NS] / 1e9, row[Count.MEMORY_BYTES], row[Count.DESCRIPTORS]
            )
            for name, row in rows.items()
            if row[Count.HEARTBEAT_NS]  # a guest has none
        }

    def state(
        self, offer: Offer, ready: bool, ready_services: Sequence[str], note: str
    ) -> ServerState:
        services = tuple(
            self._service(spec, spec.name in ready_services, offer) for spec in offer.specs
        )
        device = DeviceState(
            name=offer.device,
            slices=offer.slices,
            busy_share=self._busy_share(_NOBODY),
            power_w=self._power_w(),
            restarts=offer.restarts,
            plan=offer.plan,
            services=services,
        )
        uptime_s = time.monotonic() - self._began_s
        return ServerState(describe_server()["version"], uptime_s, ready, note, (device,))

    def _service(self, spec: ServiceSpec, ready: bool, offer: Offer) -> ServiceState:
        row, pages = spec.row, self._counters
        seconds, before = self._before(row)
        now = self._words(row)
        recent = [late - early for late, early in zip(now, before, strict=True)]
        latencies = recent[Count.LATENCIES : Count.LATENCIES + len(BUCKETS_S) + 1]
        refused = sum(recent[Count.REFUSED : Count.REFUSED + len(Reason)])
        answered = recent[Count.SUCCESS]
        bound_ms = None if spec.bound_ns is None else spec.bound_ns / 1e6
        return ServiceState(
            name=spec.name,
            tier=spec.settings.tier,
            ready=ready,
            rate_rps=answered / seconds,
            goodput_rps=(answered - recent[Count.LATE]) / seconds,
            p50_ms=percentile_ms(latencies, 0.5),
            p99_ms=p99_ms(latencies, recent[Count.LATE], bound_ms),
            bound_ms=bound_ms,
            waiting=pages.total(row, Count.WAITING),
            running=pages.total(row, Count.RUNNING),
            refused_rps=refused / seconds,
            yields_rps=recent[Count.YIELDS] / seconds,
            slices=offer.homes.get(spec.name, ()),
            active=pages.total(row, Count.RUNNING) > 0,
        )

    def _slack_s(self, spec: ServiceSpec) -> float | None:
        """The least of all fronts, less what a request needs."""
        dues = [
            self._counters.row(page, spec.row)[Count.DUE_NS]
            for page in range(self._counters.fronts)
        ]
        due_ns = min(filter(None, dues), default=None)
        if due_ns is None or spec.bound_ns is None:
            return None
        return float((due_ns - time.monotonic_ns() - spec.times_ns[0]) / 1e9)

    def _busy_share(self, row: int) -> float:
        seconds, before = self._before(row)
        busy_ns = self._words(row)[Count.BUSY_NS] - before[Count.BUSY_NS]
        return min(1.0, max(0.0, busy_ns / 1e9 / seconds))

    def _power_w(self) -> float | None:
        """None: the device does not tell, or has not yet."""
        _, before = self._before(_NOBODY)
        now = self._words(_NOBODY)
        metered_ns = now[Count.METERED_NS] - before[Count.METERED_NS]
        if not before[Count.METERED_NS] or metered_ns <= 0:
            return None
        return 1e6 * (now[Count.ENERGY_MJ] - before[Count.ENERGY_MJ]) / metered_ns

    def _before(self, row: int) -> tuple[float, list[int]]:
        """How long ago the oldest sample is, and what the row was then."""
        now_s = time.monotonic()
        for taken_s, rows in self._samples:
            if row in rows and now_s - taken_s > SAMPLE_S / 2:
                return now_s - taken_s, rows[row]
        return max(now_s - self._began_s, SAMPLE_S), [0] * WORDS

    def _words(self, row: int) -> list[int]:
        words = self._counters.totals(row, 0, WORDS)
        of_device = self._counters.of_device(row)
        for word in (Count.BUSY_NS, Count.YIELDS, Count.ENERGY_MJ, Count.METERED_NS):
            words[word] = of_device[word]
        return words


def percentile_ms(buckets: Sequence[int], part: float) -> float | None:
    """Of a histogram over BUCKETS_S, on a straight line within a bucket; None: nothing was seen."""
    total = sum(buckets)
    if not total:
        return None
    wanted = math.ceil(part * total)
    place = next(i for i, seen in enumerate(itertools.accumulate(buckets)) if seen >= wanted)
    low = 0.0 if place == 0 else BUCKETS_S[place - 1]
    high = BUCKETS_S[min(place, len(BUCKETS_S) - 1)]
    inside = (wanted - sum(buckets[:place])) / buckets[place]
    return 1e3 * (low + inside * (max(high, low) - low))


def p99_ms(buckets: Sequence[int], late: int, bound_ms: float | None) -> float | None:
    """Buckets are coarse, but those that were late are counted one by one: p99
    is shown on the right side of its bound."""
    found = percentile_ms(buckets, 0.99)
    if found is None or bound_ms is None:
        return found
    total = sum(buckets)
    if late <= total - math.ceil(0.99 * total):
        return min(found, bound_ms)
    return max(found, math.nextafter(bound_ms, math.inf))
