"""Replica: one loop of the device process, as a front submits batches of requests to it."""

from __future__ import annotations

import asyncio
import collections
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from eclip.core.requests import Ring
from eclip.server.control import AttachRings
from eclip.server.counters import WORDS, Count
from eclip.server.link import map_rings
from eclip.server.messages import Array, InferRequest, InferResponse


@dataclass(slots=True, eq=False)
class OpenRequest:
    """Accepted, not answered."""

    asked: InferRequest
    arrays: list[Array]  # in the order of the model's inputs
    rows: int
    shapes: tuple[tuple[int, ...], ...]  # of a row; only equal ones are joined
    order: tuple[int, float, float]
    due_ns: float  # by its bound
    expires_ns: float  # by its timeout
    future: asyncio.Future[InferResponse]
    timer: asyncio.TimerHandle | None = None
    batch: OpenBatch | None = None
    tried: bool = False  # a device process died with it
    late: bool = False  # it was put behind others, because it cannot be in time any more

    @property
    def waits(self) -> bool:
        return not self.future.done()


@dataclass(slots=True, eq=False)
class OpenBatch:
    """On the device."""

    ticket: int
    slot: int
    bucket: int
    replica: Replica
    expires_ns: int
    requests: list[OpenRequest]
    sent_ns: int
    expected_ns: float
    input_ns: int
    part: float  # of the device, that it keeps busy
    cancelled: bool = False


class Replica:
    """``place``: which of its service's it is. ``bell`` is a descriptor that its loop waits for."""

    def __init__(self, generation: int, place: int, ring: Ring, bell: int) -> None:
        self.generation = generation
        self.place = place
        self.batches: collections.deque[OpenBatch] = collections.deque()  # that have no answer
        self._ring = ring
        self._bell = bell
        self._taken = 0  # of those that were answered

    def submit(self, batch: OpenBatch, slot: int, program: int, rows: int, due_ns: int) -> None:
        """The last step that can fail."""
        self._ring.put(batch.sent_ns, batch.expires_ns, slot, program, rows, due_ns)
        self.batches.append(batch)
        os.eventfd_write(self._bell, 1)

    def cancel(self, batch: OpenBatch) -> None:
        self._ring.give_up(self._taken + self.batches.index(batch))
        os.eventfd_write(self._bell, 1)

    @property
    def answered(self) -> int:
        return self._ring.answered

    def take(self) -> Iterator[tuple[OpenBatch, memoryview]]:
        """Batches that have ended, each with its row."""
        while self.batches and self._taken < self.answered:
            row = self._ring.row(self._taken)
            self._taken += 1
            yield self.batches.popleft(), row


class BatchesOnDevice:
    """A service's batches that have no answer, and its slots. ``row`` is the front's of the
    counters; ``total`` adds up a word of all fronts' rows."""

    def __init__(self, slots: int, row: memoryview, total: Callable[[int], int]) -> None:
        self.replicas: Sequence[Replica] = ()  # none: there is no device process
        self.by_ticket: dict[int, OpenBatch] = {}  # in order
        self.free = list(range(slots))
        self._row = row
        self.total = total
        row[Count.RUNNING] = 0
        for place in range(Count.OPEN, WORDS):
            row[place] = 0

    def __len__(self) -> int:
        return len(self.by_ticket)

    def __iter__(self) -> Iterator[OpenBatch]:
        return iter(self.by_ticket.values())

    @property
    def have_moved(self) -> bool:
        """Whether none is open in a generation that the service has left."""
        return all(batch.replica in self.replicas for batch in self)

    def choose(self) -> Replica:
        """Where the next batch goes: where all fronts have the fewest."""
        if len(self.replicas) == 1:
            return self.replicas[0]
        return min(self.replicas, key=lambda one: self.total(Count.OPEN + one.place))

    def begin(self, batch: OpenBatch) -> None:
        self.by_ticket[batch.ticket] = batch
        self._row[Count.OPEN + batch.replica.place] += 1
        self._row[Count.RUNNING] = len(self.by_ticket)

    def leave(self, batch: OpenBatch) -> None:
        del self.by_ticket[batch.ticket]
        self.free.append(batch.slot)
        self._row[Count.OPEN + batch.replica.place] -= 1
        self._row[Count.RUNNING] = len(self.by_ticket)

    def ended(self) -> Iterator[tuple[OpenBatch, memoryview]]:
        for replica in dict.fromkeys(batch.replica for batch in self):
            yield from replica.take()


class FrontRings:
    """A front's rings of the newest generation, and the bells of all that are not retired."""

    def __init__(self) -> None:
        self._replicas: dict[int, list[Replica]] = {}  # by service id
        self._bells: dict[int, list[int]] = {}  # by generation

    def take(self, given: AttachRings, descriptors: Sequence[int]) -> None:
        rings, bells = map_rings(descriptors[0], given.rows), [*descriptors[1:]]
        self._bells[given.generation] = bells
        ends = [*sorted(given.first.values()), len(rings)]
        self._replicas = {
            service: [
                Replica(given.generation, place, rings[group], bells[given.bells[group]])
                for place, group in enumerate(range(first, ends[ends.index(first) + 1]))
            ]
            for service, first in given.first.items()
        }

    def of(self, service: int) -> Sequence[Replica]:
        return self._replicas.get(service, ())

    def close(self, before: int | None = None) -> None:
        """All, or those of older generations."""
        if before is None:
            self._replicas = {}
        for generation in [one for one in self._bells if before is None or one < before]:
            for bell in self._bells.pop(generation):
                os.close(bell)
