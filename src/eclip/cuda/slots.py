"""Slots on a GPU: pinned host memory for requests, and what copies it to a capture and back.

Copies are recorded once for every slot, as two small graphs that the loop launches before the first
stretch of a request and after its last. They read and write the capture's own static buffers, so
the model's executables are not multiplied by slots.

Memory is allocated here, or it is the caller's, such as a mapping that it shares with another
process; then the pages of its buffers are registered with the driver until the session closes, and
any other session that has slots in them.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eclip.core.device import Bytes, Slot
from eclip.cuda.driver import call, cu
from eclip.cuda.graphs import Executable
from eclip.desk import slots_for
from eclip.errors import DeviceError, UsageError
from eclip.gpu.closing import Releases
from eclip.gpu.commands import Recorder
from eclip.gpu.executables import Buffer, Capture
from eclip.gpu.steps import Words

_ALIGNMENT = 256  # of buffers, for copies at full speed


class PinnedPages:
    """Pages that are registered with the driver, which takes each only once. A session that opens
    beside another may have its slots in the same ones."""

    def __init__(self) -> None:
        self._users: dict[range, int] = {}
        self._lock = threading.Lock()  # one session closes while another opens

    def register(self, pages: range, owner: Releases) -> None:
        with self._lock:
            if pages not in self._users:
                call(cu.cuMemHostRegister, pages.start, len(pages), 0)
            self._users[pages] = self._users.get(pages, 0) + 1
        owner.callback(self._leave, pages)

    def _leave(self, pages: range) -> None:
        with self._lock:
            self._users[pages] -= 1
            if not self._users[pages]:
                del self._users[pages]
                call(cu.cuMemHostUnregister, pages.start)


def prepare_slots(
    captures: Sequence[Capture],
    slots: int | Sequence[Sequence[Slot]],  # the number for each capture, or given slots
    context: Any,
    pinned: PinnedPages,
    owner: Releases,
) -> tuple[Sequence[Sequence[Slot]], list[Words]]:
    """The slots of every capture, and the executables that copy them."""
    made = slots_for(slots, len(captures), lambda worker: _make_slot(captures[worker], owner))
    if not isinstance(slots, int):
        _register(captures, slots, pinned, owner)
    copies = [
        _record_copies(capture, of_worker, context, owner)
        for capture, of_worker in zip(captures, made, strict=True)
    ]
    return made, copies


def _register(
    captures: Sequence[Capture],
    slots: Sequence[Sequence[Slot]],
    pinned: PinnedPages,
    owner: Releases,
) -> None:
    """Slots in memory of the caller's, for each capture."""
    buffers: list[Bytes] = []
    for capture, of_worker in zip(captures, slots, strict=True):
        inputs, outputs = _buffers_of(capture)
        for slot in of_worker:
            for given, wanted in ((slot.inputs, inputs), (slot.outputs, outputs)):
                _check(capture, given, wanted)
                buffers += given
    for pages in _pages_of(buffers):
        pinned.register(pages, owner)


def _record_copies(capture: Capture, slots: Sequence[Slot], context: Any, owner: Releases) -> Words:
    """Per slot the executables that copy its inputs and its outputs; 0: there are none."""
    inputs, outputs = _buffers_of(capture)
    staging = capture.stage() if capture.stage is not None and slots else None
    if staging is not None:
        owner.callback(staging.owner.close)
        inputs = staging.inputs
    executables = np.zeros((len(slots), 2), dtype=np.uint64)
    for number, slot in enumerate(slots):
        ways = ((slot.inputs, inputs, True), (slot.outputs, outputs, False))
        for way, (host, device, inward) in enumerate(ways):
            copies = [_Copy(*pair, inward) for pair in zip(host, device, strict=True)]
            if copies:
                then = staging.graph if staging is not None and inward else None
                executables[number, way] = _record(copies, then, context, owner)
    return executables


@dataclass(frozen=True)
class _Copy:
    host: Bytes
    device: Buffer
    inward: bool

    def params(self) -> Any:
        made = cu.CUDA_MEMCPY3D()
        host, device = cu.CUmemorytype.CU_MEMORYTYPE_HOST, cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
        if self.inward:
            made.srcMemoryType, made.srcHost = host, self.host.ctypes.data
            made.dstMemoryType, made.dstDevice = device, cu.CUdeviceptr(self.device.address)
        else:
            made.srcMemoryType, made.srcDevice = device, cu.CUdeviceptr(self.device.address)
            made.dstMemoryType, made.dstHost = host, self.host.ctypes.data
        made.WidthInBytes, made.Height, made.Depth = self.device.size_bytes, 1, 1
        return made


class _CopyNodes:
    """Makes nodes for the recorder: the copies, and the node after them."""

    def __init__(self, graph: Any, copies: Sequence[_Copy], then: int | None, context: Any) -> None:
        self._graph = graph
        self._copies = copies
        self._then = then
        self._context = context

    def command(self, command: int, after: Sequence[Any]) -> Any:
        before = list(after)
        if command == len(self._copies):
            return call(cu.cuGraphAddChildGraphNode, self._graph, before, len(before), self._then)
        params = self._copies[command].params()
        return call(
            cu.cuGraphAddMemcpyNode, self._graph, before, len(before), params, self._context
        )

    def join(self, after: Sequence[Any]) -> Any:
        return call(cu.cuGraphAddEmptyNode, self._graph, list(after), len(after))


def _record(copies: Sequence[_Copy], then: int | None, context: Any, owner: Releases) -> int:
    """Copies that do not wait for each other, as an executable."""
    graph = call(cu.cuGraphCreate, 0)
    try:
        recorder = Recorder(_CopyNodes(graph, copies, then, context))
        for number in range(len(copies)):
            recorder.command(number)
        if then is not None:
            recorder.barrier()
            recorder.command(len(copies))
        executable = Executable(graph)
    finally:
        call(cu.cuGraphDestroy, graph)
    owner.callback(executable.close)
    return int(executable.handle)


def _buffers_of(capture: Capture) -> tuple[Sequence[Buffer], Sequence[Buffer]]:
    if capture.outputs is None:
        raise DeviceError(
            f"an output of {capture.trace.model} is not contiguous, so it cannot be copied to a "
            f"slot; let the model return output.contiguous()"
        )
    return capture.inputs, capture.outputs


def _make_slot(capture: Capture, owner: Releases) -> Slot:
    inputs, outputs = _buffers_of(capture)
    ends = np.cumsum([_room(buffer) for buffer in (*inputs, *outputs)]).tolist()
    if not ends:
        return Slot()
    address = int(call(cu.cuMemHostAlloc, ends[-1], 0))
    owner.callback(call, cu.cuMemFreeHost, address)
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * ends[-1]).from_address(address))
    parts = tuple(
        memory[end - _room(buffer) :][: buffer.size_bytes]
        for end, buffer in zip(ends, (*inputs, *outputs), strict=True)
    )
    return Slot(parts[: len(inputs)], parts[len(inputs) :])


def _room(buffer: Buffer) -> int:
    return -(-buffer.size_bytes // _ALIGNMENT) * _ALIGNMENT


def _check(capture: Capture, given: Sequence[Bytes], wanted: Sequence[Buffer]) -> None:
    sizes = [buffer.size_bytes for buffer in wanted]
    if [buffer.nbytes for buffer in given] != sizes or not all(
        buffer.dtype == np.uint8 and buffer.ndim == 1 and buffer.flags.c_contiguous
        for buffer in given
    ):
        raise UsageError(
            f"a slot of {capture.trace.model} needs flat buffers of {sizes} bytes; it was given "
            f"{[buffer.nbytes for buffer in given]}"
        )


def _pages_of(buffers: Iterable[Bytes]) -> list[range]:
    """The buffers' pages without repeats: the driver refuses a page that is registered already."""
    page = mmap.PAGESIZE
    found: list[range] = []
    for start, size in sorted((buffer.ctypes.data, buffer.nbytes) for buffer in buffers):
        pages = range(start // page * page, -(-(start + size) // page) * page)
        if found and pages.start < found[-1].stop:
            found[-1] = range(found[-1].start, max(found[-1].stop, pages.stop))
        elif pages:
            found.append(pages)
    return found
