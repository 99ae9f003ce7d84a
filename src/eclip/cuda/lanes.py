"""Topology read from the driver, and the pool of lanes: green contexts and streams, one per mask.

Slices are the groups of one split call and the remainder after them, in that order, so that any set
of slices makes one context and sets may overlap. A lane of all slices is an ordinary stream of the
primary context: captured graphs run there unchanged, which is what plain streams do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eclip.core.topology import Mask, Topology
from eclip.cuda.driver import CONNECTIONS, Gpu, call, cu
from eclip.cuda.stressors import Stressors
from eclip.errors import DeviceError
from eclip.gpu.closing import Releases, noting

_COARSE_UNITS = 8  # Hopper's smallest slice whose SMs are scheduled together
_FINE_UNITS = 2
# CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING, whose enum was renamed between bindings.
_IGNORE_COSCHEDULING = 1
_SIZES = 8  # how many lane sizes a device gets unless told otherwise
# Measured on an H200 with driver 580.159.04 (docs/design/cuda.md); taken for every GPU.
_CONTEXT_BYTES = 530 << 20
_LANE_BYTES = 4 << 20


class Slices:
    """The SMs of a GPU as the driver splits them."""

    def __init__(self, gpu: Gpu, fine: bool = False) -> None:
        kind = cu.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        whole = call(cu.cuDeviceGetDevResource, gpu.handle, kind)
        units = _FINE_UNITS if fine else _COARSE_UNITS
        most = whole.sm.smCount // units
        flags = _IGNORE_COSCHEDULING if fine else 0
        groups, count, rest = call(cu.cuDevSmResourceSplitByCount, most, whole, flags, units)
        self.gpu = gpu
        self.fine = fine
        self.resources: list[Any] = list(groups[:count])
        if rest.sm.smCount > 0:
            self.resources.append(rest)
        self._unused: dict[Mask, list[Any]] = {}

    def take_context(self, mask: Mask) -> Any:
        """A green context of this mask, new or reused.

        Contexts are kept, because destroying a context leaks 4 MiB of GPU memory until the process
        ends (driver 580.159.04), and making a context takes milliseconds.
        """
        if not mask or not mask <= Mask(range(len(self.resources))):
            raise DeviceError(f"mask {mask} names slices that {self.gpu.name} does not have")
        if unused := self._unused.get(mask):
            return unused.pop()
        chosen = [self.resources[index] for index in mask]
        description = call(cu.cuDevResourceGenerateDesc, chosen, len(chosen))
        flags = cu.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        return call(cu.cuGreenCtxCreate, description, self.gpu.handle, flags)

    def give_back_context(self, mask: Mask, green: Any) -> None:
        self._unused.setdefault(mask, []).append(green)

    def close(self) -> None:
        """Destroy the contexts that were given back."""
        unused, self._unused = self._unused, {}
        releases = Releases()
        for contexts in unused.values():
            for green in contexts:
                releases.callback(call, cu.cuGreenCtxDestroy, green)
        releases.close()

    @property
    def units(self) -> tuple[int, ...]:
        return tuple(int(resource.sm.smCount) for resource in self.resources)

    def topology(self) -> Topology:
        """The topology of this GPU; plans must be made for it."""
        units = self.units
        # Evenly spaced sizes of whole slices; the odd slice at the end only with all the others.
        step = max(1, -(-len(units) // _SIZES))
        sizes = sorted({sum(units[:count]) for count in range(step, len(units), step)})
        name = self.gpu.name
        return Topology(
            name=name.removeprefix("NVIDIA ").lower().replace(" ", "-") + ("-fine" * self.fine),
            title=name,
            unit_name="SM",
            compute=self.gpu.compute,
            slice_units=units,
            lane_sizes=(*sizes, sum(units)),
            hardware_queues=CONNECTIONS,
            memory_bytes=self.gpu.memory_bytes,
            context_bytes=_CONTEXT_BYTES,
            lane_bytes=_LANE_BYTES,
            source="read from the driver; the memory of contexts and lanes is as on an H200",
        )


@dataclass(frozen=True)
class GpuLane:
    """A stream bound to a mask; ``context`` is what graph nodes of this lane are homed in."""

    mask: Mask
    stream: Any
    context: Any
    priority: int = 0  # as CUDA counts: lower goes first, 0 is what streams have by default


class LanePool:
    """Lanes made once, at the start; owns their streams. Their contexts belong to the slices."""

    def __init__(
        self, slices: Slices, masks: Sequence[Mask], priorities: Sequence[int] | None = None
    ) -> None:
        """``priorities`` are a plan's: 0 for the least, more goes first."""
        self.gpu = slices.gpu
        self._releases = Releases()
        self.lanes: list[GpuLane] = []
        try:
            for mask, wanted in zip(masks, priorities or [0] * len(masks), strict=True):
                self.lanes.append(self._make(slices, mask, cuda_priority(wanted)))
        except BaseException as error:
            with noting(error):
                self.close()
            raise

    def _make(self, slices: Slices, mask: Mask, priority: int) -> GpuLane:
        non_blocking = cu.CUstream_flags.CU_STREAM_NON_BLOCKING
        if len(mask) == len(slices.resources):
            context = self.gpu.context
            stream = call(cu.cuStreamCreateWithPriority, non_blocking, priority)
            self._releases.callback(_release_stream, stream)
            return GpuLane(mask, stream, context, priority)
        green = slices.take_context(mask)
        try:
            context = call(cu.cuCtxFromGreenCtx, green)
            stream = call(cu.cuGreenCtxStreamCreate, green, non_blocking, priority)
        except BaseException:
            slices.give_back_context(mask, green)
            raise
        self._releases.callback(_release_lane, slices, mask, green, stream)
        return GpuLane(mask, stream, context, priority)

    def close(self) -> None:
        """Release everything, a lane's stream before its context, even if a release fails."""
        self.lanes = []
        self._releases.close()


class CudaLanes:
    """Lanes for programs that have a context already, such as PyTorch's (gpu/partition.py).

    If CUDA is initialised already, the program keeps the number of hardware queues that it has.
    """

    def __init__(self, index: int = 0) -> None:
        self.gpu = Gpu(index, insist=False)
        self._slices = Slices(self.gpu)
        self.topology = self._slices.topology()
        self._pools: list[LanePool] = []  # never closed: a partition keeps its streams

    def make_lane(self, mask: Mask) -> int:
        with self.gpu.ready_to_close():
            pool = LanePool(self._slices, [mask])
        self._pools.append(pool)
        return int(pool.lanes[0].stream)

    def wait_for(self, stream: int) -> None:
        with self.gpu.ready_to_close():
            self.gpu.wait_for(stream)

    def units_of(self, mask: Mask, stream: int) -> frozenset[int]:
        """The numbers that kernels on this lane find in %smid."""
        with self.gpu.ready_to_close(), contextlib.closing(Stressors(self.gpu)) as kernels:
            return kernels.sms_of(stream)


def cuda_priority(wanted: int) -> int:
    """CUDA's number for a plan's priority, in the current context."""
    if wanted == 0:
        return 0
    least, greatest = call(cu.cuCtxGetStreamPriorityRange)
    if wanted > least - greatest:
        raise DeviceError(
            f"the plan asks for priority {wanted}, but streams here have {least - greatest + 1} "
            f"levels, counted from 0; plan with fewer"
        )
    return int(least) - wanted


def _release_lane(slices: Slices, mask: Mask, green: Any, stream: Any) -> None:
    """A context whose stream could not be waited for is not handed out again."""
    _release_stream(stream)
    slices.give_back_context(mask, green)


def _release_stream(stream: Any) -> None:
    try:
        call(cu.cuStreamSynchronize, stream)
    finally:
        call(cu.cuStreamDestroy, stream)
