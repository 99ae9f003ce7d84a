"""Energy and neighbours by NVML, whose counter of a GPU's energy moves about ten times a second."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from eclip.errors import DeviceError
from eclip.gpu.energy import Tick, await_tick

try:
    import pynvml
except ImportError:
    pynvml = None

_PERIOD_S = 0.0005


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

    def tick_before(self, end_ns: int) -> Tick | None:
        return await_tick(self.energy_mj, end_ns, _PERIOD_S)

    def energy_mj(self) -> int:
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
