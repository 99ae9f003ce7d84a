"""Counters: what every process has counted of every service, in memory that all of them see.

A page for every front and one for the device process; in a page a row of 64-bit words for every
service, and one for all. Only the page's owner writes it, so no lock is needed. A reader adds up
the pages. A process that starts anew goes on counting in its predecessor's page.
"""

from __future__ import annotations

import bisect
import enum
import mmap
import os
import time
from pathlib import Path

from eclip.core.device import Closing
from eclip.core.mix import MAX_WORKERS
from eclip.server.link import allocate
from eclip.server.messages import BUCKETS_S, Durations, Phase, Reason, Statistics

ROWS = 128  # services by name, over the life of a server; row 0 belongs to no service
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_BUCKETS_NS = [round(1e9 * end) for end in BUCKETS_S]
_REASONS = {reason: place for place, reason in enumerate(Reason)}


class Count(enum.IntEnum):
    """The words of a row. Phases have a number and, in the next word, nanoseconds."""

    SUCCESS = 0
    FAIL = 2
    QUEUE = 4
    INPUT = 6
    INFER = 8
    OUTPUT = 10
    INFERENCES = 12
    EXECUTIONS = 13
    LAST_MS = 14
    ARRIVED = 15  # requests that were understood, accepted or not
    LATE = 16  # answered after the bound
    AGAIN = 17  # run again because the device process died
    WAITING = 18  # now: rows in the queue
    RUNNING = 19  # now: batches on the device
    DUE_NS = 20  # now: when the most urgent request is due; 0: none
    BUSY_NS = 21  # of the device process: how long something of it ran
    YIELDS = 22  # of the device process: how often it gave way
    TAKEN = 23  # now, in row 0: parts of the device that batches keep busy, in thousandths
    REFUSED = 24  # and a word for each reason
    ENERGY_MJ = 38  # of the device process, in row 0: what the device has drawn
    METERED_NS = 39  # of the device process, in row 0: until when
    LATENCIES = 40  # a histogram
    QUEUED = 64  # a histogram
    HEARTBEAT_NS = 88  # of each process, in row 0: when its loop went round last
    CONNECTIONS = 89  # now, in row 0: of HTTP
    CONNECTED = 90  # in row 0: connections of HTTP since the start
    CPU_NS = 91  # of each process, in row 0, like what follows
    MEMORY_BYTES = 92  # resident
    DESCRIPTORS = 93  # open
    OPEN = 96  # now, and a word for each replica: batches handed to it


WORDS = Count.OPEN + MAX_WORKERS  # of a row


class CounterPages(Closing):
    """Opened from one descriptor, which it owns."""

    def __init__(self, descriptor: int, fronts: int) -> None:
        self.descriptor = descriptor
        self.fronts = fronts
        self._memory = mmap.mmap(descriptor, _size(fronts))
        self._words = memoryview(self._memory).cast("q")

    @classmethod
    def create(cls, fronts: int) -> CounterPages:
        return cls(allocate("eclip-counters", _size(fronts)), fronts)

    def row(self, page: int, service: int) -> memoryview:
        """To read or, for the owner of the page, to write."""
        first = (page * ROWS + service) * WORDS
        return self._words[first : first + WORDS]

    def of_device(self, service: int) -> memoryview:
        return self.row(self.fronts, service)

    def total(self, service: int, word: int) -> int:
        """Of all fronts."""
        at, page = service * WORDS + word, ROWS * WORDS
        return sum(self._words[at + front * page] for front in range(self.fronts))

    def totals(self, service: int, first: int, count: int) -> list[int]:
        return [self.total(service, word) for word in range(first, first + count)]

    def forget(self, front: int) -> None:
        """What is there now, of a front that is gone."""
        for service in range(ROWS):
            row = self.row(front, service)
            for word in (
                *(Count.WAITING, Count.RUNNING, Count.DUE_NS, Count.TAKEN, Count.CONNECTIONS),
                *range(Count.OPEN, WORDS),
            ):
                row[word] = 0
            row.release()

    def statistics(self, service: int) -> Statistics:
        def phase(count: Count) -> Phase:
            return Phase(self.total(service, count), self.total(service, count + 1))

        last_ms = max(self.row(front, service)[Count.LAST_MS] for front in range(self.fronts))
        return Statistics(
            success=phase(Count.SUCCESS),
            fail=phase(Count.FAIL),
            queue=phase(Count.QUEUE),
            compute_input=phase(Count.INPUT),
            compute_infer=phase(Count.INFER),
            compute_output=phase(Count.OUTPUT),
            inferences=self.total(service, Count.INFERENCES),
            executions=self.total(service, Count.EXECUTIONS),
            last_ms=last_ms,
        )

    def durations(self, service: int, histogram: Count, phase: Count) -> Durations:
        """A histogram, and the sum that its phase has."""
        buckets = self.totals(service, histogram, len(BUCKETS_S) + 1)
        return Durations(buckets, self.total(service, phase + 1) / 1e9)

    def refused(self, service: int) -> dict[Reason, int]:
        counts = self.totals(service, Count.REFUSED, len(_REASONS))
        return {reason: counts[place] for reason, place in _REASONS.items() if counts[place]}

    def close(self) -> None:
        self._words.release()
        self._memory.close()
        os.close(self.descriptor)


def beat(row: memoryview) -> None:
    """A process says, in its row 0, that its loop goes round, and what the process takes."""
    row[Count.HEARTBEAT_NS] = time.monotonic_ns()
    row[Count.CPU_NS] = time.process_time_ns()
    row[Count.MEMORY_BYTES] = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    row[Count.DESCRIPTORS] = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (an object for each)


def add(row: memoryview, word: int, amount: int = 1) -> None:
    row[word] += amount


def count(row: memoryview, phase: int, time_ns: int) -> None:
    row[phase] += 1
    row[phase + 1] += time_ns


def count_in(row: memoryview, histogram: int, time_ns: int) -> None:
    row[histogram + bisect.bisect_left(_BUCKETS_NS, time_ns)] += 1


def count_refused(row: memoryview, reason: Reason) -> None:
    row[Count.REFUSED + _REASONS[reason]] += 1


def _size(fronts: int) -> int:
    return (fronts + 1) * ROWS * WORDS * 8
