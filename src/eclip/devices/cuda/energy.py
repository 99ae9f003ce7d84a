"""Energy and neighbours by NVML.

The counter of a GPU's energy moves about ten times a second. A figure is taken between two of its
ticks: from the first tick after the start to the last before the end, scaled to the whole time, so
that a partial tick at either end does not count as measured.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from eclip.errors import DeviceError

try:
    import pynvml
except ImportError:
    pynvml = None

_TICK_WAIT_S = 0.5  # five times the counter's period: longer means that it does not move


@dataclass(frozen=True)
class Tick:
    time_ns: int
    energy_mj: int


class Nvml:
    """NVML's view of the GPU with this UUID."""

    def __init__(self, uuid: str) -> None:
        if pynvml is None:
            raise DeviceError(
                "the Python package nvidia-ml-py is missing; install it: pip install 'eclip[cuda]'"
            )
        try:
            pynvml.nvmlInit()
            self._handle: Any = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except pynvml.NVMLError as error:
            raise DeviceError(f"NVML does not answer: {error}") from None

    def driver(self) -> str:
        return str(pynvml.nvmlSystemGetDriverVersion())

    def next_tick(self) -> Tick:
        """Wait until the counter moves."""
        first = pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        deadline = time.monotonic() + _TICK_WAIT_S
        while time.monotonic() < deadline:
            energy_mj = pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
            if energy_mj != first:
                return Tick(time.clock_gettime_ns(time.CLOCK_MONOTONIC), energy_mj)
            time.sleep(0.0005)
        raise DeviceError("the GPU's energy counter does not move; NVML cannot measure energy here")

    def other_processes(self) -> list[int]:
        """Processes that compute on this GPU besides this one."""
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        return [process.pid for process in running if process.pid != os.getpid()]

    def close(self) -> None:
        pynvml.nvmlShutdown()


def power_w(begin: Tick, end: Tick) -> float:
    return (end.energy_mj - begin.energy_mj) * 1e6 / (end.time_ns - begin.time_ns)
