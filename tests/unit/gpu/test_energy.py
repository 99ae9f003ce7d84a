"""Power between the ticks of a counter that moves now and then, by a clock that only moves when it
is looked at or slept by."""

from __future__ import annotations

from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt
import pytest

from eclip.capture import request_energy
from eclip.capture.request_energy import request_energy_uj
from eclip.errors import DeviceError
from eclip.gpu import energy
from eclip.gpu.energy import Tick, mean_power_w

LOOK_NS = 1000


class Clock:
    """Stands for the module ``time``."""

    CLOCK_MONOTONIC = 1

    def __init__(self) -> None:
        self.now_ns = 0

    def clock_gettime_ns(self, _: int) -> int:
        self.now_ns += LOOK_NS
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(energy, "time", made)
    return made


class Counter:
    """Moves every so many milliseconds, at 150 W."""

    def __init__(self, clock: Clock, period_ms: float) -> None:
        self.ours: set[int] = set()
        self._clock = clock
        self._period_ns = round(period_ms * 1e6)

    def tick_before(self, end_ns: int) -> Tick | None:
        at_ns = (self._clock.now_ns // self._period_ns + 1) * self._period_ns
        self._clock.now_ns = max(self._clock.now_ns, min(at_ns, end_ns))
        return Tick(at_ns, at_ns * 150 // 1_000_000) if at_ns < end_ns else None

    def other_processes(self) -> list[int]:
        return []


def measured(
    clock: Clock, period_ms: float, seconds: float, stopped: bool = False
) -> tuple[float, float]:
    """The power, and how long after the window's end it is known."""
    begin_ns = clock.now_ns
    end_ns = begin_ns + round(seconds * 1e9)
    counter = Counter(clock, period_ms)
    power = mean_power_w(counter, begin_ns, end_ns, lambda: stopped)
    return power, (clock.now_ns - end_ns) / 1e9


def test_power_is_known_when_the_window_ends_and_not_a_tick_later(clock: Clock) -> None:
    power, late_s = measured(clock, period_ms=80, seconds=0.25)  # the next tick is 70 ms later
    assert power == pytest.approx(150, rel=1e-3)
    assert 0 <= late_s < 0.001


def test_window_without_two_ticks_has_no_power(clock: Clock) -> None:
    assert measured(clock, period_ms=10_000_000, seconds=0.05)[0] == 0.0


@pytest.mark.parametrize("seconds", [0.5, 60.0])
def test_counter_that_stands_still_is_an_error_in_a_window_that_must_hold_ticks(
    seconds: float, clock: Clock
) -> None:
    with pytest.raises(DeviceError, match="does not move"):
        measured(clock, period_ms=10_000_000, seconds=seconds)
    assert clock.now_ns < 5e9  # it is not waited for to the end


def test_run_that_was_stopped_is_not_waited_for(clock: Clock) -> None:
    for period_ms in (5, 10_000_000):
        _, late_s = measured(clock, period_ms, seconds=60.0, stopped=True)
        assert late_s < -50


class Repeated:
    """A request every 5 ms, for ever."""

    def __init__(self, *given: object) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def ends_ns(self) -> npt.NDArray[np.int64]:
        return np.arange(0, 2_000_000_000, 5_000_000)


def test_energy_of_a_request_is_that_between_two_ticks_shared_by_what_ended_there(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_energy, "Repeater", Repeated)
    energy_uj = request_energy_uj(cast(Any, None), Counter(clock, 100), 1, 2, 0.5)
    assert energy_uj == pytest.approx(150 * 0.005 * 1e6)
    with pytest.raises(DeviceError, match="does not move"):
        request_energy_uj(cast(Any, None), Counter(clock, 600), 1, 2, 0.5)
