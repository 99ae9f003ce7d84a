"""Rates: how often services are asked, from the routers' counters, and whether that has drifted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from eclip.fleet.place.spec import Fleet
from eclip.server.supervisor.drift import DriftWatch


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
        self.planned_rps = {service.name: service.rate_rps for service in fleet.services}
        self._last: dict[int, tuple[int, dict[str, int]]] = {}  # by router: its process, counts
        self._total = Counter(dict.fromkeys(self.planned_rps, 0))
        self._watch = DriftWatch()

    @property
    def rates_rps(self) -> dict[str, float]:
        return self._watch.rates_rps

    def take(self, reports: Iterable[RouterReport], now_s: float) -> None:
        for report in reports:
            pid, before = self._last.get(report.number, (0, {}))
            for name, count in report.arrived.items():
                self._total[name] += count - (before.get(name, 0) if pid == report.pid else 0)
            self._last[report.number] = (report.pid, report.arrived)
        self._watch.take(self._total, now_s)

    def drifted(self) -> dict[str, float] | None:
        """The rates to place for, when they have been others than planned for long enough."""
        rates = self._watch.drifted(self.planned_rps)
        self.planned_rps |= rates or {}
        return rates


def with_rates(fleet: Fleet, rates_rps: Mapping[str, float]) -> Fleet:
    services = tuple(
        msgspec.structs.replace(service, rate_rps=rates_rps.get(service.name, service.rate_rps))
        for service in fleet.services
    )
    return msgspec.structs.replace(fleet, services=services)
