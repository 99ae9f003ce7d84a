"""Every mechanism on real data, in NumPy: what the GPU stages must equal.

A producer reads inputs in order and writes any number of items for each, to one of several streams
(one for a compaction, one per expert for routing); the order within a stream is part of the result.
Buffers have a fixed size and are really full when they are full. A producer goes on at its cursor,
which may lie inside an input. Items are never dropped: what fits nowhere is an ArenaError.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from eclip.errors import ArenaError, UsageError
from eclip.varout.mechanisms import Mechanism

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]
Consumer = Callable[[int, Array], None]  # a stream and its next items, in order

_STRIP = 64  # inputs a producer looks at in one step
_BATCH = 256  # items it hands over in one step


class Cursor(NamedTuple):
    """Where a producer goes on: this input, after so many of its items."""

    input: int
    offset: int


@dataclass(frozen=True)
class Batch:
    """Items in the order they were written, and where each came from."""

    input: Ints
    offset: Ints
    stream: Ints
    value: Array
    end: Cursor

    def __len__(self) -> int:
        return len(self.input)

    def cursor(self, item: int) -> Cursor:
        """Where to go on so that this item comes next."""
        if item == len(self):
            return self.end
        return Cursor(int(self.input[item]), int(self.offset[item]))


class Producer(abc.ABC):
    """Subclasses say how many items inputs give and what they are; nothing is known in advance."""

    def __init__(
        self,
        inputs: int,
        largest: int | None,
        streams: int = 1,
        dtype: npt.DTypeLike = np.int64,
        item_shape: tuple[int, ...] = (),
    ) -> None:
        self.inputs = inputs
        self.largest = largest  # items of one input at most; None: unbounded
        self.streams = streams
        self.dtype = np.dtype(dtype)
        self.item_shape = item_shape

    @abc.abstractmethod
    def counts(self, first: int, last: int) -> Ints:
        """How many items each of these inputs gives."""

    @abc.abstractmethod
    def items(self, inputs: Ints, offsets: Ints) -> tuple[Ints, Array]:
        """The stream and the value of single items."""

    def emit(self, cursor: Cursor, most: int = _BATCH) -> Batch:
        """The next items, at most so many; none only at the end of the inputs."""
        first, skip = cursor
        while first < self.inputs:
            last = min(first + _STRIP, self.inputs)
            counts = self.counts(first, last)
            counts[0] -= skip
            ends = np.cumsum(counts)
            total = int(ends[-1])
            if total:
                rank = np.arange(min(total, most))
                which = np.searchsorted(ends, rank, side="right")
                offsets = rank - (ends - counts)[which] + np.where(which == 0, skip, 0)
                inputs = which + first
                streams, values = self.items(inputs, offsets)
                end = Cursor(last, 0)
                if total > most:
                    at = int(np.searchsorted(ends, most, side="right"))
                    begun = most - int(ends[at] - counts[at])
                    end = Cursor(first + at, begun + (skip if at == 0 else 0))
                return Batch(inputs, offsets, streams, values, end)
            first, skip = last, 0
        none = np.empty(0, dtype=np.int64)
        empty = np.empty((0, *self.item_shape), dtype=self.dtype)
        return Batch(none, none, none, empty, Cursor(self.inputs, 0))

    def batches(self, cursor: Cursor = Cursor(0, 0)) -> Iterator[Batch]:  # noqa: B008
        while len(batch := self.emit(cursor)):
            yield batch
            cursor = batch.end


class Buffer:
    """A fixed number of words for every stream."""

    def __init__(self, producer: Producer, capacity: int) -> None:
        self.capacity = capacity
        shape = (producer.streams, capacity, *producer.item_shape)
        self.values = np.empty(shape, dtype=producer.dtype)
        self.held = np.zeros(producer.streams, dtype=np.int64)

    def places(self, streams: Ints) -> Ints:
        """Where in its stream each item would stand, if there were room."""
        order = np.argsort(streams, kind="stable")
        ranked = streams[order]
        rank = np.empty(len(streams), dtype=np.int64)
        rank[order] = np.arange(len(streams)) - np.searchsorted(ranked, ranked, side="left")
        return self.held[streams] + rank

    def put(self, batch: Batch) -> int:
        """Take items up to the first whose stream is full; how many were taken."""
        places = self.places(batch.stream)
        full = np.flatnonzero(places >= self.capacity)
        taken = int(full[0]) if len(full) else len(batch)
        self.store(batch.stream[:taken], places[:taken], batch.value[:taken])
        return taken

    def store(self, streams: Ints, places: Ints, values: Array) -> None:
        self.values[streams, places] = values
        np.add.at(self.held, streams, 1)

    def drain(self, consume: Consumer) -> None:
        for stream in np.flatnonzero(self.held).tolist():
            consume(stream, self.values[stream, : self.held[stream]].copy())
        self.held[:] = 0


class Arena:
    """Words outside the buffers, handed out in order until there are no more."""

    def __init__(self, producer: Producer, words: int, stage: str = "the stage") -> None:
        self.values = np.empty((words, *producer.item_shape), dtype=producer.dtype)
        self.streams = np.empty(words, dtype=np.int64)
        self.used = 0
        self._stage = stage

    def append(self, streams: Ints, values: Array) -> None:
        needed = self.used + len(values)
        if needed > len(self.values):
            raise ArenaError(self._stage, needed, len(self.values))
        self.streams[self.used : needed] = streams
        self.values[self.used : needed] = values
        self.used = needed

    def drain(self, consume: Consumer, first: int, last: int) -> None:
        streams, values = self.streams[first:last], self.values[first:last]
        for stream in np.unique(streams).tolist():
            consume(stream, values[streams == stream].copy())


@dataclass
class Run:
    """What a run took besides its result."""

    rounds: int = 1  # how often the consumer was run
    outside_words: int = 0  # that went through the arena
    buffer_words: int = 0  # allocated in advance


def run(
    mechanism: Mechanism,
    producer: Producer,
    consume: Consumer,
    capacity: int,
    arena_words: int = 1 << 20,
    other: Array | None = None,
) -> Run:
    """Produce everything and consume it. ``capacity`` is in words for every stream.

    ``other`` is another stream's data, which spilling may move away and must bring back; without
    it, spilled items go to the arena themselves.
    """
    if capacity < 1:
        raise UsageError(f"a buffer needs a capacity of at least 1, not {capacity}")
    arena = Arena(producer, arena_words)
    if mechanism is Mechanism.EXACT:
        return _exact(producer, consume)
    if mechanism is Mechanism.MAXIMUM:
        return _maximum(producer, consume)
    if mechanism is Mechanism.MERGE:
        return _merge(producer, consume)
    if mechanism is Mechanism.SWAP:
        return _swap(producer, consume, capacity)
    if mechanism is Mechanism.RESIDENT:
        return _resident(producer, consume, capacity)
    if mechanism is Mechanism.SPILL:
        if other is None:
            return _spill(producer, consume, capacity, arena)
        return _spill_other(producer, consume, capacity, arena, other)
    return _double(producer, consume, capacity, arena, mechanism is Mechanism.DOUBLE_SYMMETRIC)


def _exact(producer: Producer, consume: Consumer) -> Run:
    """Twice over the inputs: the first time only counts."""
    totals = np.zeros(producer.streams, dtype=np.int64)
    for batch in producer.batches():
        np.add.at(totals, batch.stream, 1)
    buffer = Buffer(producer, int(totals.max()))
    for batch in producer.batches():
        buffer.put(batch)
    buffer.drain(consume)
    return Run(buffer_words=int(totals.sum()))


def _maximum(producer: Producer, consume: Consumer) -> Run:
    if producer.largest is None:
        raise UsageError("an unbounded output has no maximum to allocate for")
    buffer = Buffer(producer, max(1, producer.largest * producer.inputs))
    for batch in producer.batches():
        buffer.put(batch)
    buffer.drain(consume)
    return Run(buffer_words=buffer.values.shape[0] * buffer.capacity)


def _merge(producer: Producer, consume: Consumer) -> Run:
    """No buffer: every item is consumed before the next is written."""
    for batch in producer.batches():
        for item in range(len(batch)):
            consume(int(batch.stream[item]), batch.value[item : item + 1])
    return Run()


def _swap(producer: Producer, consume: Consumer, capacity: int) -> Run:
    buffer = Buffer(producer, capacity)
    done = Run(rounds=0, buffer_words=buffer.values.shape[0] * capacity)
    cursor = Cursor(0, 0)
    while True:
        batch = producer.emit(cursor)
        taken = buffer.put(batch)
        cursor = batch.cursor(taken)
        if taken == len(batch) and len(batch):
            continue
        buffer.drain(consume)
        done.rounds += 1
        if not len(batch):
            return done


def _resident(producer: Producer, consume: Consumer, capacity: int) -> Run:
    """Both kernels live, each with its own state; whoever cannot go on hands over."""
    buffer = Buffer(producer, capacity)

    def produce() -> Iterator[None]:
        for batch in producer.batches():
            left = batch
            while (taken := buffer.put(left)) < len(left):
                left = Batch(
                    left.input[taken:], left.offset[taken:], left.stream[taken:],
                    left.value[taken:], left.end,
                )  # fmt: skip
                yield

    def drain() -> Iterator[None]:
        while True:
            buffer.drain(consume)
            yield

    done = Run(buffer_words=buffer.values.shape[0] * capacity)
    drainer = drain()
    for _ in produce():
        next(drainer)
        done.rounds += 1
    next(drainer)
    return done


def _spill(producer: Producer, consume: Consumer, capacity: int, arena: Arena) -> Run:
    buffer = Buffer(producer, capacity)
    for batch in producer.batches():
        places = buffer.places(batch.stream)
        fits = places < capacity
        buffer.store(batch.stream[fits], places[fits], batch.value[fits])
        # A stream that was full stays full, so that later items of it never overtake.
        arena.append(batch.stream[~fits], batch.value[~fits])
    buffer.drain(consume)
    arena.drain(consume, 0, arena.used)
    return Run(
        rounds=1 + (arena.used > 0),
        outside_words=arena.used,
        buffer_words=buffer.values.shape[0] * capacity,
    )


def _spill_other(
    producer: Producer, consume: Consumer, capacity: int, arena: Arena, other: Array
) -> Run:
    """Another stream goes to memory, a block at a time, and its place holds what does not fit."""
    buffer = Buffer(producer, capacity)
    block = max(1, len(other) // 8)
    tags = np.empty(len(other), dtype=np.int64)
    freed = used = 0
    for batch in producer.batches():
        places = buffer.places(batch.stream)
        fits = places < capacity
        buffer.store(batch.stream[fits], places[fits], batch.value[fits])
        streams, values = batch.stream[~fits], batch.value[~fits]
        while freed < min(len(other), used + len(values)):
            moved = other[freed : freed + block]
            arena.append(np.zeros(len(moved), dtype=np.int64), moved)
            freed += len(moved)
        if used + len(values) > len(other):
            other[:freed] = arena.values[:freed]
            raise ArenaError("the stage", used + len(values), len(other))
        other[used : used + len(values)] = values
        tags[used : used + len(values)] = streams
        used += len(values)
    buffer.drain(consume)
    for stream in np.unique(tags[:used]).tolist():
        consume(stream, other[:used][tags[:used] == stream].copy())
    other[:freed] = arena.values[:freed]
    return Run(
        rounds=1 + (used > 0),
        outside_words=freed,
        buffer_words=buffer.values.shape[0] * capacity,
    )


def _double(
    producer: Producer, consume: Consumer, capacity: int, arena: Arena, symmetric: bool
) -> Run:
    """Full halves go to memory while the producer fills the other; afterwards all comes back."""
    if capacity < 2:
        raise UsageError("two half-buffers need a capacity of at least 2")
    half = capacity // 2
    buffer = Buffer(producer, half if symmetric else capacity)
    written: list[tuple[int, int]] = []  # what of the arena each half-buffer filled

    def write_out() -> None:
        first = arena.used
        buffer.drain(lambda stream, values: arena.append(np.full(len(values), stream), values))
        written.append((first, arena.used))

    cursor = Cursor(0, 0)
    while len(batch := producer.emit(cursor)):
        taken = buffer.put(batch)
        cursor = batch.cursor(taken)
        if taken < len(batch):
            write_out()
            if buffer.capacity != half:
                buffer = Buffer(producer, half)
    done = Run(buffer_words=producer.streams * capacity)
    if not written:
        buffer.drain(consume)
        return done
    write_out()
    for first, last in written:
        arena.drain(consume, first, last)
    done.rounds, done.outside_words = len(written), arena.used
    return done
