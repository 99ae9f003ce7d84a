"""The link: shared memory between a front and the device process.

A front has one link: a ring of orders to the device process, a ring of answers back, and an eventfd
for each that says that something was put in. Tensors lie in slots, one memory a service and front;
a slot belongs to the front until an order names it, then to the device process until the answer.

Rings have one writer and one reader. An entry is eight 64-bit words. The writer fills the entry,
then raises ``head``; the reader reads the entry, then raises ``tail``. Nobody else writes them. So
a process that dies between two steps leaves an entry that was never there, or one that is read
twice; orders carry the device process's epoch and answers a ticket that is used once, so that what
is left over from a dead process is recognised and dropped. That order of writes is kept by x86-64
processors; elsewhere the system call on the eventfd between writing and reading has to do. ``head``
and ``tail`` are written and read as whole words. (``struct`` would write zeros first and then byte
by byte: a tail that seems to be 0 makes a ring look full.)

All memory is allocated before it is mapped: a full host is an error here, not a SIGBUS later.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from eclip.core.device import Closing
from eclip.errors import DeviceError

WORDS = 8
_ENTRY = struct.Struct(f"<{WORDS}q")
_WORD = struct.Struct("<q")
_HEAD, _TAIL, _ENTRIES = 0, 64, 128  # bytes; each on a cache line of its own
_ALIGN = 64
_SHAPE = struct.Struct("<8q")  # bytes of data, dimensions, six sizes

ENTRIES = 4096  # of a ring; far above what slots let be open
RING_BYTES = _ENTRIES + ENTRIES * _ENTRY.size

IN_FLIGHT = 2  # batches of an instance on the device: one runs, one is behind it

# What an order asks for.
RUN, CANCEL = 1, 2


class DeviceOrder(NamedTuple):
    """From a front: run a batch that lies in a slot, or cancel it."""

    kind: int
    ticket: int
    service: int  # its id
    slot: int
    rows: int
    bucket: int
    expires_ns: int  # 0: never
    epoch: int  # of the device process it is meant for


class Answer(NamedTuple):
    """From the device process: how a batch ended. With an error, its line is in the slot."""

    ticket: int
    service: int
    slot: int
    status: int
    started_ns: int
    ended_ns: int


OK, CANCELLED, EXPIRED, FAILED, GONE = range(5)  # statuses; GONE: the service is not loaded


class SharedRing:
    """``whole`` are the words of the memory."""

    def __init__(self, memory: mmap.mmap, whole: memoryview, offset: int) -> None:
        self._memory = memory
        self._whole = whole
        self._head = (offset + _HEAD) // whole.itemsize
        self._tail = (offset + _TAIL) // whole.itemsize
        self._entries = offset + _ENTRIES

    def push(self, words: tuple[int, ...]) -> None:
        """Up to eight of them. A ring that is full is an error: it holds more than may be open."""
        head = self._whole[self._head]
        if head - self._whole[self._tail] >= ENTRIES:
            raise DeviceError(f"a ring is full: {ENTRIES} entries wait, and nobody takes them")
        filled = (*words, *(0,) * (WORDS - len(words)))
        at = self._entries + head % ENTRIES * _ENTRY.size
        _ENTRY.pack_into(self._memory, at, *filled)
        self._whole[self._head] = head + 1

    def take(self) -> Iterator[tuple[int, ...]]:
        """Everything that is in the ring now."""
        head, tail = self._whole[self._head], self._whole[self._tail]
        while tail < head:
            at = self._entries + tail % ENTRIES * _ENTRY.size
            words = _ENTRY.unpack_from(self._memory, at)
            tail += 1
            self._whole[self._tail] = tail
            yield words


class Signal(Closing):
    """An eventfd."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def raise_(self) -> None:
        os.eventfd_write(self.descriptor, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)

    def close(self) -> None:
        os.close(self.descriptor)


class Link(Closing):
    """One front's rings. Both sides open it from the same three descriptors, and own theirs."""

    def __init__(self, descriptors: tuple[int, int, int]) -> None:
        self.descriptors = descriptors
        memory, orders, answers = descriptors
        self._memory = mmap.mmap(memory, 2 * RING_BYTES)
        self._whole = memoryview(self._memory).cast("q")
        self.orders = SharedRing(self._memory, self._whole, 0)
        self.answers = SharedRing(self._memory, self._whole, RING_BYTES)
        self.ordered = Signal(orders)
        self.answered = Signal(answers)

    @classmethod
    def create(cls) -> Link:
        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
        memory = allocate("eclip-rings", 2 * RING_BYTES)
        return cls((memory, os.eventfd(0, flags), os.eventfd(0, flags)))

    def reset(self) -> None:
        """Empty, for a new front, when nobody uses it."""
        self._memory[:] = bytes(len(self._memory))
        self.ordered.clear()
        self.answered.clear()

    def close(self) -> None:
        self._whole.release()
        self._memory.close()
        for descriptor in self.descriptors:
            os.close(descriptor)


class SlotLayout(msgspec.Struct, frozen=True, kw_only=True):
    """How a service's slots lie in memory: room for every input and output of a full batch."""

    inputs: tuple[int, ...]  # bytes
    outputs: tuple[int, ...]
    count: int

    @property
    def offsets(self) -> tuple[int, ...]:
        """Of every tensor's shape in a slot, inputs first, and of the slot's end."""
        at = [0]
        for room in (*self.inputs, *self.outputs):
            at.append(at[-1] + _SHAPE.size + _aligned(room))
        return tuple(at)

    @property
    def slot_bytes(self) -> int:
        return max(self.offsets[-1], 1024)  # a line of an error finds room

    @property
    def total_bytes(self) -> int:
        return self.count * self.slot_bytes


class Slots(Closing):
    """The slots of one service and front."""

    def __init__(self, descriptor: int, layout: SlotLayout) -> None:
        self.descriptor = descriptor
        self.layout = layout
        self._memory = mmap.mmap(descriptor, layout.total_bytes)
        self._offsets = layout.offsets
        self._rooms = (*layout.inputs, *layout.outputs)
        self._slot_bytes = layout.slot_bytes

    @classmethod
    def create(cls, layout: SlotLayout) -> Slots:
        return cls(allocate("eclip-slots", layout.total_bytes), layout)

    def room(self, slot: int, tensor: int) -> npt.NDArray[np.uint8]:
        """A tensor's bytes as they lie there; inputs first, then outputs."""
        at = slot * self._slot_bytes + self._offsets[tensor] + _SHAPE.size
        return np.frombuffer(self._memory, dtype=np.uint8, count=self._rooms[tensor], offset=at)

    def array(
        self, slot: int, tensor: int, shape: tuple[int, ...], dtype: np.dtype[np.generic]
    ) -> npt.NDArray[np.generic]:
        """Room for a tensor of this shape, which whoever reads the slot is told."""
        size = math.prod(shape) * dtype.itemsize
        self._say(slot, tensor, size, shape)
        at = slot * self._slot_bytes + self._offsets[tensor] + _SHAPE.size
        return np.ndarray(shape, dtype, buffer=self._memory, offset=at)

    def read(self, slot: int, tensor: int, dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
        """The tensor as it lies there: valid until the slot is used again."""
        at = slot * self._slot_bytes + self._offsets[tensor]
        _, dimensions, *sizes = _SHAPE.unpack_from(self._memory, at)
        return np.ndarray(sizes[:dimensions], dtype, buffer=self._memory, offset=at + _SHAPE.size)

    def put_bytes(self, slot: int, tensor: int, data: bytes, shape: tuple[int, ...]) -> None:
        """A tensor whose elements have lengths of their own, serialised."""
        self._say(slot, tensor, len(data), shape)
        at = slot * self._slot_bytes + self._offsets[tensor] + _SHAPE.size
        self._memory[at : at + len(data)] = data

    def get_bytes(self, slot: int, tensor: int) -> tuple[bytes, tuple[int, ...]]:
        at = slot * self._slot_bytes + self._offsets[tensor]
        size, dimensions, *sizes = _SHAPE.unpack_from(self._memory, at)
        at += _SHAPE.size
        return self._memory[at : at + size], tuple(sizes[:dimensions])

    def put_line(self, slot: int, line: str) -> None:
        """Instead of outputs, why there are none."""
        data = line.replace("\n", " ").encode()[: self._slot_bytes - _WORD.size]
        at = slot * self._slot_bytes
        _WORD.pack_into(self._memory, at, len(data))
        self._memory[at + _WORD.size : at + _WORD.size + len(data)] = data

    def get_line(self, slot: int) -> str:
        at = slot * self._slot_bytes
        (size,) = _WORD.unpack_from(self._memory, at)
        return self._memory[at + _WORD.size : at + _WORD.size + size].decode(errors="replace")

    def close(self) -> None:
        with contextlib.suppress(BufferError):  # an answer that somebody still writes keeps it
            self._memory.close()
        os.close(self.descriptor)

    def _say(self, slot: int, tensor: int, size: int, shape: tuple[int, ...]) -> None:
        if size > self._rooms[tensor]:
            raise DeviceError(
                f"a tensor of {size} bytes is given, and a slot has room for {self._rooms[tensor]}"
            )
        sizes = (*shape, *(0,) * (6 - len(shape)))
        at = slot * self._slot_bytes + self._offsets[tensor]
        _SHAPE.pack_into(self._memory, at, size, len(shape), *sizes)


def allocate(name: str, size: int) -> int:
    """A descriptor of zeroed memory that is there.

    What the host does not have is refused before anything is taken: the kernel would otherwise fill
    all memory first, and end other processes for it.
    """
    room = _available_bytes()
    if size > room:
        raise DeviceError(
            f"no room for {size >> 20} MiB of shared memory, the host has {room >> 20} MiB; use "
            f"smaller batches or fewer fronts"
        )
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        os.close(descriptor)
        raise DeviceError(
            f"no room for {size >> 20} MiB of shared memory ({error.strerror}); use smaller "
            f"batches or fewer fronts"
        ) from None
    return descriptor


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62  # an old kernel, which does not say


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
