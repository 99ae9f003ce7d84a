"""Machines that a server may meet, for lab/support/virtual.py: what an H200's host and its batches
were measured to do, and the simulator alone does not.

A *way* is the time from one process to the other, a log-normal distribution by its p50 and p99. On
the H200's host p50 was 110 us and p99 300 to 530 (docs/results/serving.md); 30 us stand for a ring
read by a spinning loop. A *stall* stops a process for a while, the front or the device process.
``presence`` makes batches beside one another longer, above what the calibration says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

# Ways that begin in the same period are equally long; those of the next are another draw.
_PERIOD_NS, _DRAWS, _SPREAD = 20_000, 9973, 3571
_P99 = 2.326  # of a normal distribution, in standard deviations


@dataclass(frozen=True)
class Machine:
    name: str
    way_us: float = 60.0  # p50
    way_p99_us: float = 60.0
    presence: float = 0.0  # added to the calibration's
    stalls_per_s: float = 0.0  # of each process
    stall_ms: tuple[float, float] = (1.0, 12.0)  # any length between, on a logarithmic scale


EVEN = Machine("even")  # every way takes 60 us, and nothing else happens
# Batches of 1 take 1.2 and 1.4 times as long as alone, at a load of 1 on plain streams, on the mean
# of random mixes (100 to 103).
_LIGHTLY, _STRONGLY = 0.05, 0.28
_STALLS = 0.5
MACHINES = tuple(
    Machine(f"{way_us:g} us, {words}", way_us, p99_us, presence, _STALLS)
    for way_us, p99_us in ((30.0, 120.0), (110.0, 420.0))
    for words, presence in (("1.2 beside", _LIGHTLY), ("1.4 beside", _STRONGLY))
)
NEAR = Machine("45 us", 45.0, 150.0)


class Ways:
    """The ways in one direction: messages arrive in their order, and after a stall of those who
    read them. How long a way is depends on its time only, so equal decisions have equal ways."""

    def __init__(self, machine: Machine, stalls: Stalls, seed: int) -> None:
        self._normal = np.random.default_rng(seed).standard_normal(_DRAWS).tolist()
        self._median_ns = 1e3 * machine.way_us
        self._sigma = math.log(machine.way_p99_us / machine.way_us) / _P99
        self._stalls = stalls
        self._last_ns = 0

    def arrives_ns(self, now_ns: int) -> int:
        drawn = self._normal[now_ns // _PERIOD_NS * _SPREAD % _DRAWS]
        way_ns = self._median_ns * math.exp(self._sigma * drawn)
        self._last_ns = max(self._stalls.over_ns(now_ns + round(way_ns)), self._last_ns)
        return self._last_ns


class Stalls:
    """When a process stands still."""

    def __init__(self, machine: Machine, seconds: float, seed: int) -> None:
        random = np.random.default_rng(seed)
        least, most = (math.log(1e6 * length) for length in machine.stall_ms)
        self._stalls: list[tuple[int, int]] = []
        at_s = 0.0
        while machine.stalls_per_s:
            at_s += random.exponential(1 / machine.stalls_per_s)
            if at_s > seconds:
                break
            begin_ns = round(1e9 * at_s)
            self._stalls.append((begin_ns, begin_ns + round(math.exp(random.uniform(least, most)))))

    def over_ns(self, at_ns: int) -> int:
        """Then, or when the stall of that time is over."""
        for begin_ns, end_ns in self._stalls:
            if begin_ns <= at_ns < end_ns:
                at_ns = end_ns
        return at_ns
