"""Growth of the interval with the actual A, on either kind of machine, and the best mechanism."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from eclip.errors import UsageError
from eclip.files.machine import Machine
from eclip.varout import gpu_model, model
from eclip.varout.mechanisms import Mechanism

RATIOS = 41
_UNBOUNDED_REACH = 4  # how far beyond the allocation an unbounded stage is shown


class Point(msgspec.Struct, frozen=True, kw_only=True):
    ratio: float  # actual A
    exact: float  # interval with exact allocation, in the machine's unit
    interval: dict[str, float | None]  # by mechanism; None: it cannot serve this length
    best: str  # of those that can


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    machine: str
    title: str
    unit: str
    modelled: bool
    source: str
    allocated_ratio: float
    points: tuple[Point, ...]

    def percent(self, mechanism: str) -> list[float | None]:
        """By how many percent the interval is longer than with exact allocation."""
        found = [(point.interval[mechanism], point.exact) for point in self.points]
        return [None if mine is None else 100 * (mine / exact - 1) for mine, exact in found]


def compare(
    machine: Machine,
    allocated_ratio: float | None = None,
    ratios: Sequence[float] | None = None,
) -> Growth:
    allocated = _allocated(machine, allocated_ratio)
    if ratios is None:
        largest = machine.parameters.largest_ratio
        reach = _UNBOUNDED_REACH * allocated if largest is None else largest
        ratios = np.round(np.linspace(0, reach, RATIOS), 9).tolist()
    points = []
    for ratio in ratios:
        times = {one: _interval(machine, one, allocated, ratio) for one in Mechanism}
        exact = times.pop(Mechanism.EXACT)
        if exact is None:
            raise UsageError(f"there is no baseline for A = {ratio:g}")
        able = {one: time for one, time in times.items() if time is not None}
        points.append(
            Point(
                ratio=ratio,
                exact=exact,
                interval={one.value: time for one, time in times.items()},
                best=min(able, key=lambda one: able[one]).value,
            )
        )
    return Growth(
        machine=machine.name,
        title=machine.title,
        unit=machine.unit,
        modelled=machine.modelled,
        source=machine.source,
        allocated_ratio=allocated,
        points=tuple(points),
    )


def _allocated(machine: Machine, wanted: float | None) -> float:
    """The A to allocate for: ``wanted``, the machine's own, or a sixteenth of the largest."""
    if wanted is not None:
        if not wanted > 0:
            raise UsageError(f"the allocated A must be more than 0, not {wanted:g}")
        largest = machine.parameters.largest_ratio
        if largest is not None and wanted > largest:
            raise UsageError(f"the allocated A of {wanted:g} is more than the largest, {largest:g}")
        return wanted
    if machine.stream is not None:
        return machine.stream.allocated_ratio
    largest = machine.parameters.largest_ratio
    return 1.0 if largest is None else largest / 16


def _interval(
    machine: Machine, mechanism: Mechanism, allocated: float, ratio: float
) -> float | None:
    if machine.stream is not None:
        stream = msgspec.structs.replace(machine.stream, allocated_ratio=allocated)
        return model.interval(stream, mechanism, ratio)
    if machine.gpu is None:
        return None
    capacity = max(1, round(allocated * machine.gpu.inputs))
    return gpu_model.time_ns(machine.gpu, mechanism, capacity, round(ratio * machine.gpu.inputs))
