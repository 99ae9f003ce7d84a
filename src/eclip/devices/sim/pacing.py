"""Simulated time at the speed of the clock: the simulator serves submitted requests.

A thread lets the core run ahead to the next completion and sleeps until the clock is there. What
happens meanwhile (a request is submitted or given up, a deadline passes) takes it back to where the
clock was last and forward again, so a request arrives in the simulation at exactly the time of its
submission, and ends are as in a run with these arrivals. Completions are given out when the clock
has reached them: never early, and late by what the thread needs to wake up (``lateness_ns``).

Only this thread touches the core's state. Between two calls of ``advance`` it puts arrivals into a
worker's part of ``Setup.arrivals``, takes those out that are given up, and shortens the request of
a worker that is to stop at its next joint.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Iterator

import numpy as np

from eclip.devices.base import CLOSED
from eclip.devices.requests import (
    ARRIVAL,
    EXPIRES,
    FOREVER_NS,
    GIVEN_UP,
    HAS_EXPIRED,
    OWN,
    SERVED,
    WAS_CANCELLED,
    WITH_RESULT,
    Desk,
    Ints,
)
from eclip.devices.sim import core, stretches
from eclip.devices.sim.stretches import AT_JOINT, DELAY, IDLE
from eclip.jit import compiled_with

# What is simulated ahead may be simulated again. Of a busy device this much takes well below a
# millisecond.
_AHEAD_NS = 5_000_000
_KEPT = 1 << 14  # latenesses


class _Queue:
    """A worker's requests that are open, and its part of the core's arrivals."""

    def __init__(self, first: int, rows: int, stretches: int) -> None:
        self.first, self.end = first, first + rows
        self.stretches = stretches  # of a whole request
        self.waiting: deque[int] = deque()  # numbers of those whose arrivals the core has
        self.over: dict[int, int] = {}  # outcomes of those that will not begin, by number
        self.seen = 0  # submitted
        self.runs_own = False  # the one that ends next is its own, though others wait
        self.stopping = WITH_RESULT  # how the one that runs will end


@compiled_with(core.__file__, stretches.__file__)
def _run_ahead(m: core.Setup, s: core.State, until: float, own: Ints) -> int:
    """Simulate up to there, or until a request ends that is nobody's own: how many rows tell of
    such. Those that workers run for themselves are counted."""
    clock = s.clock[0]
    while core.advance(m, s, until, False) == core.BUFFER_FULL:
        kept = 0
        for row in range(clock["requests"]):
            worker = s.request_rows[row, 0]
            if s.workers[worker]["closed"]:
                own[worker] += 1
            else:
                s.request_rows[kept] = s.request_rows[row]
                kept += 1
        clock["requests"] = 0
        if kept:
            return kept
    return 0


class Pacer(threading.Thread):
    """Serves a desk until it is stopped."""

    def __init__(self, machine: core.Setup, state: core.State, desk: Desk) -> None:
        """``machine`` has as many places for arrivals as each worker has slots."""
        super().__init__(name="eclip-sim", daemon=True)
        self._machine = machine
        self._state = state
        self._desk = desk
        self._news = threading.Event()
        self._over = False
        self._lateness_ns: deque[int] = deque(maxlen=_KEPT)
        rows = [len(ring.rows) for ring in desk.rings]
        firsts = np.cumsum([0, *rows[:-1]]).tolist()
        self._queues = [
            _Queue(first, count, int(given["stretches"]))
            for first, count, given in zip(firsts, rows, machine.conducts.given, strict=True)
        ]
        _run_ahead(machine, state, -1.0, np.zeros(len(rows), dtype=np.int64))  # compiles
        self._deadlines: list[tuple[int, int, int]] = []  # a heap: when, worker, number
        # What time has passed for certain; the state itself may be ahead.
        self._own: Ints = np.zeros(len(desk.rings), dtype=np.int64)  # requests that ended
        self._changing = (
            self._own,
            *(state.workers, state.clock, state.queue_holder),
            *(state.joined.board, state.joined.progress, state.joined.wake),
            state.joined.unsettled,
        )
        self._present = [part.copy() for part in self._changing]
        self._zero_ns = time.monotonic_ns()  # after compiling, which time does not wait for
        self._now = 0
        self._ended: list[list[int]] = []  # rows ahead of the clock: worker, arrival, start, end

    def accepted(self, worker: int, now_ns: int) -> None:
        self._news.set()

    def given_up(self, worker: int) -> None:
        self._news.set()

    def stop(self) -> None:
        self._over = True
        self._news.set()
        if self.ident is not None:
            self.join()

    @property
    def lateness_ns(self) -> Ints:
        """Of the last completions: when they were given out, after their simulated ends."""
        return np.array(self._lateness_ns, dtype=np.int64)

    def run(self) -> None:
        desk = self._desk
        try:
            while not self._over:
                self._sleep_until(self._look_ahead())
                changes = self._take_changes()
                for at, worker, number, outcome in changes:
                    self._advance_to(at)
                    self._change(at, worker, number, outcome)
                self._advance_to(self._now)
                self._keep()
                self._count_own()
        except BaseException as error:
            desk.refuse("the simulator has failed; open another session", str(error))
            raise
        finally:
            desk.refuse(CLOSED)
            for ring in desk.rings:
                desk.answer_all(ring)

    def _sleep_until(self, due_ns: int | None) -> None:
        if due_ns is None:
            self._news.wait()
            return
        left_ns = due_ns + self._zero_ns - time.monotonic_ns()
        if left_ns > 0:
            self._news.wait(left_ns / 1e9)

    # --- Running ahead ------------------------------------------------------------------------

    def _look_ahead(self) -> int | None:
        """Simulate what comes next if nothing happens; when to look at the clock again."""
        horizon = self._now + _AHEAD_NS
        if self._deadlines:
            horizon = min(horizon, self._deadlines[0][0])
        elif not self._busy():
            return None
        if not any(queue.waiting for queue in self._queues):
            return horizon  # of what is nobody's but the workers' own, no one waits for the end
        # A nanosecond more, since ends are rounded.
        return self._ended[0][3] + 1 if self._simulate(horizon) else horizon

    def _busy(self) -> bool:
        return bool(np.any(self._state.workers["phase"] != IDLE)) or any(
            queue.waiting or ring.marks[OWN]
            for queue, ring in zip(self._queues, self._desk.rings, strict=True)
        )

    def _simulate(self, until: int) -> bool:
        """Up to there, or to the end of a request that is nobody's own: then True."""
        ended = _run_ahead(self._machine, self._state, float(until), self._own)
        self._ended = self._state.request_rows[:ended].tolist()
        return ended > 0

    def _count_own(self) -> None:
        for ring, ended in zip(self._desk.rings, self._own, strict=True):
            ring.marks[SERVED] += ended
        self._own[:] = 0
        self._present[0][:] = 0

    def _keep(self) -> None:
        for kept, part in zip(self._present, self._changing, strict=True):
            np.copyto(kept, part)

    def _go_back(self) -> None:
        for kept, part in zip(self._present, self._changing, strict=True):
            np.copyto(part, kept)
        self._ended.clear()

    def _advance_to(self, at: int) -> None:
        """The clock is there, or beyond: what ended before is given out."""
        if self._state.clock[0]["now"] > at:
            self._go_back()
        self._give_out()
        while self._simulate(at):
            self._give_out()
        self._give_out()

    # --- Completions --------------------------------------------------------------------------

    def _give_out(self) -> None:
        if not self._ended:
            return
        answered = False
        for worker, _, start, end in self._ended:
            queue, ring = self._queues[worker], self._desk.rings[worker]
            if queue.runs_own:
                queue.runs_own = False
                ring.marks[SERVED] += 1
            else:
                self._answer(worker, start, end)
                answered = True
            self._go_on_with_own(worker)
        self._ended.clear()
        self._keep()
        if answered:
            self._desk.wake()

    def _answer(self, worker: int, start: int, end: int) -> None:
        queue, ring = self._queues[worker], self._desk.rings[worker]
        outcome, queue.stopping = queue.stopping, WITH_RESULT
        queue.waiting.popleft()
        # The next request is a whole one again; it may have begun.
        self._machine.conducts.given[worker]["stretches"] = queue.stretches
        self._state.joined.unsettled[0] = 1
        ring.marks[SERVED] += outcome == WITH_RESULT
        self._lateness_ns.append(time.monotonic_ns() - self._zero_ns - end)
        ring.answer(self._zero_ns + start, self._zero_ns + end, outcome)
        self._answer_over(worker)

    def _answer_over(self, worker: int) -> None:
        """Those that will not begin and whose turn has come."""
        queue, ring = self._queues[worker], self._desk.rings[worker]
        while (outcome := queue.over.pop(ring.answered, None)) is not None:
            now = time.monotonic_ns()
            ring.answer(now, now, outcome)

    def _go_on_with_own(self, worker: int) -> None:
        """If it is background that has nothing submitted."""
        row = self._state.workers[worker]
        if self._desk.rings[worker].marks[OWN] and not self._queues[worker].waiting:
            row["closed"] = 1
            self._queues[worker].runs_own = False
            if row["phase"] == IDLE:
                row["due"] = self._state.clock[0]["now"]

    # --- Changes ------------------------------------------------------------------------------

    def _take_changes(self) -> list[tuple[int, int, int, int]]:
        """In time: when, worker, number, and how it is to end. A result: it is new."""
        found = []
        news = self._news.is_set()
        self._news.clear()
        with self._desk.lock:  # whoever submitted before `now` has put it into its ring
            self._now = now = time.monotonic_ns() - self._zero_ns
            for worker in range(len(self._queues)) if news else ():
                found += self._news_of(worker)
        while self._deadlines and self._deadlines[0][0] <= now:
            found.append((*heapq.heappop(self._deadlines), HAS_EXPIRED))
        return sorted(found)

    def _news_of(self, worker: int) -> Iterator[tuple[int, int, int, int]]:
        queue, ring = self._queues[worker], self._desk.rings[worker]
        for number in range(ring.answered, ring.submitted):
            row = ring.row(number).tolist()
            if number >= queue.seen:
                yield row[ARRIVAL] - self._zero_ns, worker, number, WITH_RESULT
                if row[ARRIVAL] < row[EXPIRES] < FOREVER_NS:
                    deadline = (row[EXPIRES] - self._zero_ns, worker, number)
                    heapq.heappush(self._deadlines, deadline)
            if row[GIVEN_UP]:
                yield self._now, worker, number, WAS_CANCELLED
        queue.seen = ring.submitted

    def _change(self, at: int, worker: int, number: int, outcome: int) -> None:
        queue, ring = self._queues[worker], self._desk.rings[worker]
        if outcome == WITH_RESULT:
            self._arrive(at, worker, number)
        elif number < ring.answered or number in queue.over:
            return
        elif self._has_begun(worker, number):
            self._stop_at_joint(at, worker, outcome)
        else:
            self._take_out(worker, number)
            self._end_unbegun(worker, number, outcome)

    def _end_unbegun(self, worker: int, number: int, outcome: int) -> None:
        self._queues[worker].over[number] = outcome
        self._answer_over(worker)
        self._go_on_with_own(worker)
        self._desk.wake()

    def _has_begun(self, worker: int, number: int) -> bool:
        """Its arrival was taken: it is the first of those in the core, and all others wait."""
        queue, row = self._queues[worker], self._state.workers[worker]
        untaken = int(row["arrival_end"] - row["next_arrival"])
        return bool(queue.waiting) and number == queue.waiting[0] and untaken < len(queue.waiting)

    def _arrive(self, at: int, worker: int, number: int) -> None:
        queue, row = self._queues[worker], self._state.workers[worker]
        if self._desk.rings[worker].row(number)[EXPIRES] <= at + self._zero_ns:
            self._end_unbegun(worker, number, HAS_EXPIRED)
            return
        self._make_room(worker)
        self._machine.arrivals[row["arrival_end"]] = at
        row["arrival_end"] += 1
        queue.waiting.append(number)
        if row["closed"]:
            row["closed"] = 0
            queue.runs_own = bool(row["phase"] != IDLE)
        if row["phase"] == IDLE:
            row["due"] = max(float(at), float(self._state.clock[0]["now"]))

    def _make_room(self, worker: int) -> None:
        """At the end of its part of the arrivals: those that wait go to its beginning."""
        queue, row = self._queues[worker], self._state.workers[worker]
        if row["arrival_end"] < queue.end:
            return
        arrivals = self._machine.arrivals
        untaken = arrivals[row["next_arrival"] : row["arrival_end"]].copy()
        arrivals[queue.first : queue.first + len(untaken)] = untaken
        row["next_arrival"] = queue.first
        row["arrival_end"] = queue.first + len(untaken)

    def _take_out(self, worker: int, number: int) -> None:
        queue, row = self._queues[worker], self._state.workers[worker]
        behind = len(queue.waiting) - queue.waiting.index(number)
        queue.waiting.remove(number)
        arrivals, end = self._machine.arrivals, int(row["arrival_end"])
        arrivals[end - behind : end - 1] = arrivals[end - behind + 1 : end].copy()
        row["arrival_end"] = end - 1
        if row["phase"] == IDLE:
            left = row["next_arrival"] < row["arrival_end"]
            row["due"] = arrivals[row["next_arrival"]] if left else np.inf

    def _stop_at_joint(self, at: int, worker: int, outcome: int) -> None:
        """What it has launched runs to its end, and nothing more is launched."""
        queue, row = self._queues[worker], self._state.workers[worker]
        given, progress = self._machine.conducts.given[worker], self._state.joined.progress[worker]
        if not given["jointed"] or progress["launched"] == queue.stretches or queue.stopping:
            return
        queue.stopping = outcome
        if row["phase"] == AT_JOINT and progress["launched"] == progress["done"]:
            progress["held"] = 0
            row["kernel"] = row["route_end"]
            row["phase"] = DELAY
            row["due"] = max(float(at), float(self._state.clock[0]["now"]))
        else:
            given["stretches"] = progress["launched"]
