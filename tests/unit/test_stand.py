"""A stand: how a plan is opened and run, and what its rates alone are."""

from __future__ import annotations

import pytest

import eclip
import eclip.devices
from eclip.artefacts.plan import unpartitioned
from eclip.artefacts.runlog import RunLog
from eclip.devices.base import Window
from eclip.devices.load import Load, closed_loop
from eclip.devices.sim.device import SimDevice, SimSession
from eclip.errors import UsageError
from eclip.lab.stand import Stand, alone_rates
from eclip.progress import Progress
from simulations import CALIBRATIONS, H200, case_of, flat_profile

LONG, SHORT = flat_profile("long", [400_000] * 4, H200), flat_profile("short", [100_000], H200)
WINDOW = Window(seconds=1.0, warmup_seconds=0.05, trace_ms=0.0)


class StopsHalfway(Progress):
    """Asks for a stop in the middle of a run, once it is armed."""

    armed = False

    def part(self, share: float) -> None:
        if self.armed and share > 0.5:
            self.stop()


def test_rate_alone_is_that_of_a_worker_nobody_disturbs() -> None:
    device = SimDevice(H200, CALIBRATIONS["h200"])
    profiles = (LONG, SHORT)
    together = alone_rates(device, profiles, profiles)
    apart = [alone_rates(device, (profile,), (profile,))[0] for profile in profiles]
    assert together == pytest.approx(apart, rel=0.01)


def test_workers_of_one_model_share_one_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[Load] = []
    run = SimSession.run

    def noting(self: SimSession, load: Load, window: Window) -> RunLog:
        loads.append(load)
        return run(self, load, window)

    monkeypatch.setattr(SimSession, "run", noting)
    stand = Stand(case_of((LONG, SHORT, LONG)), SimDevice(H200, CALIBRATIONS["h200"]))
    first, _, third = stand.alone_rps
    assert first == third
    assert len(loads) == 2
    assert all(len(load.arrivals) == 3 for load in loads)


def test_stop_in_the_middle_of_a_run_keeps_what_ran_with_its_rates_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    progress, run = StopsHalfway(), SimSession.run

    def arming(self: SimSession, load: Load, window: Window) -> RunLog:
        progress.armed = window == WINDOW
        return run(self, load, window)

    monkeypatch.setattr(SimSession, "run", arming)
    case = case_of((LONG, SHORT))
    stand = Stand(case, SimDevice(H200, CALIBRATIONS["h200"], progress))
    log = stand.run_once(unpartitioned(H200, case.profiles), closed_loop(2), WINDOW)
    assert 0.4e9 < log.duration_ns < 0.7e9
    assert len(log.alone_rps) == 2


def test_run_whose_profiles_are_missing_opens_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(eclip.devices, "open_device", lambda name, *rest: opened.append(name))
    case = case_of((LONG, SHORT))
    plan = unpartitioned(H200, case.profiles)
    with pytest.raises(UsageError, match="long"):
        eclip.run(plan, case=case)  # profiles that only this test knows
    assert opened == []
