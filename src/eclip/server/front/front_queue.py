"""Front queue: what the services of a front share, and whose batch goes to the device next.

Every service may have one batch on the device. Further ones run at once as far as there is room:
as fill the device, those of other fronts counted, and fewer or none where batches slow each other
(queue/concurrency.py). The others wait in their queues and grow there: a row of a large batch keeps
less of the device busy than one of a small batch. Of those that wait, the one goes first that must
start first to be in time. What cannot be in time any more waits behind what can, so that it makes
nobody else late. A short batch that would be late may go although there is no room, if it ends
before there is: it keeps nobody waiting.

A front of which nothing runs may always order a batch: it would not hear that another front's has
ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from eclip.server.counters import Count
from eclip.server.queue.concurrency import Concurrency

# Parts of the device. A batch leaves gaps that others fill, so a little more than one.
_FULL = 1.25
_LEAST_LEFT = 0.1  # of a batch that takes longer than expected
_PARTS = 1000  # in a whole, as counted for other fronts

Urgency = tuple[int, float]  # priority, and when it must start: the least goes first


class RunningBatch(Protocol):
    ticket: int
    part: float  # of the device, that it keeps busy; 0: nobody waits for it
    sent_ns: int
    expected_ns: float


class QueuedService(Protocol):
    @property
    def queued(self) -> bool: ...

    @property
    def may_follow(self) -> bool:
        """Its next batch may go whether or not there is room: nothing of it runs, or the batch is
        full."""
        ...

    def needs_no_room(self, room_in_ns: float) -> bool:
        """Its next batch need not wait until there is room on the device."""
        ...

    def urgency(self) -> Urgency:
        """Of what goes first in its queue."""
        ...

    def send(self) -> bool:
        """Order the next batch; False: it has to wait for something else than room."""
        ...


class FrontQueue:
    """``row`` is the front's own of the counters, that of no service; ``taken`` adds up what all
    fronts have counted there."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        row: memoryview,
        taken: Callable[[], int],
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.loop = loop
        self.epoch = 0  # of the device process; 0: there is none
        self.now_ns = now_ns
        self.row = row
        self._taken = taken
        self._number = 0
        self._running: dict[int, RunningBatch] = {}  # by ticket
        self._waiting: dict[QueuedService, None] = {}  # and some that do not any more
        self.concurrency = Concurrency()
        self._count()

    def number(self) -> int:
        """Another one than ever before."""
        self._number += 1
        return self._number

    def begun(self, batch: RunningBatch) -> None:
        if batch.part:
            self._running[batch.ticket] = batch
            self._count()

    def ended(self, batch: RunningBatch) -> None:
        if self._running.pop(batch.ticket, None) is not None:
            self._count()

    def _count(self) -> None:
        self.row[Count.TAKEN] = round(_PARTS * sum(one.part for one in self._running.values()))

    @property
    def full(self) -> bool:
        return bool(self._running) and self._taken() >= self.concurrency.several * _FULL * _PARTS

    def _first_end_ns(self) -> float:
        """Until one of those that run has ended."""
        now_ns = self.now_ns()
        return min(left_ns(one, now_ns) for one in self._running.values())

    def advance(self, service: QueuedService | None = None) -> None:
        """Order from the device what may go now. ``service`` has something new in its queue."""
        if service is not None:
            self._waiting[service] = None
        if not self.epoch or not self._waiting:
            return
        ready = [one for one in self._waiting if one.queued]
        self._waiting = dict.fromkeys(ready)
        while ready:
            if self.full:
                room_ns = self._first_end_ns()
                several = self.concurrency.several > 0.0
                ready = [
                    one
                    for one in ready
                    if one.may_follow or (several and one.needs_no_room(room_ns))
                ]
                if not ready:
                    return
            first = min(ready, key=_urgency) if len(ready) > 1 else ready[0]
            if not first.send() or not first.queued:
                ready.remove(first)


def left_ns(batch: RunningBatch, now_ns: int) -> float:
    """Of a batch that runs."""
    left = batch.expected_ns - (now_ns - batch.sent_ns)
    return max(left, _LEAST_LEFT * batch.expected_ns)


def _urgency(service: QueuedService) -> Urgency:
    return service.urgency()
