"""The energy of one request, for profiles: requests back to back between two ticks of a counter."""

from __future__ import annotations

from typing import Any

import numpy as np

from eclip.errors import DeviceError
from eclip.gpu.energy import EnergyCounter, next_tick
from eclip.gpu.worker_loop import LoopGpu, Repeater


def request_energy_uj(
    gpu: LoopGpu, counter: EnergyCounter, executable: Any, stream: Any, seconds: float
) -> int:
    """Of a request alone, between two ticks about so far apart."""
    with Repeater(gpu, executable, stream) as repeater:
        next_tick(counter)  # power is still rising
        first = last = next_tick(counter)
        while last.time_ns - first.time_ns < seconds * 1e9:
            last = next_tick(counter)
    ends = repeater.ends_ns()
    requests = np.count_nonzero((ends > first.time_ns) & (ends <= last.time_ns))
    if requests == 0:
        raise DeviceError(f"no request ended within {seconds} s: too slow to measure its energy")
    return round((last.energy_mj - first.energy_mj) * 1e3 / int(requests))
