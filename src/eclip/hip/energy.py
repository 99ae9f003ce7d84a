"""Energy by rocm-smi's library, if it is there.

Newer GPUs count their energy. An MI50 only tells its mean power, as the paper measured it: there
the counter is the sum of power times time since it was last asked.
"""

from __future__ import annotations

import contextlib
import ctypes
from ctypes import c_float, c_uint32, c_uint64
from pathlib import Path

from eclip.errors import DeviceError
from eclip.gpu.energy import Tick, await_tick, now_ns

LIBRARIES = ("librocm_smi64.so.7", "librocm_smi64.so.6", "librocm_smi64.so.5", "librocm_smi64.so")
_PERIOD_S = 0.01


class RocmSmi:
    """rocm-smi's counters of the GPU at this place on the PCI bus."""

    def __init__(self, bus_place: str, library: Path | None = None) -> None:
        self.ours: set[int] = set()
        self._library = _load(library)
        self._ask("rsmi_init", c_uint64(0))
        self._device = self._find(bus_place)
        self._summed_uj = 0.0
        self._asked_ns = now_ns()
        self.energy_mj()  # refuses now rather than in the middle of a run

    def tick_before(self, end_ns: int) -> Tick | None:
        return await_tick(self.energy_mj, end_ns, _PERIOD_S)

    def other_processes(self) -> list[int]:
        """Always empty: rocm-smi cannot tell which GPU a process uses."""
        return []

    def close(self) -> None:
        self._ask("rsmi_shut_down")

    def _find(self, bus_place: str) -> c_uint32:
        domain, bus, rest = bus_place.split(":")
        device, function = rest.split(".")
        wanted = (
            int(domain, 16) << 32 | int(bus, 16) << 8 | int(device, 16) << 3 | int(function, 16)
        )
        count, place = c_uint32(), c_uint64()
        self._ask("rsmi_num_monitor_devices", ctypes.byref(count))
        for index in map(c_uint32, range(count.value)):
            self._ask("rsmi_dev_pci_id_get", index, ctypes.byref(place))
            if place.value == wanted:
                return index
        raise DeviceError(f"rocm-smi does not know the GPU at {bus_place}")

    def energy_mj(self) -> int:
        count, resolution_uj, stamp = c_uint64(), c_float(), c_uint64()
        counted = self._library.rsmi_dev_energy_count_get(
            self._device, ctypes.byref(count), ctypes.byref(resolution_uj), ctypes.byref(stamp)
        )
        if counted == 0:
            return int(count.value * resolution_uj.value / 1000)
        power_uw = c_uint64()
        self._ask("rsmi_dev_power_ave_get", self._device, c_uint32(0), ctypes.byref(power_uw))
        now = now_ns()
        self._summed_uj += power_uw.value * (now - self._asked_ns) / 1e9
        self._asked_ns = now
        return int(self._summed_uj / 1000)

    def _ask(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise DeviceError(f"rocm-smi does not answer {name}: status {status}")


def _load(library: Path | None) -> ctypes.CDLL:
    for name in LIBRARIES if library is None else (str(library),):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name)
    raise DeviceError("librocm_smi64 is not installed; install rocm-smi-lib to measure energy")
