"""Submitted requests between those who submit and those who serve: rings, and the desk before them.

Every worker has a ring: a row of 64-bit words for each request. Whoever submits fills a row and
then raises SUBMITTED; whoever serves takes rows in that order, writes into each how it ended, and
then raises ANSWERED. So rows between the two marks are open, the first of them may be running, and
no lock is held while serving. A run fills its ring beforehand; a session that serves has a desk,
which fills rings one request at a time.

A slot is taken from ``submit`` until ``poll`` has given out its completion. A ring has as many rows
as its worker has slots, so it is never full while a slot is free.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from eclip.core.device import (
    CANCELLED,
    CLOSED,
    EXPIRED,
    FOREVER_S,
    Closing,
    Completion,
    Slot,
)
from eclip.errors import DeviceError, FullError, UsageError

Ints = npt.NDArray[np.int64]

# The words of a request. Those after EXPIRES are for requests that somebody submitted.
ARRIVAL, START, END, BARRIERS, YIELDS, MOVES, PAUSE_NS, VERDICT = range(8)
COLUMNS = 8  # of a served request in a log
EXPIRES, SLOT, GIVEN_UP, OUTCOME = range(COLUMNS, COLUMNS + 4)
REQUEST_WORDS = COLUMNS + 4
NO_SLOT = -1
FOREVER_NS = int(np.iinfo(np.int64).max)

# The words of a ring. OWN: without a submitted request its worker runs one of its own. SEALED: no
# more are submitted. BELL and WAKEUP are descriptors, or none: rung by those who submit, and by
# those who serve.
SUBMITTED, ANSWERED, SERVED, YIELDED, OWN, SEALED, BELL, WAKEUP = range(8)
MARKS = 8
NO_DESCRIPTOR = -1

# Outcomes.
WITH_RESULT, WAS_CANCELLED, HAS_EXPIRED, WAS_CLOSED, HAS_FAILED = range(5)
_ERRORS = (None, CANCELLED, EXPIRED, CLOSED)

_LOOK_S = 0.0005  # how often a drain looks
_LONGEST_WAIT_S = 1.0  # of a poll before it looks again: somebody may close its descriptor


class Ring:
    """One worker's requests."""

    def __init__(self, rows: int) -> None:
        self.rows: Ints = np.zeros((rows, REQUEST_WORDS), dtype=np.int64)
        self.marks: Ints = np.zeros(MARKS, dtype=np.int64)
        self.marks[[BELL, WAKEUP]] = NO_DESCRIPTOR
        # A word of an array takes Python several times as long to write.
        self._words = memoryview(cast(Any, self.rows.reshape(-1)))
        self._marks = memoryview(cast(Any, self.marks))

    @property
    def submitted(self) -> int:
        return self._marks[SUBMITTED]

    @property
    def answered(self) -> int:
        return self._marks[ANSWERED]

    def row(self, number: int) -> Ints:
        found: Ints = self.rows[number % len(self.rows)]
        return found

    def put(self, arrival_ns: int, expires_ns: int, slot: int) -> int:
        """Its number."""
        number = self._marks[SUBMITTED]
        at = number % len(self.rows) * REQUEST_WORDS
        words = self._words
        words[at + ARRIVAL] = arrival_ns
        words[at + EXPIRES] = expires_ns
        words[at + SLOT] = slot
        words[at + GIVEN_UP] = 0
        words[at + OUTCOME] = WITH_RESULT
        self._marks[SUBMITTED] = number + 1
        return number

    def give_up(self, number: int) -> None:
        self._words[number % len(self.rows) * REQUEST_WORDS + GIVEN_UP] = 1

    def answer(self, start_ns: int, end_ns: int, outcome: int) -> None:
        """The first open request has ended."""
        number = self._marks[ANSWERED]
        at = number % len(self.rows) * REQUEST_WORDS
        self._words[at + START] = start_ns
        self._words[at + END] = end_ns
        self._words[at + OUTCOME] = outcome
        self._marks[ANSWERED] = number + 1


def filled_ring(arrivals: Ints) -> Ring:
    """For a run: all requests are known, and nobody waits for one of them."""
    ring = Ring(max(len(arrivals), 1))
    ring.rows[: len(arrivals), ARRIVAL] = arrivals
    ring.rows[:, EXPIRES] = FOREVER_NS
    ring.rows[:, SLOT] = NO_SLOT
    ring.marks[SUBMITTED] = len(arrivals)
    ring.marks[SEALED] = 1
    return ring


class Server(Protocol):
    """Whoever serves what a desk accepts."""

    def accepted(self, worker: int, now_ns: int) -> None:
        """There is another request in the worker's ring."""
        ...

    def given_up(self, worker: int) -> None:
        """Of a request in its ring."""
        ...


class Desk:
    """Takes requests in and gives completions out, each exactly once."""

    def __init__(self, slots: Sequence[Sequence[Slot]], background: Collection[int] = ()) -> None:
        if not all(slots):
            raise UsageError("every worker needs at least one slot")
        if unknown := set(background) - set(range(len(slots))):
            raise UsageError(f"there is no worker {min(unknown)} to run in the background")
        self.slots = tuple(map(tuple, slots))
        self.rings = [Ring(len(of_worker)) for of_worker in slots]
        self.wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        for worker, ring in enumerate(self.rings):
            ring.marks[WAKEUP] = self.wakeup
            ring.marks[OWN] = worker in background
        self.lock = threading.Lock()  # of all below, and of what is put into rings
        self._server: Server | None = None
        self._taken = [bytearray(len(of_worker)) for of_worker in slots]
        self._given_out = [0] * len(slots)
        self._refusal = "the session does not serve yet"
        self._failure = ""

    def open(self, server: Server) -> None:
        """From now on requests are taken."""
        self._server = server
        self._refusal = ""

    def submit(self, worker: int, slot: int, deadline_ns: int | None) -> int:
        with self.lock:
            if self._refusal or self._server is None:
                raise DeviceError(self._refusal)
            if not (0 <= worker < len(self.rings) and 0 <= slot < len(self._taken[worker])):
                raise UsageError(f"there is no slot {slot} of a worker {worker}")
            if self._taken[worker][slot]:
                raise FullError(
                    f"slot {slot} of worker {worker} is taken; poll for its completion first"
                )
            self._taken[worker][slot] = 1
            now = time.monotonic_ns()
            expires = FOREVER_NS if deadline_ns is None else deadline_ns
            number = self.rings[worker].put(now, expires, slot)
            self._server.accepted(worker, now)
        return number * len(self.rings) + worker

    def cancel(self, ticket: int) -> None:
        number, worker = divmod(ticket, len(self.rings))
        ring = self.rings[worker]
        with self.lock:
            if not 0 <= number < ring.submitted:
                raise UsageError(f"nobody was given the ticket {ticket}")
            if number < ring.answered or self._server is None:
                return
            ring.give_up(number)
            self._server.given_up(worker)

    def poll(self, timeout_s: float) -> list[Completion]:
        until = time.monotonic() + timeout_s
        while True:
            with self.lock:
                found = self._collect()
                descriptor = self.wakeup
            left_s = until - time.monotonic()
            if found or left_s <= 0 or descriptor == NO_DESCRIPTOR:
                return found
            waiting = select.poll()
            waiting.register(descriptor, select.POLLIN)
            waiting.poll(min(left_s, _LONGEST_WAIT_S) * 1000)

    def _collect(self) -> list[Completion]:
        if self.wakeup != NO_DESCRIPTOR:
            # First: what ends from here on makes it readable again.
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.wakeup)
        found = []
        for worker, ring in enumerate(self.rings):
            answered = ring.answered  # once: it rises meanwhile
            for number in range(self._given_out[worker], answered):
                row = ring.row(number).tolist()
                outcome = row[OUTCOME]
                self._taken[worker][row[SLOT]] = 0
                found.append(
                    Completion(
                        ticket=number * len(self.rings) + worker,
                        worker=worker,
                        slot=row[SLOT],
                        arrival_ns=row[ARRIVAL],
                        start_ns=row[START],
                        end_ns=row[END],
                        error=self._failure if outcome == HAS_FAILED else _ERRORS[outcome],
                    )
                )
            self._given_out[worker] = answered
        return found

    def drain(self, worker: int | None, timeout_s: float) -> bool:
        rings = self.rings if worker is None else [self.rings[worker]]
        with self.lock:
            wanted = [(ring, ring.submitted) for ring in rings]
        until = time.monotonic() + timeout_s
        while any(ring.answered < number for ring, number in wanted):
            if time.monotonic() >= until:
                return False
            time.sleep(_LOOK_S)
        return True

    @property
    def served(self) -> tuple[int, ...]:
        return tuple(int(ring.marks[SERVED]) for ring in self.rings)

    @property
    def yielded(self) -> tuple[int, ...]:
        return tuple(int(ring.marks[YIELDED]) for ring in self.rings)

    def refuse(self, why: str, failure: str = "") -> None:
        """Take no more; the first reason stays. ``failure``: what open requests fail of."""
        with self.lock:
            self._refusal = self._refusal or why
            self._failure = self._failure or failure

    def answer_all(self, ring: Ring) -> None:
        """When nobody serves it any more: whatever is open ends here."""
        with self.lock:
            while ring.answered < ring.submitted:
                now = time.monotonic_ns()
                ring.answer(now, now, HAS_FAILED if self._failure else WAS_CLOSED)
        self.wake()

    def wake(self) -> None:
        """Those who wait for completions."""
        with self.lock:
            if self.wakeup != NO_DESCRIPTOR:
                os.eventfd_write(self.wakeup, 1)

    def close(self) -> None:
        """When nobody serves any more. What has ended can still be polled."""
        self.refuse(CLOSED)
        for ring in self.rings:
            self.answer_all(ring)
        with self.lock:
            self._server = None  # which knows us: slots would stay until a collection
            descriptor, self.wakeup = self.wakeup, NO_DESCRIPTOR
            if descriptor != NO_DESCRIPTOR:
                os.eventfd_write(descriptor, 1)  # for those who wait now
                os.close(descriptor)


class Submitting(Closing):
    """The part of a session that serves. Devices say how, in ``_begin_serving``."""

    _desk: Desk | None = None

    def serve(
        self, slots: int | Sequence[Sequence[Slot]] = 1, background: Collection[int] = ()
    ) -> None:
        if self._desk is not None:
            raise UsageError("the session serves already")
        self._desk = self._begin_serving(slots, background)

    def _begin_serving(
        self, slots: int | Sequence[Sequence[Slot]], background: Collection[int]
    ) -> Desk:
        raise DeviceError(
            "requests cannot be submitted to workers in processes of their own; plan with lanes"
        )

    @property
    def _serving(self) -> Desk:
        if self._desk is None:
            raise UsageError("the session does not serve; call serve() first")
        return self._desk

    def _check_idle(self) -> None:
        if self._desk is not None:
            raise UsageError("the session serves; open another one to run a load")

    def slots(self, worker: int) -> Sequence[Slot]:
        return self._serving.slots[worker]

    def submit(self, worker: int, slot: int, deadline_ns: int | None = None) -> int:
        return self._serving.submit(worker, slot, deadline_ns)

    def cancel(self, ticket: int) -> None:
        self._serving.cancel(ticket)

    def poll(self, timeout_s: float = 0.0) -> Sequence[Completion]:
        return self._serving.poll(timeout_s)

    @property
    def wakeup(self) -> int:
        return self._serving.wakeup

    def drain(self, worker: int | None = None, timeout_s: float = FOREVER_S) -> bool:
        return self._serving.drain(worker, timeout_s)

    @property
    def served(self) -> Sequence[int]:
        return self._serving.served

    @property
    def yielded(self) -> Sequence[int]:
        return self._serving.yielded


def slots_for(
    wanted: int | Sequence[Sequence[Slot]], workers: int, make: Callable[[int], Slot]
) -> Sequence[Sequence[Slot]]:
    """Those given, or so many for every worker."""
    if isinstance(wanted, int):
        if wanted < 1:
            raise UsageError(f"a worker has at least 1 slot, not {wanted}")
        return [[make(worker) for _ in range(wanted)] for worker in range(workers)]
    if len(wanted) != workers:
        raise UsageError(f"slots are given for {len(wanted)} workers, not {workers}")
    return wanted
