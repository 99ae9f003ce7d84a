"""Counters: what every front has counted of every service, in memory that all of them see.

A row of 64-bit words for each front and service, and only that front writes it, so nobody locks.
Whoever reads adds up the rows of all fronts. A front that starts anew goes on counting in its row.
"""

from __future__ import annotations

import enum
import mmap
import os

from eclip.devices.base import Closing
from eclip.serving.link import allocate
from eclip.serving.messages import Phase, Statistics

ROWS = 256  # services by name, over the life of a server
_WORDS = 32


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
    REFUSED = 16
    EXPIRED = 17
    CANCELLED = 18
    LATE = 19  # answered after the bound
    AGAIN = 20  # run again because the device process died
    WAITING = 21  # now: rows in the queue
    RUNNING = 22  # now: batches on the device


class Counters(Closing):
    """All rows; opened from one descriptor, which it owns."""

    def __init__(self, descriptor: int, fronts: int) -> None:
        self.descriptor = descriptor
        self.fronts = fronts
        self._memory = mmap.mmap(descriptor, _size(fronts))
        self._words = memoryview(self._memory).cast("q")

    @classmethod
    def create(cls, fronts: int) -> Counters:
        return cls(allocate("eclip-counters", _size(fronts)), fronts)

    def row(self, front: int, service: int) -> memoryview:
        """The words of one front and service, to read or, for that front, to write."""
        first = (front * ROWS + service) * _WORDS
        return self._words[first : first + _WORDS]

    def total(self, service: int, word: int) -> int:
        """Of all fronts."""
        return sum(self.row(front, service)[word] for front in range(self.fronts))

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

    def close(self) -> None:
        self._words.release()
        self._memory.close()
        os.close(self.descriptor)


def _size(fronts: int) -> int:
    return fronts * ROWS * _WORDS * 8
