"""An AMD GPU: HIP runs the work, and the kernel driver's files describe the hardware.

HIP does not say how many shader engines a GPU has, but the kernel driver (KFD) does, in
/sys/class/kfd; the two are matched by the GPU's place on the PCI bus. docs/amd.md has the sources
of what this room rests on.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eclip.errors import DeviceError
from eclip.gpu.entry_points import EntryPoints
from eclip.hip.api import LEAST, NO_DEVICE, Hip, Uuid

# Up to 7 masked streams beside the default stream run side by side on an MI50 (the paper). HIP
# gives a masked stream its own queue; other streams share the variable's number of queues, or 4.
QUEUES = 8
QUEUES_VARIABLE = "GPU_MAX_HW_QUEUES"
# They take units from every queue behind our back; HIP shows a lane's mask without the first.
_GLOBAL_MASKS = ("HSA_CU_MASK", "ROC_GLOBAL_CU_MASK")
_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
_RDNA = 10  # from this major version on, units are WGPs: two CUs each


@dataclass(frozen=True)
class Build:
    """A GPU's units. A unit is a CU, or on RDNA a WGP; each is one bit of a mask."""

    compute: str  # gfx906
    units: int
    unit_threads: int  # that a unit holds: 2560 on an MI50, 2048 on an MI300X
    engines: int  # shader engines, of each XCD
    dies: int  # XCDs

    @property
    def unit_name(self) -> str:
        return "WGP" if _major(self.compute) >= _RDNA else "CU"


class HipGpu:
    """One GPU and the library that drives it."""

    def __init__(
        self, index: int = 0, library: Path | None = None, nodes: Path | None = None
    ) -> None:
        """``library`` and ``nodes``: in place of HIP and of the kernel driver's files."""
        _ask_for_queues()
        self.hip = Hip(library)
        count = ctypes.c_int()
        status = self.hip.status("hipGetDeviceCount", ctypes.byref(count))
        if status == NO_DEVICE or (status == 0 and count.value == 0):
            raise DeviceError(
                f"no AMD GPU: {self.hip.path} finds none; is the amdgpu driver loaded, and may "
                f"this user open /dev/kfd?"
            )
        if status:
            raise DeviceError(f"hipGetDeviceCount failed: {self.hip.describe(status)}")
        if not 0 <= index < count.value:
            raise DeviceError(
                f"there is no GPU {index}; this host has {count.value}, counted from 0"
            )
        self.index = index
        self.make_current()
        self.build = _read_build(nodes or _NODES, self.bus_place)
        self.entry_points = EntryPoints(
            library=self.hip.path,
            graph_launch="hipGraphLaunch",
            event_record="hipEventRecord",
            stream_wait="hipStreamWaitEvent",
            event_hold="hipEventSynchronize",
            synchronise="hipStreamSynchronize",
        )

    @property
    def bus_place(self) -> str:
        return self.hip.text("hipDeviceGetPCIBusId", self.index)

    @property
    def name(self) -> str:
        return self.hip.text("hipDeviceGetName", self.index) or f"AMD {self.build.compute}"

    @property
    def version(self) -> str:
        """Of ROCm's HIP: ``5.2.21153``."""
        number = self.hip.number("hipRuntimeGetVersion", ctypes.c_int)
        major, rest = divmod(number, 10_000_000)
        return f"{major}.{rest // 100_000}.{rest % 100_000}"

    @property
    def uuid(self) -> str:
        found = Uuid()
        self.hip.call("hipDeviceGetUuid", ctypes.byref(found), self.index)
        return "GPU-" + ctypes.string_at(ctypes.addressof(found), 16).hex()

    @property
    def memory_bytes(self) -> int:
        return self.hip.number("hipDeviceTotalMem", ctypes.c_size_t, self.index)

    def free_memory(self) -> int:
        total = ctypes.c_size_t()
        return self.hip.number("hipMemGetInfo", ctypes.c_size_t, ctypes.byref(total))

    # --- What the loop, sessions and closing ask ---------------------------------------------

    def make_current(self) -> None:
        self.hip.call("hipSetDevice", self.index)

    def describe(self, status: int) -> str:
        return self.hip.describe(status)

    @contextlib.contextmanager
    def ready_to_close(self) -> Iterator[None]:
        self.make_current()
        with self.hip.relaxed():
            yield

    def wait_for(self, stream: Any) -> None:
        self.hip.call("hipStreamSynchronize", stream)

    def quicken(self) -> None:
        """Nothing is known here that would bring an AMD GPU into another state."""


def check_version(version: str) -> None:
    if tuple(map(int, version.split(".")[:2])) < LEAST:
        raise DeviceError(f"HIP here is {version}; lanes need ROCm 5.2 or newer")


def _ask_for_queues() -> None:
    """HIP reads its variables when the library is first called."""
    for name in _GLOBAL_MASKS:
        if os.environ.get(name):
            raise DeviceError(f"{name} takes units from every lane; unset it and start again")
    chosen = os.environ.setdefault(QUEUES_VARIABLE, str(QUEUES))
    if chosen != str(QUEUES):
        raise DeviceError(
            f"{QUEUES_VARIABLE} is {chosen}, but plans are made for {QUEUES}; set it so, or unset "
            f"it, before the process starts"
        )


def _read_build(nodes: Path, bus_place: str) -> Build:
    """``bus_place``: 0000:43:00.0, as HIP names it."""
    domain, bus, rest = bus_place.split(":")
    device, function = rest.split(".")
    location = int(bus, 16) << 8 | int(device, 16) << 3 | int(function, 16)
    for folder in sorted(nodes.glob("*"), key=lambda one: int(one.name)):
        found = _read_properties(folder / "properties")
        place = (found.get("domain", 0), found.get("location_id", 0))
        if found.get("simd_count", 0) and place == (int(domain, 16), location):
            return _build(found)
    raise DeviceError(
        f"the kernel driver does not tell of the GPU at {bus_place} in {nodes}; update the amdgpu "
        f"driver, or make /sys/class/kfd visible in the container"
    )


def _read_properties(path: Path) -> Mapping[str, int]:
    try:
        lines = path.read_text().splitlines()
    except OSError:  # a node that this user or container may not see
        return {}
    return {name: int(value) for name, value in (line.split() for line in lines if line)}


def _build(found: Mapping[str, int]) -> Build:
    version = found["gfx_target_version"]
    compute = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
    dies = max(1, found.get("num_xcc", 1))
    engines = found["array_count"] // found["simd_arrays_per_engine"]
    unit_cus = 2 if _major(compute) >= _RDNA else 1
    cu_waves = found["simd_per_cu"] * found["max_waves_per_simd"]
    return Build(
        compute=compute,
        units=found["simd_count"] // found["simd_per_cu"] // unit_cus,
        unit_threads=unit_cus * cu_waves * found["wave_front_size"],
        engines=max(1, engines // dies),
        dies=dies,
    )


def _major(compute: str) -> int:
    """gfx906 is 9, gfx1100 is 11: two hexadecimal digits follow."""
    return int(compute.removeprefix("gfx")[:-2])
