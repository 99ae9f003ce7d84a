"""Power between the ticks of a counter that moves now and then."""

from __future__ import annotations

import time

import pytest

from eclip.devices.cuda.energy import Tick, mean_power_w
from eclip.errors import DeviceError


def now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


class Counter:
    """Moves every so many milliseconds, at 150 W."""

    def __init__(self, period_ms: float) -> None:
        self.ours: set[int] = set()
        self._period_ns = round(period_ms * 1e6)

    def tick_before(self, end_ns: int) -> Tick | None:
        at_ns = (now_ns() // self._period_ns + 1) * self._period_ns
        time.sleep(max(0, min(at_ns, end_ns) - now_ns()) / 1e9)
        return Tick(at_ns, at_ns * 150 // 1_000_000) if at_ns < end_ns else None

    def other_processes(self) -> list[int]:
        return []


def measured(period_ms: float, seconds: float, stopped: bool = False) -> tuple[float, float]:
    """The power, and how long after the window's end it is known."""
    begin_ns = now_ns()
    end_ns = begin_ns + round(seconds * 1e9)
    power = mean_power_w(Counter(period_ms), begin_ns, end_ns, lambda: stopped)
    return power, (now_ns() - end_ns) / 1e9


def test_power_is_known_when_the_window_ends_and_not_a_tick_later() -> None:
    runs = [measured(period_ms=80, seconds=0.25) for _ in range(3)]
    assert [power for power, _ in runs] == pytest.approx([150] * 3, rel=1e-3)
    # The next tick is 70 ms away each time; a busy machine may be late once.
    assert min(late_s for _, late_s in runs) < 0.04


def test_window_without_two_ticks_has_no_power() -> None:
    assert measured(period_ms=10_000_000, seconds=0.05)[0] == 0.0


@pytest.mark.parametrize("seconds", [0.5, 60.0])
def test_counter_that_stands_still_is_an_error_in_a_window_that_must_hold_ticks(
    seconds: float,
) -> None:
    begin_ns = now_ns()
    with pytest.raises(DeviceError, match="does not move"):
        measured(period_ms=10_000_000, seconds=seconds)
    assert now_ns() - begin_ns < 5e9  # it is not waited for to the end


def test_run_that_was_stopped_is_not_waited_for() -> None:
    for period_ms in (5, 10_000_000):
        _, late_s = measured(period_ms, seconds=60.0, stopped=True)
        assert late_s < -50
