"""Simulated time at the speed of the clock: the simulator serves submitted requests.

A thread lets the core run ahead to the next completion and sleeps until the clock is there. What
happens meanwhile (a request is submitted or given up, a deadline passes) takes it back to where the
clock was last and forward again, so a request arrives in the simulation at exactly the time of its
submission, and ends are as in a run with these arrivals. Completions are given out when the clock
has reached them: never early, and late by what the thread needs to wake up (``lateness_ns``).

Only this thread touches the core's state.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import os
import select
import threading
import time
from collections import deque
from collections.abc import Iterator

import numpy as np

from eclip.core import credit, decide, rules
from eclip.core.device import CLOSED
from eclip.core.requests import (
    ADDRESS,
    ARRIVAL,
    EXPIRES,
    FOREVER_NS,
    GIVEN_UP,
    HAS_EXPIRED,
    HAS_FAILED,
    OWN,
    PROGRAM,
    SEEN,
    SERVED,
    WAS_CANCELLED,
    WITH_RESULT,
    YIELDED,
    Ints,
)
from eclip.desk import Desk
from eclip.jit import compiled_with
from eclip.sim import contention, events, stretches
from eclip.sim.queues import Entry, GroupQueue, RingQueue, WorkerQueue

# What is simulated ahead may be simulated again. Of a busy device this much takes well below a
# millisecond.
_AHEAD_NS = 5_000_000
_KEPT = 1 << 14  # latenesses

# When, which one after another, how it is to end (a result: it is new), of which group, and what.
Change = tuple[int, int, int, int, Entry]


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
        self.run(-1)  # compiles, as do the calls of queues
        board = joined.board.copy()
        credit.expect(board, 0, 1, 1, 0)
        credit.charge(board, 0, False, False, 0)

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
    """Serves a desk and the doors beside it until it is stopped."""

    def __init__(
        self, machine: events.Setup, state: events.State, desk: Desk, meter: Meter, places: int
    ) -> None:
        """``machine`` has so many places for arrivals of each worker."""
        super().__init__(name="eclip-sim", daemon=True)
        self._timeline = Timeline(machine, state, meter)
        self._desk = desk
        self._queues = [
            WorkerQueue(
                *(machine, state, worker, range(worker * places, (worker + 1) * places)),
                bool(desk.doors.loops[group, OWN] == program),
                desk.counts[worker],
            )
            for worker, (group, program) in enumerate(desk.places)
        ]
        self._groups = [
            GroupQueue([self._queues[worker] for worker in group.workers]) for group in desk.groups
        ]
        self._rings: dict[tuple[int, int], RingQueue] = {}  # by group and place of a door
        self._busy = [False] * len(desk.groups)
        self._deadlines: list[Change] = []  # a heap
        self._order = itertools.count()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._over = False
        self._lateness_ns: deque[int] = deque(maxlen=_KEPT)
        self._zero_ns = time.monotonic_ns()  # after compiling, which takes seconds
        self._now = 0  # simulated

    @property
    def bells(self) -> list[int]:
        return [self._bell] * len(self._groups)

    def ring(self, group: int) -> None:
        os.eventfd_write(self._bell, 1)

    def stop(self) -> None:
        self._over = True
        self.ring(0)
        if self.ident is not None:
            self.join()

    def close(self) -> None:
        """When it has stopped."""
        os.close(self._bell)

    @property
    def lateness_ns(self) -> Ints:
        """Of the last completions: when they were given out, after their simulated ends."""
        return np.array(self._lateness_ns, dtype=np.int64)

    def run(self) -> None:
        desk = self._desk
        try:
            while not self._over:
                left_s, due = None, self.look_ahead()
                if due is not None:
                    left_s = max(due + self._zero_ns - time.monotonic_ns(), 0) / 1e9
                select.select([self._bell], [], [], left_s)
                self.catch_up()
        except BaseException as error:
            desk.refuse("the simulator has failed; open another session", str(error))
            raise
        finally:
            desk.refuse(CLOSED)
            for group in range(len(self._groups)):
                desk.end(group)

    def catch_up(self) -> None:
        """Simulate what has happened up to the clock."""
        for at, _, outcome, group, entry in self._take_changes():
            self._advance_to(at)
            self._change(at, group, entry, outcome)
        self._advance_to(self._now)
        self._timeline.keep()
        self._answer()

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
        if not any(group.waiting for group in self._groups):
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
        for counts, own, yields in zip(
            self._desk.counts, timeline.own, timeline.yields, strict=True
        ):
            counts[SERVED] += own
            counts[YIELDED] = yields
        timeline.own[:] = 0

    def _give_out(self) -> None:
        if not self._timeline.ended:
            return
        for worker, _, start, end, _ in self._timeline.ended:
            zero_ns, (group, _) = self._zero_ns, self._desk.places[worker]
            if self._groups[group].ended(worker, end, zero_ns + start, zero_ns + end):
                self._lateness_ns.append(time.monotonic_ns() - zero_ns - end)
        self._timeline.ended = []
        self._timeline.keep()
        self._answer()

    def _answer(self) -> None:
        """All that is over, in the order of each ring."""
        now_ns = time.monotonic_ns()
        for (group, place), queue in list(self._rings.items()):
            door = self._desk.doors.table[group, place]
            if queue.entries and queue.answer(now_ns) and door[ADDRESS]:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_write(queue.wakeup, 1)
            if not queue.entries and not door[ADDRESS]:  # it was shut
                del self._rings[group, place]
                door[SEEN] = 0
        busy = [False] * len(self._groups)
        for (group, _), queue in self._rings.items():
            busy[group] |= bool(queue.entries)
        for group, (before, after) in enumerate(zip(self._busy, busy, strict=True)):
            if before != after:
                account = self._desk.groups[group].account
                self._desk.doors.accounts.count(account, 1 if after else -1, now_ns)
        self._busy = busy

    def _take_changes(self) -> list[Change]:
        """In the order of time."""
        found: list[Change] = []
        # A request submitted at the desk before `now` is in its ring, and news of it were given.
        # Without the lock, news between the look and its clearing would be lost.
        with self._desk.lock:
            before, news = self._now, False
            with contextlib.suppress(BlockingIOError):
                news = os.eventfd_read(self._bell) > 0
            self._now = now = time.monotonic_ns() - self._zero_ns
            for place, rings in enumerate(self._desk.doors.rings if news else ()):
                for group in range(len(rings)):
                    found += self._news_of(group, place, before)
        while self._deadlines and self._deadlines[0][0] <= now:
            found.append(heapq.heappop(self._deadlines))
        return sorted(found, key=lambda change: change[:3])

    def _news_of(self, group: int, place: int, before: int) -> Iterator[Change]:
        """Of a door, since the clock was ``before``."""
        doors = self._desk.doors
        is_open = bool(doors.table[group, place, ADDRESS])
        queue = self._rings.get((group, place))
        if queue is None:
            if not is_open:  # shut before it was seen, or left
                doors.table[group, place, SEEN] = 0
                return
            queue = RingQueue(doors.rings[place][group], doors.wakeups[place])
            self._rings[group, place] = queue
        # One look at all rows first: a queue may be long, and hardly any request is given up.
        for entry in queue.entries if queue.ring.rows[:, GIVEN_UP].any() else ():
            if queue.ring.row(entry.number)[GIVEN_UP]:
                yield self._now, next(self._order), WAS_CANCELLED, group, entry
        workers = self._desk.groups[group].workers
        while is_open and queue.seen < queue.ring.submitted:
            row = queue.ring.row(queue.seen)
            # In a ring of another process it may be seen a little late, or come while we look.
            at = min(max(row[ARRIVAL] - self._zero_ns, before), self._now)
            expires = row[EXPIRES] - self._zero_ns
            fits = 0 <= row[PROGRAM] < len(workers)
            begin = functools.partial(doors.compute[place], group, row.tolist())
            entry = Entry(queue.seen, workers[row[PROGRAM]] if fits else -1, begin)
            queue.entries.append(entry)
            queue.seen += 1
            number = next(self._order)
            if not fits:
                yield at, number, HAS_FAILED, group, entry
            elif expires <= at:
                yield at, number, HAS_EXPIRED, group, entry
            else:
                yield at, number, WITH_RESULT, group, entry
                if row[GIVEN_UP]:
                    yield self._now, next(self._order), WAS_CANCELLED, group, entry
                if row[EXPIRES] != FOREVER_NS:
                    last: Change = (expires, next(self._order), HAS_EXPIRED, group, entry)
                    heapq.heappush(self._deadlines, last)

    def _change(self, at: int, group: int, entry: Entry, outcome: int) -> None:
        if outcome == WITH_RESULT:
            self._groups[group].arrive(at, entry)
        else:
            self._groups[group].end_early(at, at + self._zero_ns, entry, outcome)
