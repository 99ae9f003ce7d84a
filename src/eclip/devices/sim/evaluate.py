"""Thousands of plans a minute: what each gives when all workers run back to back.

A short simulation each, on all cores. Rates come from kernels done rather than from requests, so
that a window of a few requests is enough.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from eclip.calibration import Calibration
from eclip.devices.alone import alone_rates
from eclip.devices.load import CLOSED_LOOP, Load
from eclip.devices.sim import core
from eclip.devices.sim.contention import Ints
from eclip.devices.sim.device import KernelTables, SimDevice, build_machine, initial_state
from eclip.plan import Plan
from eclip.planning.objective import Score
from eclip.profile import Profile
from eclip.runtime.program import Program, routes_of
from eclip.topology import Topology

_REQUESTS = 12  # of the worker with the longest, were it alone
_WARMUP = 0.25  # of the window


class Evaluator:
    """``evaluate`` of a search, for one mix."""

    def __init__(
        self, topology: Topology, profiles: Sequence[Profile], calibration: Calibration
    ) -> None:
        self._profiles = profiles
        self._tables = KernelTables(profiles, calibration)
        self._alone_rps = alone_rates(SimDevice(topology, calibration), profiles, profiles)
        self._load = Load(label="closed loop", seed=0, arrivals=(CLOSED_LOOP,) * len(profiles))
        self._window_ns = _REQUESTS * 1e9 / min(self._alone_rps)

    def __call__(self, plans: Sequence[Plan]) -> list[Score]:
        # Compiled code holds no GIL, so threads do.
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            return list(threads.map(self._score, plans))

    def _score(self, plan: Plan) -> Score:
        program = Program(plan, routes_of(plan))
        machine = build_machine(program, self._tables, self._load, 0)
        begin_ns = -_WARMUP * self._window_ns
        state = initial_state(machine, plan, self._load, begin_ns, self._profiles)
        rows = []
        while core.advance(machine, state, self._window_ns, True) == core.BUFFER_FULL:
            rows.append(state.request_rows[: state.clock[0]["requests"]].copy())
            state.clock[0]["requests"] = state.clock[0]["kernels"] = 0
        rows.append(state.request_rows[: state.clock[0]["requests"]])
        requests = np.concatenate(rows)
        seconds = self._window_ns / 1e9
        return Score(
            ratios=tuple(
                float(worker["kernels"]) / planned.kernels / seconds / alone
                for worker, planned, alone in zip(
                    state.workers, plan.workers, self._alone_rps, strict=True
                )
            ),
            power_w=float(state.clock[0]["energy_nj"]) / self._window_ns,
            p99_ms=tuple(_p99_ms(requests[requests[:, 0] == worker]) for worker in plan.everyone),
        )


def _p99_ms(requests: Ints) -> float:
    if len(requests) == 0:
        return float("inf")
    return float(np.percentile(requests[:, 3] - requests[:, 1], 99)) / 1e6
