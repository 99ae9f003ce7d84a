"""What a front and the device process share: rings of batches, and slots for their tensors.

Tensors lie in slots, one memory a service and front; a slot belongs to the front until a row of a
ring names it, then to the device process until that row is answered. The rings of
core/requests.py are one memory for each sitting of a front, generation and device process: none is
ever used again, so a front that was given up and lives on disturbs nobody. A descriptor for each
loop, and one for the front, say that there is news.

All memory is allocated before it is mapped: a full host is an error here, not a SIGBUS later.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from eclip.core.device import Closing
from eclip.core.requests import Ring, ring_words
from eclip.errors import DeviceError

_WORD = struct.Struct("<q")
_ALIGN = 64
_SHAPE = struct.Struct("<8q")  # bytes of data, dimensions, six sizes

IN_FLIGHT = 2  # batches of an instance on the device: one runs, one is behind it


class Signal(Closing):
    """An eventfd."""

    def __init__(self, descriptor: int | None = None) -> None:
        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
        self.descriptor = os.eventfd(0, flags) if descriptor is None else descriptor

    def raise_(self) -> None:
        os.eventfd_write(self.descriptor, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)

    def close(self) -> None:
        os.close(self.descriptor)


def rings_bytes(rows: Sequence[int]) -> int:
    """Of the rings of a door, with so many rows for each group."""
    return 8 * sum(map(ring_words, rows))


def map_rings(descriptor: int, rows: Sequence[int]) -> list[Ring]:
    """The rings in this memory, which stays mapped as long as one of them is used. The descriptor
    is closed."""
    words = np.frombuffer(mmap.mmap(descriptor, rings_bytes(rows)), dtype=np.int64)
    os.close(descriptor)
    ends = np.cumsum([ring_words(count) for count in rows])[:-1]
    parts = np.split(words, ends)
    return [Ring(count, part) for count, part in zip(rows, parts, strict=True)]


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
