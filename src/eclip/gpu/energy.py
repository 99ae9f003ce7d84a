"""A GPU's energy, by a counter that moves a few times a second.

A figure is taken between two of its ticks: from the first tick after the start to the last before
the end, scaled to the whole time, so that a partial tick at either end does not count as measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from eclip.errors import DeviceError

STANDS_STILL = "the GPU's energy counter does not move, so energy cannot be measured here"
TICK_WAIT_NS = 500_000_000  # five times the counter's period: longer means that it does not move


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


def await_tick(energy_mj: Callable[[], int], end_ns: int, period_s: float) -> Tick | None:
    """Ask until the energy has changed, but no longer than to this time."""
    first = energy_mj()
    while (time_ns := now_ns()) < end_ns:
        if (asked_mj := energy_mj()) != first:
            return Tick(time_ns, asked_mj)
        time.sleep(period_s)
    return None


def power_w(begin: Tick, end: Tick) -> float:
    return (end.energy_mj - begin.energy_mj) * 1e6 / (end.time_ns - begin.time_ns)


def mean_power_w(
    counter: EnergyCounter, begin_ns: int, end_ns: int, stopped: Callable[[], bool]
) -> float:
    """Wait until the end, or until it is stopped; the mean power between the ticks inside."""
    while now_ns() < begin_ns and not stopped():
        time.sleep(0.001)
    first = last = counter.tick_before(min(end_ns, now_ns() + TICK_WAIT_NS))
    while first and not stopped() and (tick := counter.tick_before(end_ns)) is not None:
        last = tick
    if first is None and end_ns - begin_ns >= TICK_WAIT_NS and not stopped():
        raise DeviceError(STANDS_STILL)
    if first is None or last is None or last.time_ns == first.time_ns:
        return 0.0  # the window holds no two ticks
    return power_w(first, last)


def next_tick(counter: EnergyCounter) -> Tick:
    """Wait until the counter moves."""
    tick = counter.tick_before(now_ns() + TICK_WAIT_NS)
    if tick is None:
        raise DeviceError(STANDS_STILL)
    return tick


def now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)
