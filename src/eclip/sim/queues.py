"""A worker's submitted requests in the simulator: what its ring holds, as the core reads it.

Between two calls of the core, arrivals are put into the worker's part of ``Setup.arrivals`` or
taken out again, and a request that is to stop at its next joint is shortened to the stretches that
it has launched. Times are the core's.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from eclip.core.credit import charge, expect
from eclip.core.requests import HAS_EXPIRED, OWN, SERVED, WITH_RESULT, Ring
from eclip.sim import events
from eclip.sim.stretches import AT_JOINT, DELAY, IDLE


class WorkerQueue:
    """Nothing here is changed while the core runs ahead of the clock."""

    def __init__(
        self, machine: events.Setup, state: events.State, ring: Ring, worker: int, first: int
    ) -> None:
        """``first``: where its part of the arrivals begins; it has a place for each row."""
        self.ring = ring
        self.waiting: deque[int] = deque()  # numbers of those that the core has, the running one's
        self._over: dict[int, int] = {}  # outcomes of those that will not begin, by number
        self._runs_own = False  # the one that ends next is its own, though others wait
        self._stopping = WITH_RESULT  # how the one that runs will end
        self._first, self._end = first, first + len(ring.rows)
        self._arrivals = machine.arrivals
        self._given = machine.stretches.joints[worker]
        self._stretches = int(self._given["stretches"])
        self._clock = state.clock[0]
        self._row = state.workers[worker]
        self._progress = state.joined.progress[worker]
        self._unsettled = state.joined.unsettled
        self._board, self._number = state.joined.board, worker

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.ring.marks[OWN] or self._row["phase"] != IDLE)

    def arrive(self, at: int, number: int) -> None:
        row = self._row
        self._make_room()
        self._arrivals[row["arrival_end"]] = at
        row["arrival_end"] += 1
        self.waiting.append(number)
        if row["closed"]:
            row["closed"] = 0
            self._runs_own = bool(row["phase"] != IDLE)
        if row["phase"] == IDLE:
            row["due"] = max(float(at), float(self._clock["now"]))
        elif self._given["request_ns"]:
            before_ns = (len(self.waiting) - 1) * int(self._given["request_ns"])
            expect(self._board, self._number, at + int(self._given["bound_ns"]), before_ns, at)

    def end_early(self, at: int, at_ns: int, number: int, outcome: int) -> None:
        """Without a result: now (``at_ns`` is the clock's), when its turn comes, or at its next
        joint. What has ended, and what has no joint left, stays as it is."""
        if number < self.ring.answered or number in self._over:
            return
        if number not in self.waiting:
            self._over[number] = outcome
        elif self._has_begun(number):
            self._stop_at_joint(at, outcome)
            return
        else:
            self._take_out(number)
            self._over[number] = outcome
            if outcome == HAS_EXPIRED:
                charge(self._board, self._number, True, False, at)
        self._answer_over(at_ns)
        self._go_on()

    def ended(self, start_ns: int, end_ns: int) -> bool:
        """The core has ended a request, between these times of the clock; whether somebody had
        submitted it."""
        submitted = not self._runs_own
        if submitted:
            self.waiting.popleft()
            self.ring.marks[SERVED] += self._stopping == WITH_RESULT
            self.ring.answer(start_ns, end_ns, self._stopping)
            self._stopping = WITH_RESULT
            # The next request is a whole one again; it may have begun.
            self._given["stretches"] = self._stretches
            self._unsettled[0] = 1
            self._answer_over(end_ns)
        else:
            self._runs_own = False
            self.ring.marks[SERVED] += 1
        self._go_on()
        return submitted

    def _answer_over(self, now_ns: int) -> None:
        """Those that will not begin and whose turn has come."""
        while (outcome := self._over.pop(self.ring.answered, None)) is not None:
            self.ring.answer(now_ns, now_ns, outcome)

    def _go_on(self) -> None:
        """With requests of its own, if it is background and nothing else waits."""
        if self.ring.marks[OWN] and not self.waiting:
            self._row["closed"] = 1
            self._runs_own = False
            if self._row["phase"] == IDLE:
                self._row["due"] = self._clock["now"]

    def _has_begun(self, number: int) -> bool:
        """The first one's arrival was taken."""
        untaken = int(self._row["arrival_end"] - self._row["next_arrival"])
        return number == self.waiting[0] and untaken < len(self.waiting)

    def _make_room(self) -> None:
        """At the end of its part of the arrivals: those that wait go to its beginning."""
        row, arrivals = self._row, self._arrivals
        if row["arrival_end"] < self._end:
            return
        untaken = arrivals[row["next_arrival"] : row["arrival_end"]].copy()
        arrivals[self._first : self._first + len(untaken)] = untaken
        row["next_arrival"] = self._first
        row["arrival_end"] = self._first + len(untaken)

    def _take_out(self, number: int) -> None:
        row, arrivals = self._row, self._arrivals
        behind = len(self.waiting) - self.waiting.index(number)
        self.waiting.remove(number)
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
