"""Devices, and the one place that knows their names: ``open_device``.

A device's room is heavy (numba, the CUDA driver), so it is imported when its device is opened.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from eclip.artefacts.calibration import Calibration
from eclip.artefacts.topology import Topology
from eclip.devices.base import Device
from eclip.errors import UsageError, unknown_name
from eclip.progress import Progress

_NAME = re.compile(r"(?P<kind>[a-z]+)(?::(?P<index>\d{1,3}))?", re.ASCII)


def open_device(
    name: str,
    topology: Topology | None = None,
    calibration: Calibration | None = None,
    progress: Progress | None = None,
) -> Device:
    """The device of this name: ``sim``, ``cuda`` or ``cuda:1``.

    A simulator simulates the topology with the calibration's constants; a GPU has its own.
    """
    match = _NAME.fullmatch(name)
    if match is None or match["kind"] not in _OPENERS:
        raise unknown_name("device", name, [*_OPENERS, "cuda:1 for the second GPU"])
    index = int(match["index"] or 0)
    return _OPENERS[match["kind"]](index, topology, calibration, progress or Progress())


def _open_sim(
    index: int, topology: Topology | None, calibration: Calibration | None, progress: Progress
) -> Device:
    from eclip.devices.sim.device import SimDevice

    if index or topology is None or calibration is None:
        raise UsageError("the simulator is named sim, and needs a topology and a calibration")
    return SimDevice(topology, calibration, progress)


def _open_cuda(
    index: int, topology: Topology | None, calibration: Calibration | None, progress: Progress
) -> Device:
    from eclip.devices.cuda.device import CudaDevice

    return CudaDevice(index, progress=progress)


_Opener = Callable[[int, Topology | None, Calibration | None, Progress], Device]
_OPENERS: dict[str, _Opener] = {"sim": _open_sim, "cuda": _open_cuda}
