"""Desk: a session's own submitter, in its process.

Other processes open doors beside it (requests.py). A server uses the desk to warm its models.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Collection, Sequence

import numpy as np

from eclip.core.device import (
    CANCELLED,
    CLOSED,
    EXPIRED,
    FOREVER_S,
    Closing,
    Completion,
    Slot,
)
from eclip.core.requests import (
    ARRIVAL,
    END,
    FOREVER_NS,
    HAS_FAILED,
    NO_DESCRIPTOR,
    OUTCOME,
    OWN,
    PROGRAM,
    SEEN,
    SERVED,
    SLOT,
    START,
    WAS_CLOSED,
    YIELDED,
    Doors,
    Ints,
    LoopGroup,
    LoopServer,
    Ring,
    each_alone,
)
from eclip.errors import DeviceError, FullError, UsageError

_ERRORS = (None, CANCELLED, EXPIRED, CLOSED)  # by outcome
_LOOK_S = 0.0005  # how often a drain looks
_LONGEST_WAIT_S = 1.0  # of a poll before it looks again: somebody may close its descriptor


class Desk:
    """Takes requests in and gives completions out, each exactly once: a session's first door.

    A slot is taken from ``submit`` until ``poll`` has given out its completion.
    """

    def __init__(
        self,
        slots: Sequence[Sequence[Slot]],
        background: Collection[int] = (),
        groups: Sequence[LoopGroup] | None = None,
    ) -> None:
        if not all(slots):
            raise UsageError("every worker needs at least one slot")
        if unknown := set(background) - set(range(len(slots))):
            raise UsageError(f"there is no worker {min(unknown)} to run in the background")
        self.groups = each_alone(len(slots)) if groups is None else tuple(groups)
        found = {
            worker: (number, program)
            for number, group in enumerate(self.groups)
            for program, worker in enumerate(group.workers)
        }
        count = sum(len(group.workers) for group in self.groups)
        if sorted(found) != list(range(len(slots))) or count != len(slots):
            raise UsageError("each worker belongs to one group")
        self.places = [found[worker] for worker in range(len(slots))]  # group and program
        self.slots = tuple(map(tuple, slots))
        self.rings = [
            Ring(sum(len(slots[worker]) for worker in group.workers)) for group in self.groups
        ]
        self.doors = Doors(self.groups)
        for row, group in zip(self.doors.loops, self.groups, strict=True):
            for worker in set(group.workers) & set(background):
                if len(group.workers) > 1:
                    raise UsageError("a worker that runs requests of its own is a group by itself")
                row[OWN] = self.places[worker][1]
        self.wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.doors.open(self.rings, self.wakeup)
        self.counts: Sequence[Ints] = [np.zeros(2, dtype=np.int64) for _ in slots]  # by worker
        self.lock = self.doors.lock
        self._taken = [bytearray(len(of_worker)) for of_worker in slots]
        self._given_out = [0] * len(self.groups)
        self._refusal = "the session does not serve yet"
        self.failure = ""

    def open(self, server: LoopServer) -> None:
        """From now on requests are taken."""
        self.doors.server = server
        self._refusal = ""

    def submit(self, worker: int, slot: int, deadline_ns: int | None) -> int:
        with self.lock:
            if self._refusal:
                raise DeviceError(self._refusal)
            if not (0 <= worker < len(self.places) and 0 <= slot < len(self._taken[worker])):
                raise UsageError(f"there is no slot {slot} of a worker {worker}")
            if self._taken[worker][slot]:
                raise FullError(
                    f"slot {slot} of worker {worker} is taken; poll for its completion first"
                )
            self._taken[worker][slot] = 1
            expires = FOREVER_NS if deadline_ns is None else deadline_ns
            group, program = self.places[worker]
            number = self.rings[group].put(time.monotonic_ns(), expires, slot, program)
            self.doors.ring(group)
        return number * len(self.rings) + group

    def cancel(self, ticket: int) -> None:
        number, group = divmod(ticket, len(self.rings))
        ring = self.rings[group]
        with self.lock:
            if not 0 <= number < ring.submitted:
                raise UsageError(f"nobody was given the ticket {ticket}")
            if number < ring.answered:
                return
            ring.give_up(number)
            self.doors.ring(group)

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
        for group, ring in enumerate(self.rings):
            answered = ring.answered  # once: it rises meanwhile
            for number in range(self._given_out[group], answered):
                row = ring.row(number)
                worker = self.groups[group].workers[row[PROGRAM]]
                outcome = row[OUTCOME]
                self._taken[worker][row[SLOT]] = 0
                found.append(
                    Completion(
                        ticket=number * len(self.rings) + group,
                        worker=worker,
                        slot=row[SLOT],
                        arrival_ns=row[ARRIVAL],
                        start_ns=row[START],
                        end_ns=row[END],
                        error=self.failure if outcome == HAS_FAILED else _ERRORS[outcome],
                    )
                )
            self._given_out[group] = answered
        return found

    def drain(self, worker: int | None, timeout_s: float) -> bool:
        rings = self.rings if worker is None else [self.rings[self.places[worker][0]]]
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
        return tuple(int(row[SERVED]) for row in self.counts)

    @property
    def yielded(self) -> tuple[int, ...]:
        return tuple(int(row[YIELDED]) for row in self.counts)

    def refuse(self, why: str, failure: str = "") -> None:
        """Take no more; the first reason stays. ``failure``: what open requests fail of."""
        with self.lock:
            self._refusal = self._refusal or why
            self.failure = self.failure or failure

    def end(self, group: int) -> None:
        """When nobody serves it any more: what was submitted here and is open ends. Other doors
        are left as they are; their submitters hear of the session's end."""
        ring = self.rings[group]
        with self.lock:
            self.doors.table[group, :, SEEN] = 0
            while ring.open:
                now = time.monotonic_ns()
                ring.answer(now, now, HAS_FAILED if self.failure else WAS_CLOSED)
        self.wake()

    def wake(self) -> None:
        """Those who wait for completions."""
        with self.lock:
            if self.wakeup != NO_DESCRIPTOR:
                os.eventfd_write(self.wakeup, 1)

    def close(self) -> None:
        """When nobody serves any more. What has ended can still be polled."""
        self.refuse(CLOSED)
        for group in range(len(self.groups)):
            self.end(group)
        with self.lock:
            self.doors.server = None  # which knows us: slots would stay until a collection
            descriptor, self.wakeup = self.wakeup, NO_DESCRIPTOR
            if descriptor != NO_DESCRIPTOR:
                os.eventfd_write(descriptor, 1)  # for those who wait now
                os.close(descriptor)


class Submitting(Closing):
    """The part of a session that serves. Devices say how, in ``_begin_serving``."""

    _desk: Desk | None = None

    def serve(
        self,
        slots: int | Sequence[Sequence[Slot]] = 1,
        background: Collection[int] = (),
        groups: Sequence[LoopGroup] | None = None,
    ) -> None:
        if self._desk is not None:
            raise UsageError("the session serves already")
        self._desk = self._begin_serving(slots, background, groups)

    def _begin_serving(
        self,
        slots: int | Sequence[Sequence[Slot]],
        background: Collection[int],
        groups: Sequence[LoopGroup] | None,
    ) -> Desk:
        raise DeviceError(
            "requests cannot be submitted to workers in processes of their own; plan with lanes"
        )

    @property
    def desk(self) -> Desk:
        if self._desk is None:
            raise UsageError("the session does not serve; call serve() first")
        return self._desk

    @property
    def doors(self) -> Doors:
        return self.desk.doors

    @property
    def failure(self) -> str:
        return self.desk.failure

    def _check_idle(self) -> None:
        if self._desk is not None:
            raise UsageError("the session serves; open another one to run a load")

    def slots(self, worker: int) -> Sequence[Slot]:
        return self.desk.slots[worker]

    def submit(self, worker: int, slot: int, deadline_ns: int | None = None) -> int:
        return self.desk.submit(worker, slot, deadline_ns)

    def cancel(self, ticket: int) -> None:
        self.desk.cancel(ticket)

    def poll(self, timeout_s: float = 0.0) -> Sequence[Completion]:
        return self.desk.poll(timeout_s)

    @property
    def wakeup(self) -> int:
        return self.desk.wakeup

    def drain(self, worker: int | None = None, timeout_s: float = FOREVER_S) -> bool:
        return self.desk.drain(worker, timeout_s)

    @property
    def served(self) -> Sequence[int]:
        return self.desk.served

    @property
    def yielded(self) -> Sequence[int]:
        return self.desk.yielded


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
