"""The devices by name.

A device's packages are heavy (numba, a GPU's driver), so they are imported when it is opened.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eclip.core.calibration import Calibration
from eclip.core.device import Device
from eclip.core.topology import Topology
from eclip.errors import UsageError, unknown_name
from eclip.gpu.findings import Finding
from eclip.gpu.partition import LaneMaker
from eclip.progress import Progress

_NAME = re.compile(r"(?P<kind>[a-z]+)(?::(?P<index>\d{1,3}))?", re.ASCII)


def open_device(
    name: str,
    topology: Topology | None = None,
    calibration: Calibration | None = None,
    progress: Progress | None = None,
) -> Device:
    """The device of this name: ``sim``, ``cuda``, ``hip`` or ``cuda:1``.

    ``topology`` and ``calibration`` are for the simulator; a GPU ignores them.
    """
    kind, index = _parse(name)
    return _OPENERS[kind](index, topology, calibration, progress or Progress())


def _parse(name: str) -> tuple[str, int]:
    match = _NAME.fullmatch(name)
    if match is None or match["kind"] not in _OPENERS:
        raise unknown_name("device", name, ["sim", *_measured_names()])
    return match["kind"], int(match["index"] or 0)


def open_lanes(name: str) -> LaneMaker:
    """What makes lanes on the GPU of this name for a program that uses the GPU by itself."""
    kind, index = _parse(name)
    if kind == "cuda":
        from eclip.cuda.lanes import CudaLanes

        return CudaLanes(index)
    if kind == "hip":
        from eclip.hip.driver import HipGpu, check_version
        from eclip.hip.lanes import HipLanes

        gpu = HipGpu(index)
        check_version(gpu.version)
        return HipLanes(gpu)
    raise UsageError(f"a simulator has no streams; choose one of: {', '.join(_measured_names())}")


def uuid_of(name: str) -> str:
    """The UUID of the GPU of this name, without making lanes on it."""
    kind, index = _parse(name)
    if kind == "cuda":
        from eclip.cuda.uuid import uuid_of as cuda_uuid

        return cuda_uuid(index)
    if kind == "hip":
        from eclip.hip.driver import HipGpu

        return HipGpu(index).uuid
    raise UsageError(f"a simulator has no UUID; choose one of: {', '.join(_measured_names())}")


@dataclass(frozen=True)
class Examined:
    findings: Sequence[Finding]
    install: str = ""  # the command that installs all packages, if some are missing


def examine_host(name: str) -> Examined:
    """Findings: whether this host can run plans on the GPU of this name, and what is missing."""
    kind, index = _parse(name)
    if kind == "cuda":
        from eclip.cuda import doctor as cuda

        return Examined(cuda.examine(index), cuda.INSTALL)
    if kind == "hip":
        from eclip.hip import doctor as hip

        return Examined(hip.examine(index))
    raise UsageError(f"a simulator needs no host; choose one of: {', '.join(_measured_names())}")


def _open_sim(
    index: int, topology: Topology | None, calibration: Calibration | None, progress: Progress
) -> Device:
    from eclip.sim.device import SimDevice

    if index:
        raise UsageError(f"there is no device sim:{index}; the only simulator is sim")
    if topology is None or calibration is None:
        raise UsageError(
            f"a simulator measures nothing; choose one of: {', '.join(_measured_names())}"
        )
    return SimDevice(topology, calibration, progress)


def _open_cuda(
    index: int, topology: Topology | None, calibration: Calibration | None, progress: Progress
) -> Device:
    from eclip.cuda.device import CudaDevice

    return CudaDevice(index, progress=progress)


def _open_hip(
    index: int, topology: Topology | None, calibration: Calibration | None, progress: Progress
) -> Device:
    from eclip.hip.device import HipDevice

    return HipDevice(index, progress)


def _measured_names() -> list[str]:
    return ["cuda", "hip", "cuda:1 or hip:1 for the second GPU"]


_Opener = Callable[[int, Topology | None, Calibration | None, Progress], Device]
_OPENERS: dict[str, _Opener] = {
    "sim": _open_sim,
    "cuda": _open_cuda,
    "hip": _open_hip,
}
