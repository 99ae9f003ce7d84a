"""Submitted requests between those who submit and those who serve: rings, and the doors they form.

A ring is a row of 64-bit words for each request. The submitter fills a row and then raises
SUBMITTED; the loop that serves takes rows in that order, writes into each how it ended, and then
raises ANSWERED. So rows between the two marks are open, the first of them may be running, and no
lock is held while serving. Each word has one writer. A ring may lie in memory that processes share:
compiled loops read and raise marks with acquire and release; Python's writes keep their order on
x86-64, where alone fronts run so far.

A *group* of workers has one loop, which runs one request of them at a time: the workers are its
*programs*. A submitter has one ring for each group; these rings are a *door* of the session. A run
has one ring, which is filled beforehand; a session that serves has the door of its desk (desk.py),
and those that other processes open. A ring has as many rows as its submitter has slots, so it is
never full while a slot is free.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from eclip.errors import DeviceError

Ints = npt.NDArray[np.int64]

# The words of a request. The loop writes those from START to VERDICT and the outcome, the
# submitter all others; those after VERDICT are for requests that were submitted. DUE 0: its
# worker's bound after its arrival. PROGRAM is the worker's place in its group, ROWS what of a batch
# is filled.
ARRIVAL, START, END, BARRIERS, YIELDS, MOVES, PAUSE_NS, VERDICT = range(8)
COLUMNS = 8  # of a served request in a log
EXPIRES, SLOT, GIVEN_UP, OUTCOME, PROGRAM, ROWS, DUE = range(COLUMNS, COLUMNS + 7)
REQUEST_WORDS = 16
NO_SLOT = -1
FOREVER_NS = int(np.iinfo(np.int64).max)

# The words of a ring: a cache line for each writer's mark, and then its rows.
SUBMITTED, ANSWERED, FIRST_ROW = 0, 8, 16

# The words of a loop. OWN: the program that runs requests of its own while none is submitted.
# SEALED: no more are submitted. BELL is a descriptor that submitters ring, or none. DOORS: so many
# places for doors are in use. ACCOUNT: where it counts how long it is busy, besides account 0.
OWN, SEALED, BELL, DOORS, ACCOUNT = range(5)
LOOP_WORDS = 8
NOBODY_OWN = -1
NO_DESCRIPTOR = -1

# The words of a door, for each group: the address of its ring (0: none), the ring's rows, the
# descriptor that is rung when a request has ended, and the address that the loop has seen last.
ADDRESS, DOOR_ROWS, WAKEUP, SEEN = range(4)
DOOR_WORDS = 4
MOST_DOORS = 64

# The words of an account: how many loops are busy, and for how long some was, less the present.
DEPTH, BUSY_NS = range(2)

SERVED, YIELDED = range(2)  # of a program: what it has counted

# Outcomes.
WITH_RESULT, WAS_CANCELLED, HAS_EXPIRED, WAS_CLOSED, HAS_FAILED = range(5)


def ring_words(rows: int) -> int:
    """What a ring of so many rows takes."""
    return FIRST_ROW + rows * REQUEST_WORDS


class Ring:
    """Requests of one submitter to one group. ``words``: its memory, if others share it."""

    def __init__(self, rows: int, words: Ints | None = None) -> None:
        self.words: Ints = np.zeros(ring_words(rows), dtype=np.int64) if words is None else words
        self.rows: Ints = self.words[FIRST_ROW:].reshape(rows, REQUEST_WORDS)
        # A word of an array takes Python several times as long to write.
        self._words = memoryview(cast(Any, self.words))
        self._count = rows

    @property
    def submitted(self) -> int:
        return self._words[SUBMITTED]

    @property
    def answered(self) -> int:
        return self._words[ANSWERED]

    @property
    def open(self) -> bool:
        return self._words[ANSWERED] < self._words[SUBMITTED]

    def row(self, number: int) -> memoryview:
        at = FIRST_ROW + number % self._count * REQUEST_WORDS
        return self._words[at : at + REQUEST_WORDS]

    def put(
        self,
        arrival_ns: int,
        expires_ns: int,
        slot: int,
        program: int = 0,
        rows: int = 0,
        due_ns: int = 0,
    ) -> int:
        """Its number."""
        number = self._words[SUBMITTED]
        at = FIRST_ROW + number % self._count * REQUEST_WORDS
        words = self._words
        words[at + ARRIVAL] = arrival_ns
        words[at + EXPIRES] = expires_ns
        words[at + SLOT] = slot
        words[at + GIVEN_UP] = 0
        words[at + PROGRAM] = program
        words[at + ROWS] = rows
        words[at + DUE] = due_ns
        words[SUBMITTED] = number + 1
        return number

    def give_up(self, number: int) -> None:
        self._words[FIRST_ROW + number % self._count * REQUEST_WORDS + GIVEN_UP] = 1

    def answer(self, start_ns: int, end_ns: int, outcome: int) -> None:
        """The first open request has ended."""
        number = self._words[ANSWERED]
        at = FIRST_ROW + number % self._count * REQUEST_WORDS
        self._words[at + START] = start_ns
        self._words[at + END] = end_ns
        self._words[at + OUTCOME] = outcome
        self._words[ANSWERED] = number + 1


def filled_ring(arrivals: Ints) -> Ring:
    """For a run: all requests are known, and nobody waits for one of them."""
    ring = Ring(max(len(arrivals), 1))
    ring.rows[: len(arrivals), ARRIVAL] = arrivals
    ring.rows[:, EXPIRES] = FOREVER_NS
    ring.rows[:, SLOT] = NO_SLOT
    ring.words[SUBMITTED] = len(arrivals)
    return ring


# What a row of a group asks to be computed, on a device that only takes the time.
Compute = Callable[[int, Sequence[int]], Future[Any] | None]


def _nothing(group: int, row: Sequence[int]) -> None:
    """Where the device itself computes, or nothing is computed."""


class LoopGroup(NamedTuple):
    """Workers of which one runs at a time, and the account of what is busy."""

    workers: tuple[int, ...]
    account: int


def each_alone(workers: int) -> tuple[LoopGroup, ...]:
    """Every worker is a group."""
    return tuple(LoopGroup((worker,), worker + 1) for worker in range(workers))


class LoopServer(Protocol):
    """Serves what lies in the rings of all doors."""

    def ring(self, group: int) -> None:
        """There is news in a ring of the group: a request, or one that was given up."""
        ...

    @property
    def bells(self) -> Sequence[int]:
        """For each group the descriptor that other submitters ring."""
        ...


class Accounts:
    """For how long something was busy: account 0 is the whole session's. Compiled loops count in
    ``words``, too."""

    def __init__(self, count: int) -> None:
        self.words: Ints = np.zeros((count, 2), dtype=np.int64)

    def count(self, account: int, change: int, now_ns: int) -> None:
        """A group of it is busy from now on (1), or is so no more (-1)."""
        for words in (self.words[0], self.words[account]):
            words[DEPTH] += change
            if words[DEPTH] == (change > 0):
                words[BUSY_NS] -= change * now_ns

    def busy_ns(self, account: int) -> int:
        depth, total_ns = self.words[account].tolist()
        return int(total_ns + time.monotonic_ns() if depth > 0 else total_ns)


class Doors:
    """The rings that the loops of a session look at. Compiled loops read ``table``, by group and
    place a door's words, and ``loops``, by group a loop's. ``looking`` has a word for each loop
    that reads the rings of others."""

    def __init__(self, groups: Sequence[LoopGroup]) -> None:
        self.table: Ints = np.zeros((len(groups), MOST_DOORS, DOOR_WORDS), dtype=np.int64)
        self.looking: Ints = np.zeros(len(groups), dtype=np.int64)
        self.loops: Ints = np.zeros((len(groups), LOOP_WORDS), dtype=np.int64)
        self.loops[:, [OWN, BELL]] = NOBODY_OWN, NO_DESCRIPTOR
        self.loops[:, ACCOUNT] = [group.account for group in groups]
        self.accounts = Accounts(1 + max(group.account for group in groups))
        self.rings: list[Sequence[Ring]] = []  # by place; none: it is free
        self.wakeups: list[int] = []
        self.compute: list[Compute] = []
        self.server: LoopServer | None = None
        self.lock = threading.RLock()  # of all here, and of what the desk puts into rings

    def open(self, rings: Sequence[Ring], wakeup: int, compute: Compute | None = None) -> int:
        """Its place. ``rings``: one for each group, which stay until the door is left again."""
        with self.lock:
            place = self.rings.index(()) if () in self.rings else len(self.rings)
            if place == MOST_DOORS:
                raise DeviceError(f"a session has room for {MOST_DOORS} submitters")
            self.rings[place : place + 1] = [rings]
            self.wakeups[place : place + 1] = [wakeup]
            self.compute[place : place + 1] = [compute or _nothing]
            for row, ring in zip(self.table[:, place], rings, strict=True):
                row[DOOR_ROWS], row[WAKEUP] = len(ring.rows), wakeup
                row[SEEN] = ring.words.ctypes.data  # until its loop has seen that it is shut again
                row[ADDRESS] = row[SEEN]  # last: its loop may look
            self.loops[:, DOORS] = len(self.rings)
        self._ring_all()
        return place

    def shut(self, place: int) -> None:
        """Nothing more is taken from there, and what runs is given up."""
        with self.lock:
            for row, ring in zip(self.table[:, place], self.rings[place], strict=True):
                row[ADDRESS] = 0
                for number in range(ring.answered, ring.submitted):
                    ring.give_up(number)
        self._ring_all()

    def is_left(self, place: int) -> bool:
        """Whether all loops have left a door that was shut; then its memory may go."""
        with self.lock:
            if self.table[:, place, SEEN].any() or self.looking.any():
                return False
            self.rings[place] = ()
            return True

    def ring(self, group: int) -> None:
        """There is news for the server, unless it has ended."""
        with self.lock:
            if self.server is not None:
                self.server.ring(group)

    def _ring_all(self) -> None:
        for group in range(len(self.loops)):
            self.ring(group)
