"""Evaluation by simulation: thousands of plans a minute, and what each gives under the mix's load.

A short simulation each, on all cores.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from eclip.core.calibration import Calibration
from eclip.core.load import CLOSED_LOOP, Load
from eclip.core.mix import Mix
from eclip.core.model_key import ModelKey
from eclip.core.plan import Plan
from eclip.core.profile import Profile, Times
from eclip.core.topology import Topology
from eclip.planner.alone import alone_rates, typical_load
from eclip.planner.case import Case
from eclip.planner.search.doubt import REQUESTS, SETTINGS
from eclip.planner.search.objective import Score
from eclip.sim.contention import Ints
from eclip.sim.device import SimDevice, glimpse
from eclip.sim.tables import KernelTables

_REQUESTS = 12  # of the worker with the longest, were it alone
_ARRIVALS = 60  # of the worker with the fewest, where requests arrive by themselves
_MOST = 6_000  # requests of all: a model that is asked once a minute must not take hours
_PROMISED = 550  # arrivals of the service with the fewest: a bound is on a p99
_MOST_PROMISED = 60_000  # requests of all, where there are services
_WARMUP = 0.25  # of the window


class SimEvaluator:
    """``evaluate`` of a search, for one mix."""

    def __init__(
        self,
        topology: Topology,
        profiles: Sequence[Profile],
        calibration: Calibration,
        mix: Mix | None = None,  # with its rates; without: all workers back to back
        others: Sequence[Profile] = (),  # that plans may choose instead
        *,
        requests: int = _PROMISED,  # of the service with the fewest
        seed: int = 0,
        warm: bool = True,  # accounts of services begin with all credit
    ) -> None:
        self._warm = warm
        self._case = topology, profiles, mix, others
        self._workers = len(profiles)
        self._calibration = calibration
        self._profiles = {profile.model: profile for profile in (*others, *profiles)}
        self._tables: dict[tuple[ModelKey, ...], KernelTables] = {}  # by the workers' models
        self.alone_rps = alone_rates(SimDevice(topology, calibration), profiles, profiles)
        self._window_ns = _REQUESTS * 1e9 / min(self.alone_rps)
        self._load: Load | None = None
        rates = [worker.rate_rps for worker in mix.workers if worker.rate_rps] if mix else []
        if mix is not None and rates:
            pairs = zip(mix.workers, self.alone_rps, strict=True)
            most_rps = sum(worker.rate_rps or alone for worker, alone in pairs)
            wanted = min(_ARRIVALS / min(rates), _MOST / most_rps)
            if mix.services:
                slowest = min(mix.workers[service].rate_rps or 0.0 for service in mix.services)
                wanted = max(wanted, min(requests / slowest, _MOST_PROMISED / most_rps))
            self._window_ns = max(self._window_ns, wanted * 1e9)
            seconds = self._window_ns / 1e9
            self._load = typical_load(mix, seconds, _WARMUP * seconds, self.alone_rps, seed)

    @property
    def alone_ns(self) -> list[Times]:
        """Of every worker, what a request takes alone: simulated, each takes the same."""
        return [np.array([1e9 / rate]) for rate in self.alone_rps]

    @property
    def seconds(self) -> float:
        """Of one simulation."""
        return self._window_ns / 1e9

    def arrivals(self, worker: int) -> int:
        """Of a worker with a rate, in one simulation."""
        times = self._load.arrivals[worker] if self._load is not None else None
        return 0 if times is None else int(np.count_nonzero(times >= 0))

    @classmethod
    def of(cls, case: Case, mix: Mix | None = None) -> SimEvaluator:
        """For a case, or for its mix with rates of its own."""
        return cls(case.topology, case.profiles, case.calibration, mix or case.mix, case.others)

    def doubts(self) -> Iterator[SimEvaluator]:
        """Evaluators for a shortlist: more and other arrivals, and devices that differ. Accounts
        begin without credit there, since a plan must not live on what it was given."""
        topology, profiles, mix, others = self._case
        for number, setting in enumerate(SETTINGS, 1):
            yield SimEvaluator(
                topology,
                [setting.profile(profile) for profile in profiles],
                setting.calibration(self._calibration),
                mix,
                [setting.profile(profile) for profile in others],
                requests=REQUESTS,
                seed=number,
                warm=False,
            )

    def __call__(self, plans: Sequence[Plan], active: tuple[int, ...] | None = None) -> list[Score]:
        """What plans give under the load, or with only these workers active, back to back.

        A score has an entry for each of them.
        """
        chosen = tuple(range(self._workers)) if active is None else active
        self._prepare(plans)
        # Compiled code holds no GIL, so threads do.
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            load = self._load if active is None else None
            return list(threads.map(lambda plan: self._score(plan, chosen, load), plans))

    def _prepare(self, plans: Sequence[Plan]) -> None:
        for plan in plans:
            if plan.models not in self._tables:
                used = [self._profiles[model] for model in plan.models]
                self._tables[plan.models] = KernelTables(used, self._calibration)

    def _score(self, plan: Plan, active: tuple[int, ...], load: Load | None) -> Score:
        if load is None:
            nothing = np.empty(0, dtype=np.int64)
            load = Load(
                label="closed loop",
                seed=0,
                arrivals=tuple(CLOSED_LOOP if w in active else nothing for w in plan.everyone),
            )
        tables = self._tables[plan.models]
        seen = glimpse(plan, tables, load, self._window_ns, warm=self._warm)
        owner = seen.requests[:, 0]
        return Score(
            ratios=tuple(seen.rates_rps[worker] / self.alone_rps[worker] for worker in active),
            power_w=seen.power_w,
            p99_ms=tuple(_p99_ms(seen.requests[owner == worker]) for worker in active),
        )


def _p99_ms(requests: Ints) -> float:
    if len(requests) == 0:
        return float("inf")
    return float(np.percentile(requests[:, 3] - requests[:, 1], 99)) / 1e6
