"""Topology read from the driver, and the pool of lanes: green contexts and streams, one per mask.

Slices are the groups of one split call and the remainder after them, in that order, so that any set
of slices makes one context and sets may overlap. A lane of all slices is an ordinary stream of the
primary context: captured graphs run there unchanged, which is what plain streams do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eclip.devices.cuda.driver import CONNECTIONS, Gpu, call, cu
from eclip.errors import DeviceError
from eclip.topology import Mask, Topology

_COARSE_UNITS = 8  # Hopper's smallest slice whose SMs are scheduled together
_FINE_UNITS = 2
# CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING, whose enum was renamed between bindings.
_IGNORE_COSCHEDULING = 1
_SIZES = 8  # how many lane sizes a device gets unless told otherwise


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

    @property
    def units(self) -> tuple[int, ...]:
        return tuple(int(resource.sm.smCount) for resource in self.resources)

    def topology(self) -> Topology:
        """What plans must have been made for to run here."""
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
            source="read from the driver",
        )


@dataclass(frozen=True)
class GpuLane:
    """A stream bound to a mask; ``context`` is what graph nodes of this lane are homed in."""

    mask: Mask
    stream: Any
    context: Any
    green: Any | None  # None: the primary context, all units


class LanePool:
    """Lanes made once; closed in the order streams, then green contexts. Owns both."""

    def __init__(self, slices: Slices, masks: Sequence[Mask]) -> None:
        self.gpu = slices.gpu
        self.lanes: list[GpuLane] = []
        try:
            for mask in masks:
                self.lanes.append(self._make(slices, mask))
        except BaseException:
            self.close()
            raise

    def _make(self, slices: Slices, mask: Mask) -> GpuLane:
        if not mask <= Mask(range(len(slices.resources))):
            raise DeviceError(f"mask {mask} names slices that {self.gpu.name} does not have")
        non_blocking = cu.CUstream_flags.CU_STREAM_NON_BLOCKING
        if len(mask) == len(slices.resources):
            return GpuLane(mask, call(cu.cuStreamCreate, non_blocking), self.gpu.context, None)
        chosen = [slices.resources[index] for index in mask]
        description = call(cu.cuDevResourceGenerateDesc, chosen, len(chosen))
        flags = cu.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        green = call(cu.cuGreenCtxCreate, description, self.gpu.handle, flags)
        try:
            context = call(cu.cuCtxFromGreenCtx, green)
            stream = call(cu.cuGreenCtxStreamCreate, green, non_blocking, 0)
        except BaseException:
            call(cu.cuGreenCtxDestroy, green)
            raise
        return GpuLane(mask, stream, context, green)

    def close(self) -> None:
        lanes, self.lanes = self.lanes, []
        for lane in lanes:
            call(cu.cuStreamSynchronize, lane.stream)
            call(cu.cuStreamDestroy, lane.stream)
        for lane in lanes:
            if lane.green is not None:
                call(cu.cuGreenCtxDestroy, lane.green)
