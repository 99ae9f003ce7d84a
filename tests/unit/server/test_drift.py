"""Drift: when a server plans again."""

from __future__ import annotations

import itertools

import pytest

from eclip.server.supervisor.drift import LASTING_S, PAUSE_S, WINDOW_S, DriftWatch, has_drifted


class Driven:
    """A watch on one service, planned for 100 requests/s."""

    def __init__(self) -> None:
        self.watch = DriftWatch()
        self._second = self._arrived = 0

    def drive(self, seconds: int, rate: int) -> list[tuple[int, float]]:
        """When it asked for a plan, and for which rate."""
        asked = []
        for second in range(self._second, self._second + seconds):
            self._arrived += rate
            self.watch.take({"digits": self._arrived}, float(second))
            rates = self.watch.drifted({"digits": 100.0})
            if rates is not None:
                asked.append((second, rates["digits"]))
        self._second += seconds
        return asked


def test_planned_rates_ask_for_nothing() -> None:
    assert Driven().drive(100, 110) == []


def test_a_rate_that_stays_away_asks_once_in_a_while() -> None:
    driven = Driven()
    assert driven.drive(20, 100) == []
    asked = driven.drive(70, 300)
    assert 20 + LASTING_S <= asked[0][0] <= 20 + WINDOW_S + LASTING_S
    assert asked[0][1] > 150
    assert all(late - early >= PAUSE_S for (early, _), (late, _) in itertools.pairwise(asked))
    assert asked[-1][1] == pytest.approx(300, rel=0.05)


def test_a_burst_is_no_drift() -> None:
    driven = Driven()
    driven.drive(20, 100)
    assert driven.drive(1, 400) == []
    assert driven.drive(40, 100) == []


def test_few_requests_say_little() -> None:
    assert not has_drifted(2.0, 0.5, 10.0)
    assert has_drifted(0.0, 100.0, 10.0)
    assert has_drifted(151.0, 100.0, 10.0) and not has_drifted(149.0, 100.0, 10.0)


def test_a_service_that_was_just_loaded_is_counted_from_then_on() -> None:
    watch = DriftWatch()
    for second in range(12):
        watch.take({"digits": 100 * second} | ({"old": 10**6} if second > 5 else {}), float(second))
        assert watch.drifted({"digits": 100.0, "old": 1.0}) is None


def test_a_silent_service_says_nothing() -> None:
    driven = Driven()
    assert driven.drive(40, 0) == []
    asked = driven.drive(40, 20)  # slower than planned, but there
    assert asked and asked[0][1] < 100 / 1.5
