"""Drift: whether services are asked at other rates than were planned for."""

from __future__ import annotations

import collections
from collections.abc import Mapping

FACTOR = 1.5
WINDOW_S = 10.0
LASTING_S = 5.0
PAUSE_S = 30.0  # between two searches
LEAST_ARRIVALS = 30  # fewer in a window say little


class DriftWatch:
    """Looked at about once a second. ``rates_rps``: those of the last window, by service."""

    def __init__(self) -> None:
        self.rates_rps: dict[str, float] = {}
        self._seen: collections.deque[tuple[float, dict[str, int]]] = collections.deque()
        self._since: float | None = None  # when the drift began
        self._quiet_until = 0.0

    def take(self, arrived: Mapping[str, int], now_s: float) -> None:
        """How many requests there have been so far, by service."""
        self._seen.append((now_s, dict(arrived)))
        while len(self._seen) > 2 and now_s - self._seen[0][0] > WINDOW_S:
            self._seen.popleft()
        then_s, before = self._seen[0]
        if now_s > then_s:
            self.rates_rps = {
                name: (count - before.get(name, count)) / (now_s - then_s)
                for name, count in arrived.items()
            }

    def drifted(self, planned_rps: Mapping[str, float]) -> dict[str, float] | None:
        """The measured rates, when they have been others than planned for long enough."""
        now_s, window_s = self._seen[-1][0], self._seen[-1][0] - self._seen[0][0]
        if window_s < WINDOW_S / 2 or now_s < self._quiet_until:
            return None
        # A service without requests says nothing about the rate at which it will be asked.
        rates = {name: rate for name, rate in self.rates_rps.items() if rate > 0}
        off = any(
            has_drifted(rate, planned_rps[name], window_s)
            for name, rate in rates.items()
            if name in planned_rps
        )
        if not off:
            self._since = None
            return None
        self._since = now_s if self._since is None else self._since
        if now_s - self._since < LASTING_S:
            return None
        self._since, self._quiet_until = None, now_s + PAUSE_S
        return rates


def has_drifted(rate_rps: float, planned_rps: float, window_s: float) -> bool:
    if max(rate_rps, planned_rps) * window_s < LEAST_ARRIVALS:
        return False
    return rate_rps > FACTOR * planned_rps or rate_rps < planned_rps / FACTOR
