"""Service queue: requests of a service in a front, the most urgent first, and what they take.

It is a ``QueuedService`` of front_queue.py, but for ``send``.
"""

from __future__ import annotations

import bisect
import logging

from eclip.server.control import ServiceSpec
from eclip.server.front.front_queue import FrontQueue, Urgency, left_ns
from eclip.server.front.replica import BatchesOnDevice, OpenRequest
from eclip.server.queue.batching import NEVER, Buckets

_log = logging.getLogger(__name__)

_AHEAD_NS = 300_000  # both ways between the processes together, roughly
_LEARNING = 0.2  # how much of an expectation a new measurement is
# Of requests without a bound, and of late ones: they wait so long behind those that can be in time,
# and not for ever.
_PATIENCE_NS = 1_000_000_000


class ServiceQueue:
    def __init__(
        self, spec: ServiceSpec, front_queue: FrontQueue, on_device: BatchesOnDevice
    ) -> None:
        self.spec = spec
        self.front_queue = front_queue
        self.queue: list[OpenRequest] = []
        self.on_device = on_device
        self._told = False  # that its profile is wrong
        self.expected_ns = [float(time_ns) for time_ns in spec.times_ns]  # as measured lately
        self.buckets = self._buckets()

    def _buckets(self) -> Buckets:
        spec = self.spec
        several = self.front_queue.concurrency.several if self._takes_room else 1.0
        costs = zip(spec.least_costs_ns, spec.costs_ns, strict=True)
        costs_ns = tuple(least + several * (most - least) for least, most in costs)
        return Buckets(spec.buckets, tuple(self.expected_ns), costs_ns)

    @property
    def queued(self) -> bool:
        return bool(self.queue)

    @property
    def instances(self) -> float:
        """So many batches of it run at once, as it goes now."""
        more = self.spec.settings.replicas - 1
        return 1.0 + more * (self.front_queue.concurrency.several if self._takes_room else 1.0)

    @property
    def _takes_room(self) -> bool:
        return any(self.spec.parts)

    @property
    def may_follow(self) -> bool:
        """Nothing of it runs, or one batch that ends soon, and the next one is full."""
        if len(self.on_device) != 1:
            return not self.on_device
        (first,) = self.on_device
        ends_soon = left_ns(first, self.front_queue.now_ns()) < _AHEAD_NS
        return ends_soon and sum(one.rows for one in self.queue) >= self.buckets.largest

    def needs_no_room(self, room_in_ns: float) -> bool:
        if not self._takes_room:
            return True
        _, start_ns = self.urgency()
        takes_ns = self.expected_ns[0]
        # Its own time is the margin: half of those that start at the last moment are late.
        may_be_late = start_ns - self.front_queue.now_ns() < room_in_ns + takes_ns
        return may_be_late and takes_ns <= room_in_ns

    def urgency(self) -> Urgency:
        while self.put_late_last(self.expected_ns[0]):
            pass
        first = self.queue[0]
        return self._must_start(first.order, first.asked.arrival_ns)

    def _must_start(self, order: tuple[int, float, float], arrival_ns: int) -> Urgency:
        priority, due_ns, _ = order
        if due_ns == NEVER:
            due_ns = arrival_ns + _PATIENCE_NS
        return priority, due_ns - self.expected_ns[0]

    def put_late_last(self, needs_ns: float) -> bool:
        """The first request, if it cannot be in time any more: behind those that can."""
        first = self.queue[0]
        if first.due_ns >= self.front_queue.now_ns() + needs_ns or first.late:
            return False
        priority, due_ns, number = first.order
        first.late, first.order = True, (priority, due_ns + _PATIENCE_NS, number)
        del self.queue[0]
        bisect.insort(self.queue, first, key=order_of)
        return True

    def learn(self, bucket: int, took_ns: int) -> None:
        """What makes one bucket slower, mostly others on the device, makes all of them slower. None
        is faster than alone."""
        spec = self.spec
        place = spec.buckets.index(bucket)
        if self._takes_room:
            self._compare(took_ns, spec.times_ns[place])
        factor = 1 + _LEARNING * (took_ns / self.expected_ns[place] - 1)
        self.expected_ns = [
            max(factor * expected_ns, alone_ns)
            for expected_ns, alone_ns in zip(self.expected_ns, spec.times_ns, strict=True)
        ]
        self.buckets = self._buckets()

    def _compare(self, took_ns: int, alone_ns: int) -> None:
        """With the others' batches; tell once that a profile is wrong."""
        concurrency, spec = self.front_queue.concurrency, self.spec
        concurrency.learn(spec.id, took_ns, alone_ns)
        times = concurrency.beyond_profile(spec.id)
        if times > 1.0 and not self._told:
            self._told = True
            _log.warning(
                "%s takes %.1f times as long as its profile says; measure it again with eclip "
                "profile, or give it a longer bound",
                *(spec.name, times),
            )


def order_of(pending: OpenRequest) -> tuple[int, float, float]:
    return pending.order
