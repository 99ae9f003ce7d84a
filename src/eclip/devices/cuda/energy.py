"""Energy and neighbours by NVML.

The counter of a GPU's energy moves about ten times a second. A figure is taken between two of its
ticks: from the first tick after the start to the last before the end, scaled to the whole time, so
that a partial tick at either end does not count as measured.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from eclip.errors import DeviceError

try:
    import pynvml
except ImportError:
    pynvml = None

_STANDS_STILL = "the GPU's energy counter does not move; NVML cannot measure energy here"
_TICK_WAIT_NS = 500_000_000  # five times the counter's period: longer means that it does not move


@dataclass(frozen=True)
class Tick:
    time_ns: int
    energy_mj: int


class EnergyCounter(Protocol):
    ours: set[int]  # processes that this one started to compute on this GPU

    def tick_before(self, end_ns: int) -> Tick | None:
        """Wait until the counter moves, but no longer than to this time."""
        ...

    def other_processes(self) -> list[int]:
        """Processes that compute on this GPU besides this one and ours."""
        ...


class Nvml:
    """NVML's view of the GPU with this UUID."""

    def __init__(self, uuid: str) -> None:
        if pynvml is None:
            raise DeviceError(
                "the Python package nvidia-ml-py is missing; install it: pip install nvidia-ml-py"
            )
        self.ours: set[int] = set()
        _ask("nvmlInit")
        try:
            self._handle: Any = _ask("nvmlDeviceGetHandleByUUID", uuid)
        except DeviceError:
            _ask("nvmlShutdown")
            raise

    def driver(self) -> str:
        return str(_ask("nvmlSystemGetDriverVersion"))

    def next_tick(self) -> Tick:
        """Wait until the counter moves."""
        tick = self.tick_before(_now_ns() + _TICK_WAIT_NS)
        if tick is None:
            raise DeviceError(_STANDS_STILL)
        return tick

    def tick_before(self, end_ns: int) -> Tick | None:
        """Wait until the counter moves, but no longer than to this time."""
        first = self._energy_mj()
        while (now_ns := _now_ns()) < end_ns:
            if (energy_mj := self._energy_mj()) != first:
                return Tick(now_ns, energy_mj)
            time.sleep(0.0005)
        return None

    def _energy_mj(self) -> int:
        return int(_ask("nvmlDeviceGetTotalEnergyConsumption", self._handle))

    def other_processes(self) -> list[int]:
        """Processes that compute on this GPU besides this one and ours."""
        known = {pid for mine in (os.getpid(), *self.ours) for pid in _pids_of(mine)}
        running = _ask("nvmlDeviceGetComputeRunningProcesses", self._handle)
        return [process.pid for process in running if process.pid not in known]

    def close(self) -> None:
        _ask("nvmlShutdown")


def _ask(name: str, *arguments: Any) -> Any:
    try:
        return getattr(pynvml, name)(*arguments)
    except pynvml.NVMLError as error:
        raise DeviceError(f"NVML does not answer {name}: {error}") from None


def _pids_of(pid: int) -> set[int]:
    """A process in every PID namespace it is in: inside a container NVML may name the host's."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return {pid}
    lines = [line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")]
    return {pid, *(int(other) for line in lines for other in line)}


def power_w(begin: Tick, end: Tick) -> float:
    return (end.energy_mj - begin.energy_mj) * 1e6 / (end.time_ns - begin.time_ns)


def mean_power_w(
    counter: EnergyCounter, begin_ns: int, end_ns: int, stopped: Callable[[], bool]
) -> float:
    """Wait until the end, or until it is stopped; the mean power between the ticks inside."""
    while _now_ns() < begin_ns and not stopped():
        time.sleep(0.001)
    first = last = counter.tick_before(min(end_ns, _now_ns() + _TICK_WAIT_NS))
    while first and not stopped() and (tick := counter.tick_before(end_ns)) is not None:
        last = tick
    if first is None and end_ns - begin_ns >= _TICK_WAIT_NS and not stopped():
        raise DeviceError(_STANDS_STILL)
    if first is None or last is None or last.time_ns == first.time_ns:
        return 0.0  # the window holds no two ticks
    return power_w(first, last)


def _now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)
