"""Topology and lanes of an AMD GPU: a lane is a stream with a CU mask.

Mask bits are dealt over the GPU's parts in turn: first over its XCDs, then over the shader engines
of each, then over CUs. So one shader engine of an MI50 is every fourth bit. A slice is a shader
engine; on a GPU of several XCDs it is the same engine of each, because thread blocks are dealt to
all XCDs, and one without units would never finish its share.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from eclip.core.plan import Lane
from eclip.core.topology import Mask, Topology
from eclip.errors import DeviceError
from eclip.gpu.closing import Releases, noting
from eclip.hip.api import STREAM_NON_BLOCKING
from eclip.hip.driver import QUEUES, Build, HipGpu

_WORD_BITS = 32
# Not measured on any AMD GPU: as much as on an H200 (docs/design/cuda.md).
_CONTEXT_BYTES = 530 << 20
_LANE_BYTES = 4 << 20


def slice_bits(build: Build) -> tuple[tuple[int, ...], ...]:
    """The mask bits of every slice. Where the engines have unequal numbers of units, those beyond
    the last full round are a slice of their own: which engine they are in is not told."""
    round_units = build.dies * build.engines
    full = build.units - build.units % round_units
    slices = [
        tuple(bit for bit in range(full) if bit // build.dies % build.engines == engine)
        for engine in range(build.engines)
    ]
    rest = tuple(range(full, build.units))
    return (*slices, rest) if rest else tuple(slices)


def mask_words(build: Build, mask: Mask) -> list[int]:
    """A lane's mask as HIP takes it: 32 bits a word."""
    slices = slice_bits(build)
    words = [0] * -(-build.units // _WORD_BITS)
    for index in mask:
        for bit in slices[index]:
            words[bit // _WORD_BITS] |= 1 << bit % _WORD_BITS
    return words


def read_topology(gpu: HipGpu) -> Topology:
    """The topology of this GPU; plans must be made for it."""
    build = gpu.build
    units = tuple(map(len, slice_bits(build)))
    sizes = sorted({sum(units[:count]) for count in range(1, build.engines)})
    name = gpu.name
    return Topology(
        name=name.removeprefix("AMD ").lower().replace(" ", "-"),
        title=name,
        unit_name=build.unit_name,
        compute=build.compute,
        slice_units=units,
        lane_sizes=(*sizes, build.units),
        hardware_queues=QUEUES,
        memory_bytes=gpu.memory_bytes,
        context_bytes=_CONTEXT_BYTES,
        lane_bytes=_LANE_BYTES,
        source="read from HIP and the kernel driver; the memory of contexts and lanes is assumed "
        "as on an H200",
    )


class MaskedStreams:
    """Streams by mask, kept and handed out again: since ROCm 5.6 at the latest, destroying one
    leaves its hardware queue behind until the process ends."""

    def __init__(self, gpu: HipGpu) -> None:
        self.gpu = gpu
        self._unused: dict[Mask, list[int]] = {}

    def take(self, mask: Mask) -> int:
        slices = len(slice_bits(self.gpu.build))
        if not mask or not mask <= Mask(range(slices)):
            raise DeviceError(f"mask {mask} names slices that {self.gpu.name} does not have")
        if unused := self._unused.get(mask):
            return unused.pop()
        if len(mask) == slices:
            return self.gpu.hip.made("hipStreamCreateWithFlags", STREAM_NON_BLOCKING)
        return self._make(mask)

    def give_back(self, mask: Mask, stream: int) -> None:
        """Wait for the stream and keep it for reuse. A stream that cannot be waited for is lost."""
        self.gpu.wait_for(stream)
        self._unused.setdefault(mask, []).append(stream)

    def _make(self, mask: Mask) -> int:
        hip = self.gpu.hip
        words = mask_words(self.gpu.build, mask)
        wanted = (ctypes.c_uint * len(words))(*words)
        found = (ctypes.c_uint * len(words))()
        stream = hip.made("hipExtStreamCreateWithCUMask", len(words), wanted)
        hip.call("hipExtStreamGetCUMask", stream, len(words), found)
        if list(found) != words:
            hip.call("hipStreamDestroy", stream)
            raise DeviceError(
                f"HIP gave the lane of slices {mask} the units {_hex(list(found))} instead of "
                f"{_hex(words)}; is a mask set for the whole process?"
            )
        return stream

    def close(self) -> None:
        unused, self._unused = self._unused, {}
        releases = Releases()
        for streams in unused.values():
            for stream in streams:
                releases.callback(self.gpu.hip.call, "hipStreamDestroy", stream)
        releases.close()


class HipLanes:
    """Lanes for programs that use HIP already, such as PyTorch's (gpu/partition.py)."""

    def __init__(self, gpu: HipGpu) -> None:
        self.gpu = gpu
        self._streams = MaskedStreams(gpu)  # never closed: a partition keeps its streams
        self.topology = read_topology(gpu)

    def make_lane(self, mask: Mask) -> int:
        with self.gpu.ready_to_close():
            return self._streams.take(mask)

    def wait_for(self, stream: int) -> None:
        with self.gpu.ready_to_close():
            self.gpu.wait_for(stream)

    def units_of(self, mask: Mask, stream: int) -> frozenset[int]:
        """The bits of the CU mask, which the runtime has confirmed when it made the stream."""
        bits = slice_bits(self.gpu.build)
        return frozenset(bit for index in mask for bit in bits[index])


class MaskedLanes:
    """A session's lanes, in the order of its plan; their streams belong to ``MaskedStreams``."""

    def __init__(self, masked: MaskedStreams, lanes: Sequence[Lane]) -> None:
        self._releases = Releases()
        self.streams: list[int] = []
        try:
            for lane in lanes:
                stream = masked.take(lane.mask)
                self._releases.callback(masked.give_back, lane.mask, stream)
                self.streams.append(stream)
        except BaseException as error:
            with noting(error):
                self.close()
            raise

    def close(self) -> None:
        self._releases.close()


def _hex(words: list[int]) -> str:
    return "0x" + "".join(f"{word:08x}" for word in reversed(words))
