"""Rates: how often services are asked, from the routers' counters, and whether that has drifted."""

from __future__ import annotations

import collections
from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from eclip.fleet.spec import Fleet
from eclip.serving.drift import LASTING_S, PAUSE_S, WINDOW_S, has_drifted


class RouterReport(msgspec.Struct, frozen=True, kw_only=True):
    """A router as it is now."""

    number: int
    http: str
    grpc: str
    ready: bool
    near: int  # GPUs reached through shared memory
    far: int  # and over TCP
    arrived: dict[str, int]  # requests by model, since it started
    pid: int


class RateWatch:
    """Rates of services, from the routers' counters."""

    def __init__(self, fleet: Fleet) -> None:
        self.rates_rps: dict[str, float] = {}
        self.planned_rps = {service.name: service.rate_rps for service in fleet.services}
        self._last: dict[int, tuple[int, dict[str, int]]] = {}  # by router: its process, counts
        self._total: Counter[str] = Counter()
        self._seen: collections.deque[tuple[float, Counter[str]]] = collections.deque()
        self._since: float | None = None
        self._quiet_until = 0.0

    def take(self, reports: Iterable[RouterReport], now_s: float) -> None:
        for report in reports:
            pid, before = self._last.get(report.number, (0, {}))
            for name, count in report.arrived.items():
                self._total[name] += count - (before.get(name, 0) if pid == report.pid else 0)
            self._last[report.number] = (report.pid, report.arrived)
        self._seen.append((now_s, self._total.copy()))
        while len(self._seen) > 2 and now_s - self._seen[0][0] > WINDOW_S:
            self._seen.popleft()
        then_s, first = self._seen[0]
        if now_s > then_s:
            self.rates_rps = {
                name: (count - first[name]) / (now_s - then_s)
                for name, count in self._total.items()
            }

    def drifted(self) -> dict[str, float] | None:
        """The rates to place for, when they have been others than planned for long enough."""
        now_s = self._seen[-1][0] if self._seen else 0.0
        window_s = now_s - self._seen[0][0] if self._seen else 0.0
        if window_s < WINDOW_S / 2 or now_s < self._quiet_until:
            return None
        # A service that nobody asks says nothing about the rate at which it will be asked.
        rates = {name: rate for name, rate in self.rates_rps.items() if rate > 0}
        off = any(
            has_drifted(rate, self.planned_rps[name], window_s)
            for name, rate in rates.items()
            if name in self.planned_rps
        )
        if not off:
            self._since = None
            return None
        self._since = now_s if self._since is None else self._since
        if now_s - self._since < LASTING_S:
            return None
        self._since, self._quiet_until = None, now_s + PAUSE_S
        self.planned_rps |= rates
        return rates


def with_rates(fleet: Fleet, rates_rps: Mapping[str, float]) -> Fleet:
    services = tuple(
        msgspec.structs.replace(service, rate_rps=rates_rps.get(service.name, service.rate_rps))
        for service in fleet.services
    )
    return msgspec.structs.replace(fleet, services=services)
