"""Drift: whether services are asked at other rates than their plan was made for."""

from __future__ import annotations

import collections

from eclip.serving.control import Deployment
from eclip.serving.counters import Count, CounterPages

FACTOR = 1.5
WINDOW_S = 10.0
LASTING_S = 5.0
PAUSE_S = 30.0  # between two searches
LEAST_ARRIVALS = 30  # fewer in a window say little


class DriftWatch:
    """Looked at about once a second."""

    def __init__(self, counters: CounterPages) -> None:
        self._counters = counters
        self._seen: collections.deque[tuple[float, dict[str, int]]] = collections.deque()
        self._since: float | None = None  # when the drift began
        self._quiet_until = 0.0

    def look(self, deployment: Deployment, now_s: float) -> dict[str, float] | None:
        """The rates to plan for, when they have drifted for long enough; else None."""
        arrived = {
            sheet.name: self._counters.total(sheet.row, Count.ARRIVED)
            for sheet in deployment.sheets
        }
        self._seen.append((now_s, arrived))
        while now_s - self._seen[0][0] > WINDOW_S:
            self._seen.popleft()
        then_s, before = self._seen[0]
        if now_s - then_s < WINDOW_S / 2 or now_s < self._quiet_until:
            return None
        # A service that nobody asks says nothing about the rate at which it will be asked.
        rates = {
            name: (count - before[name]) / (now_s - then_s)
            for name, count in arrived.items()
            if count > before.get(name, count)
        }
        drifted = any(
            has_drifted(rate, deployment.rates_rps[name], now_s - then_s)
            for name, rate in rates.items()
        )
        if not drifted:
            self._since = None
            return None
        self._since = now_s if self._since is None else self._since
        if now_s - self._since < LASTING_S:
            return None
        self._since, self._quiet_until = None, now_s + PAUSE_S
        return deployment.rates_rps | rates


def has_drifted(rate_rps: float, planned_rps: float, window_s: float) -> bool:
    if max(rate_rps, planned_rps) * window_s < LEAST_ARRIVALS:
        return False
    return rate_rps > FACTOR * planned_rps or rate_rps < planned_rps / FACTOR
