"""Simulated time at the speed of the clock: the simulator serves submitted requests.

A thread lets the core run ahead to the next completion and sleeps until the clock is there. What
happens meanwhile (a request is submitted or given up, a deadline passes) takes it back to where the
clock was last and forward again, so a request arrives in the simulation at exactly the time of its
submission, and ends are as in a run with these arrivals. Completions are given out when the clock
has reached them: never early, and late by what the thread needs to wake up (``lateness_ns``).

Only this thread touches the core's state.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Iterator

import numpy as np

from eclip.core import credit, decide, rules
from eclip.core.device import CLOSED
from eclip.core.requests import (
    ARRIVAL,
    EXPIRES,
    FOREVER_NS,
    GIVEN_UP,
    HAS_EXPIRED,
    SERVED,
    WAS_CANCELLED,
    WITH_RESULT,
    YIELDED,
    Desk,
    Ints,
)
from eclip.jit import compiled_with
from eclip.sim import contention, events, stretches
from eclip.sim.queues import WorkerQueue

# What is simulated ahead may be simulated again. Of a busy device this much takes well below a
# millisecond.
_AHEAD_NS = 5_000_000
_KEPT = 1 << 14  # latenesses

Change = tuple[
    int, int, int, int
]  # when, worker, number, and how it is to end; a result: it is new


@compiled_with(
    *(events.__file__, contention.__file__, stretches.__file__),
    *(decide.__file__, credit.__file__, rules.__file__),
)
def _run_ahead(m: events.Setup, s: events.State, until: float, own: Ints) -> int:
    """Simulate up to there, or until a request ends that is nobody's own: how many rows tell of
    such. Those that workers run for themselves are counted."""
    clock = s.clock[0]
    finish = bool(0)  # for the literal False numba would compile another ``advance``: three seconds
    while events.advance(m, s, until, finish) == events.BUFFER_FULL:
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


class Meter:
    """What a simulated device draws while its sessions serve: when idle, and what each of them
    adds."""

    def __init__(self, idle_w: float) -> None:
        self._idle_w = idle_w
        self._began_ns = time.monotonic_ns()
        self._added_nj = 0.0
        self._lock = threading.Lock()

    def above_idle_nj(self, clock: np.void) -> float:
        """What a session has added, by its clock."""
        return float(clock["energy_nj"] - self._idle_w * max(clock["now"], 0.0))

    def add(self, energy_nj: float) -> None:
        with self._lock:
            self._added_nj += energy_nj

    def energy_mj(self) -> int:
        idle_nj = self._idle_w * (time.monotonic_ns() - self._began_ns)
        return round((idle_nj + self._added_nj) / 1e6)


class Timeline:
    """The core's state, which may be ahead of the clock, and the state at the clock."""

    def __init__(self, machine: events.Setup, state: events.State, meter: Meter) -> None:
        """``state`` has as many rows for requests as there are workers: so the core stops whenever
        one has ended."""
        self._machine = machine
        self._state = state
        self.own: Ints = np.zeros(len(state.workers), dtype=np.int64)  # requests, by worker
        self.ended: list[list[int]] = []  # worker, arrival, start, end, verdict
        joined = state.joined
        self._changing = (
            *(self.own, state.workers, state.clock, state.queue_holder),
            *(joined.board, joined.progress, joined.wake, joined.unsettled),
        )
        self._kept = [part.copy() for part in self._changing]
        self._meter = meter
        self._metered_nj = 0.0
        self.run(-1)  # compiles

    @property
    def yields(self) -> Ints:
        """By worker, so far."""
        found: Ints = self._state.joined.progress["yields"]
        return found

    def is_past(self, at: int) -> bool:
        return bool(self._state.clock[0]["now"] > at)

    def run(self, until: int) -> bool:
        """Up to there, or to where a request has ended that is nobody's own: then True."""
        count = _run_ahead(self._machine, self._state, float(until), self.own)
        self.ended = self._state.request_rows[:count].tolist()
        return count > 0

    def keep(self) -> None:
        """The clock is there."""
        for kept, part in zip(self._kept, self._changing, strict=True):
            np.copyto(kept, part)
        drawn_nj = self._meter.above_idle_nj(self._state.clock[0])
        self._meter.add(drawn_nj - self._metered_nj)
        self._metered_nj = drawn_nj

    def go_back(self) -> None:
        for kept, part in zip(self._kept, self._changing, strict=True):
            np.copyto(part, kept)
        self.ended = []


class Pacer(threading.Thread):
    """Serves a desk until it is stopped."""

    def __init__(
        self, machine: events.Setup, state: events.State, desk: Desk, meter: Meter
    ) -> None:
        """``machine`` has as many places for arrivals as each worker has slots."""
        super().__init__(name="eclip-sim", daemon=True)
        self._timeline = Timeline(machine, state, meter)
        self._desk = desk
        firsts = np.cumsum([0, *(len(ring.rows) for ring in desk.rings)]).tolist()
        self._queues = [
            WorkerQueue(machine, state, ring, worker, firsts[worker])
            for worker, ring in enumerate(desk.rings)
        ]
        self._seen = [0] * len(desk.rings)  # of those submitted
        self._deadlines: list[tuple[int, int, int]] = []  # a heap: when, worker, number
        self._news = threading.Event()
        self._over = False
        self._lateness_ns: deque[int] = deque(maxlen=_KEPT)
        self._zero_ns = time.monotonic_ns()  # after compiling, which takes seconds
        self._now = 0  # simulated

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
                self._sleep_until(self.look_ahead())
                self.catch_up()
        except BaseException as error:
            desk.refuse("the simulator has failed; open another session", str(error))
            raise
        finally:
            desk.refuse(CLOSED)
            for ring in desk.rings:
                desk.answer_all(ring)

    def _sleep_until(self, due: int | None) -> None:
        if due is None:
            self._news.wait()
            return
        left_ns = due + self._zero_ns - time.monotonic_ns()
        if left_ns > 0:
            self._news.wait(left_ns / 1e9)

    def catch_up(self) -> None:
        """Simulate what has happened up to the clock."""
        for at, worker, number, outcome in self._take_changes():
            self._advance_to(at)
            self._change(at, worker, number, outcome)
        self._advance_to(self._now)
        self._timeline.keep()

    def look_ahead(self, at_most: int | None = None) -> int | None:
        """Simulate what comes next if nothing happens, up to there at most; when to look at the
        clock again."""
        horizon = self._now + _AHEAD_NS
        if at_most is not None:
            horizon = min(horizon, at_most)
        if self._deadlines:
            horizon = min(horizon, self._deadlines[0][0])
        elif not any(queue.busy for queue in self._queues):
            return None
        if not any(queue.waiting for queue in self._queues):
            return horizon  # nobody waits for the ends of what workers run for themselves
        # A nanosecond more, since ends are rounded.
        return self._timeline.ended[0][3] + 1 if self._timeline.run(horizon) else horizon

    def _advance_to(self, at: int) -> None:
        """The clock is there, or beyond: what ended before is given out."""
        timeline = self._timeline
        if timeline.is_past(at):
            timeline.go_back()
        self._give_out()
        while timeline.run(at):
            self._give_out()
        rings = zip(self._desk.rings, timeline.own, timeline.yields, strict=True)
        for ring, count, yields in rings:
            ring.marks[SERVED] += count
            ring.marks[YIELDED] = yields
        timeline.own[:] = 0

    def _give_out(self) -> None:
        if not self._timeline.ended:
            return
        for worker, _, start, end, _ in self._timeline.ended:
            zero_ns = self._zero_ns
            if self._queues[worker].ended(zero_ns + start, zero_ns + end):
                self._lateness_ns.append(time.monotonic_ns() - zero_ns - end)
        self._timeline.ended = []
        self._timeline.keep()
        self._desk.wake()

    def _take_changes(self) -> list[Change]:
        """In the order of time."""
        found: list[Change] = []
        # Whoever submitted before `now` has put it into its ring and given news of it. Without the
        # lock, news between the look and its clearing would be lost, and the request with them.
        with self._desk.lock:
            news = self._news.is_set()
            self._news.clear()
            self._now = now = time.monotonic_ns() - self._zero_ns
            for worker in range(len(self._queues)) if news else ():
                found += self._news_of(worker)
        while self._deadlines and self._deadlines[0][0] <= now:
            found.append((*heapq.heappop(self._deadlines), HAS_EXPIRED))
        return sorted(found)

    def _news_of(self, worker: int) -> Iterator[Change]:
        ring = self._desk.rings[worker]
        for number in range(ring.answered, ring.submitted):
            row = ring.row(number).tolist()
            arrival, expires = row[ARRIVAL] - self._zero_ns, row[EXPIRES] - self._zero_ns
            if number >= self._seen[worker]:
                yield arrival, worker, number, HAS_EXPIRED if expires <= arrival else WITH_RESULT
                if arrival < expires and row[EXPIRES] != FOREVER_NS:
                    heapq.heappush(self._deadlines, (expires, worker, number))
            if row[GIVEN_UP]:
                yield self._now, worker, number, WAS_CANCELLED
        self._seen[worker] = ring.submitted

    def _change(self, at: int, worker: int, number: int, outcome: int) -> None:
        queue, ring = self._queues[worker], self._desk.rings[worker]
        if outcome == WITH_RESULT:
            queue.arrive(at, number)
            return
        answered = ring.answered
        queue.end_early(at, at + self._zero_ns, number, outcome)
        if ring.answered > answered:
            self._desk.wake()
