"""Submitted requests in the simulator: what a session's doors hold, as the core reads it.

Between two calls of the core, arrivals are put into a worker's part of ``Setup.arrivals`` or taken
out again, and a request that is to stop at its next joint is shortened to the stretches that it has
launched. Times are the core's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from eclip.core.credit import charge, expect
from eclip.core.requests import HAS_EXPIRED, HAS_FAILED, SERVED, WITH_RESULT, Ints, Ring
from eclip.sim import events
from eclip.sim.stretches import AT_JOINT, DELAY, IDLE

Ended = tuple[int, int, int]  # start and end by the clock, and the outcome


@dataclass(eq=False, slots=True)
class Entry:
    """A row of a ring that is not answered."""

    number: int
    worker: int
    begin: Callable[[], Future[Any] | None]  # what is computed while the core takes its time
    work: Future[Any] | None = None
    in_core: bool = False
    ended: Ended | None = None

    @property
    def is_over(self) -> bool:
        return self.ended is not None and (self.work is None or self.work.done())


class RingQueue:
    """The rows of a ring that are not answered, in their order: that is how they are answered."""

    def __init__(self, ring: Ring, wakeup: int) -> None:
        self.ring = ring
        self.wakeup = wakeup
        self.entries: deque[Entry] = deque()
        self.seen = ring.answered  # of those submitted
        self._ended_ns = 0

    def answer(self, now_ns: int) -> int:
        """Those that are over and whose turn has come: how many."""
        count = 0
        while self.entries and self.entries[0].is_over:
            entry = self.entries.popleft()
            assert entry.ended is not None
            start_ns, end_ns, outcome = entry.ended
            if entry.work is not None:
                end_ns = max(end_ns, now_ns)
                if outcome == WITH_RESULT and entry.work.exception() is not None:
                    outcome = HAS_FAILED
            if not entry.in_core:
                start_ns = end_ns = max(end_ns, self._ended_ns)
            self._ended_ns = end_ns
            self.ring.answer(start_ns, end_ns, outcome)
            count += 1
        return count


class GroupQueue:
    """The entries of a group that the core has not ended. Those of one worker wait in the core, in
    whose time they follow each other; others follow when these have ended."""

    def __init__(self, queues: Sequence[WorkerQueue]) -> None:
        self._queues = {queue.worker: queue for queue in queues}
        self._entries: deque[Entry] = deque()
        self._in_core = 0  # so many of them, from the first on

    @property
    def waiting(self) -> bool:
        return bool(self._entries)

    def arrive(self, at: int, entry: Entry) -> None:
        self._entries.append(entry)
        self._hand_on(at)

    def end_early(self, at: int, at_ns: int, entry: Entry, outcome: int) -> None:
        """Without a result: at once (``at_ns`` is the clock's), or at its next joint. What has no
        joint left stays as it is."""
        if entry.ended is not None:
            return
        if entry.in_core:
            queue = self._queues[entry.worker]
            if not queue.end_early(at, entry, outcome):
                return
            entry.in_core = False
            self._in_core -= 1
        if entry in self._entries:
            self._entries.remove(entry)
        entry.ended = (at_ns, at_ns, outcome)
        self._hand_on(at)

    def ended(self, worker: int, at: int, start_ns: int, end_ns: int) -> bool:
        """The core has ended a request of a worker; whether it was submitted."""
        found = self._queues[worker].ended()
        if found is None:
            return False
        entry, outcome = found
        self._entries.remove(entry)
        self._in_core -= 1
        entry.ended = (start_ns, end_ns, outcome)
        self._hand_on(at)
        return True

    def _hand_on(self, at: int) -> None:
        while self._in_core < len(self._entries):
            entry = self._entries[self._in_core]
            queue = self._queues[entry.worker]
            if entry.worker != self._entries[0].worker or queue.full:
                return
            entry.in_core = True
            self._in_core += 1
            entry.work = entry.begin()
            queue.arrive(at, entry)


class WorkerQueue:
    """Nothing here is changed while the core runs ahead of the clock."""

    def __init__(
        self,
        machine: events.Setup,
        state: events.State,
        worker: int,
        part: range,
        own: bool,
        counts: Ints,
    ) -> None:
        """``part``: its places in the arrivals. ``own``: it runs requests of its own while none
        waits. ``counts``: what it has counted, here."""
        self.worker = worker
        self.waiting: deque[Entry] = deque()  # those that the core has, the running one's too
        self._own = own
        self._counts = counts
        self._runs_own = False  # the one that ends next is its own, though others wait
        self._stopping = WITH_RESULT  # how the one that runs will end
        self._first, self._end = part.start, part.stop
        self._arrivals = machine.arrivals
        self._given = machine.stretches.joints[worker]
        self._stretches = int(self._given["stretches"])
        self._clock = state.clock[0]
        self._row = state.workers[worker]
        self._progress = state.joined.progress[worker]
        self._unsettled = state.joined.unsettled
        self._board = state.joined.board

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self._own or self._row["phase"] != IDLE)

    @property
    def full(self) -> bool:
        return len(self.waiting) >= self._end - self._first

    def arrive(self, at: int, entry: Entry) -> None:
        row = self._row
        self._make_room()
        self._arrivals[row["arrival_end"]] = at
        row["arrival_end"] += 1
        self.waiting.append(entry)
        if row["closed"]:
            row["closed"] = 0
            self._runs_own = bool(row["phase"] != IDLE)
        if row["phase"] == IDLE:
            row["due"] = max(float(at), float(self._clock["now"]))
        elif self._given["request_ns"]:
            before_ns = (len(self.waiting) - 1) * int(self._given["request_ns"])
            expect(self._board, self.worker, at + int(self._given["bound_ns"]), before_ns, at)

    def end_early(self, at: int, entry: Entry, outcome: int) -> bool:
        """Whether it is taken out; one that has begun stops at its next joint."""
        if self._has_begun(entry):
            self._stop_at_joint(at, outcome)
            return False
        self._take_out(entry)
        if outcome == HAS_EXPIRED:
            charge(self._board, self.worker, True, False, at)
        self._go_on()
        return True

    def ended(self) -> tuple[Entry, int] | None:
        """The core has ended a request: which one, and how; None: its own."""
        found = None
        if self._runs_own or not self.waiting:
            self._runs_own = False
            self._counts[SERVED] += 1
        else:
            found = self.waiting.popleft(), self._stopping
            self._counts[SERVED] += self._stopping == WITH_RESULT
            self._stopping = WITH_RESULT
            # The next request is a whole one again; it may have begun.
            self._given["stretches"] = self._stretches
            self._unsettled[0] = 1
        self._go_on()
        return found

    def _go_on(self) -> None:
        """With requests of its own, if it is background and nothing else waits."""
        if self._own and not self.waiting:
            self._row["closed"] = 1
            self._runs_own = False
            if self._row["phase"] == IDLE:
                self._row["due"] = self._clock["now"]

    def _has_begun(self, entry: Entry) -> bool:
        """The first one's arrival was taken."""
        untaken = int(self._row["arrival_end"] - self._row["next_arrival"])
        return entry is self.waiting[0] and untaken < len(self.waiting)

    def _make_room(self) -> None:
        """At the end of its part of the arrivals: those that wait go to its beginning."""
        row, arrivals = self._row, self._arrivals
        if row["arrival_end"] < self._end:
            return
        untaken = arrivals[row["next_arrival"] : row["arrival_end"]].copy()
        arrivals[self._first : self._first + len(untaken)] = untaken
        row["next_arrival"] = self._first
        row["arrival_end"] = self._first + len(untaken)

    def _take_out(self, entry: Entry) -> None:
        row, arrivals = self._row, self._arrivals
        behind = len(self.waiting) - self.waiting.index(entry)
        self.waiting.remove(entry)
        end = int(row["arrival_end"])
        arrivals[end - behind : end - 1] = arrivals[end - behind + 1 : end].copy()
        row["arrival_end"] = end - 1
        if row["phase"] == IDLE:
            left = row["next_arrival"] < row["arrival_end"]
            row["due"] = arrivals[row["next_arrival"]] if left else np.inf

    def _stop_at_joint(self, at: int, outcome: int) -> None:
        """What it has launched runs to its end, and nothing more is launched."""
        row, launched = self._row, int(self._progress["launched"])
        if not self._given["jointed"] or launched == self._stretches or self._stopping:
            return
        self._stopping = self._progress["outcome"] = outcome
        if row["phase"] == AT_JOINT and launched == self._progress["done"]:
            self._progress["held"] = 0
            row["kernel"] = row["route_end"]
            row["phase"] = DELAY
            row["due"] = max(float(at), float(self._clock["now"]))
        else:
            self._given["stretches"] = launched
