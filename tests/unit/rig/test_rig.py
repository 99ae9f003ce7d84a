"""A rig: how a plan is opened and run, and what its rates alone are."""

from __future__ import annotations

import pytest

import eclip
import eclip.devices
from eclip.contest.confirm.plans import make_plan
from eclip.core.device import Window
from eclip.core.load import CLOSED_LOOP, Load, closed_loop, load_of_mix
from eclip.core.measures import measure
from eclip.core.mix import parse_mix
from eclip.core.plan import Plan, unpartitioned
from eclip.core.runlog import RunLog
from eclip.errors import StoppedError, UsageError
from eclip.files.excess import measure_excess
from eclip.models.synthetic import synthetic_profile
from eclip.planner.alone import alone_rates
from eclip.planner.policies import PolicyOptions
from eclip.progress import Progress
from eclip.rig.rig import Rig, run_beside_alone
from eclip.sim.device import SimDevice, SimSession
from simulations import CALIBRATIONS, H200, case_of, flat_profile, pinned

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
    rig = Rig(case_of((LONG, SHORT, LONG)), SimDevice(H200, CALIBRATIONS["h200"]))
    first, _, third = rig.alone_rps
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
    rig = Rig(case, SimDevice(H200, CALIBRATIONS["h200"], progress))
    log = rig.run_once(unpartitioned(H200, case.profiles), closed_loop(2), WINDOW)
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


# --- Beside others, and alone -----------------------------------------------------------------

SERVICES = parse_mix("short:1@900rps/1.5x,long:1,other:1@300rps/5ms")
OTHER = flat_profile("other", [200_000] * 2, H200)
TURN = Window(seconds=0.4, warmup_seconds=0.05, trace_ms=0.0)


def served(progress: Progress | None = None) -> tuple[Rig, Plan]:
    """Two services and background between them."""
    case = case_of((SHORT, LONG, OTHER), mix=SERVICES)
    rig = Rig(case, SimDevice(H200, CALIBRATIONS["h200"], progress))
    return rig, make_plan(case, "shared", PolicyOptions())


def loads(rounds: int) -> list[Load]:
    return [
        load_of_mix(SERVICES, TURN.seconds, TURN.warmup_seconds, seed) for seed in range(rounds)
    ]


def noted(monkeypatch: pytest.MonkeyPatch, window: Window) -> list[tuple[int, ...]]:
    """The workers that were not idle in every run of this window."""
    runs: list[tuple[int, ...]] = []
    run = SimSession.run

    def noting(self: SimSession, load: Load, asked: Window) -> RunLog:
        if asked == window:
            active = [w for w, at in enumerate(load.arrivals) if at is CLOSED_LOOP or len(at)]
            runs.append(tuple(active))
        return run(self, load, asked)

    monkeypatch.setattr(SimSession, "run", noting)
    return runs


def test_every_service_runs_alone_with_the_arrivals_it_has_beside_others() -> None:
    rig, plan = served()
    with rig, rig.open(plan) as session:
        rounds = run_beside_alone(rig, session, plan, loads(2), TURN)
    assert len(rounds) == 2
    for number, one in enumerate(rounds):
        assert sorted(one.alone) == [0, 2]
        assert {*one.shared.requests.worker} == {0, 1, 2}
        for service, alone in one.alone.items():
            assert {*alone.requests.worker} == {service}
            assert alone.seed == one.shared.seed == number
            assert alone.offered[service] == one.shared.offered[service]
    found = {
        service: measure_excess([(one.shared, one.alone[service]) for one in rounds], service)
        for service in (0, 2)
    }
    assert [excess.name for excess in found.values()] == ["short", "other"]
    assert [excess.bound_ms is not None for excess in found.values()] == [True, True]
    for service, rate in ((0, 900), (2, 300)):
        assert found[service].requests == pytest.approx(rate * 0.8, rel=0.15)
        assert found[service].left_out < 10
        assert found[service].excess_us.p99 > 50
        # A hair less than nothing: kernels of one run end elsewhere between ticks than of another.
        assert found[service].excess_us.p50 > -1


def test_service_that_nobody_disturbs_has_no_excess() -> None:
    case = case_of((SHORT, OTHER), mix=parse_mix("short:1@900rps/1.5x,other:1@1rps/5ms"))
    rig = Rig(case, SimDevice(H200, CALIBRATIONS["h200"]))
    plan = unpartitioned(H200, case.profiles, case.mix)
    load = load_of_mix(case.mix, 0.5, 0.0, 0).only(0)
    with rig, rig.open(plan) as session:
        (one,) = run_beside_alone(rig, session, plan, [load], Window(0.5, 0.0, 0.0))
    found = measure_excess([(one.shared, one.alone[0])], 0)
    assert found.excess_us.longest == pytest.approx(0, abs=1)
    assert found.p99_ratio.value == pytest.approx(1)
    assert found.busy == pytest.approx(900 * found.alone_ms.p50 / 1000, rel=0.15)


def test_shared_and_alone_take_turns_in_another_order_every_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig, plan = served()
    with rig, rig.open(plan) as session:
        runs = noted(monkeypatch, TURN)
        run_beside_alone(rig, session, plan, loads(3), TURN)
    assert len(runs) == 9
    rounds = [runs[begin : begin + 3] for begin in range(0, 9, 3)]
    assert all(sorted(one) == [(0,), (0, 1, 2), (2,)] for one in rounds)
    assert len({tuple(one) for one in rounds}) > 1


def test_rates_alone_are_those_of_the_session_and_not_of_plain_streams() -> None:
    slow = synthetic_profile(3, 10, H200, name="slow")
    case = case_of((SHORT, slow), mix=parse_mix("short:1@100rps/9ms,slow:1@background"))
    narrow = pinned(case.profiles, ["0-15", "0-1"], H200)
    rig = Rig(case, SimDevice(H200, CALIBRATIONS["h200"]))
    load = load_of_mix(case.mix, 0.3, 0.0, 0)
    with rig, rig.open(narrow) as session:
        (one,) = run_beside_alone(rig, session, narrow, [load], Window(0.3, 0.0, 0.0))
        alone = session.run(closed_loop(2, only=1), Window(1.0, 0.1, 0.0))
    background = measure(one.shared).workers[1]
    assert background.alone_rps == pytest.approx(len(alone.requests.worker), rel=0.02)
    assert background.alone_rps < 0.8 * rig.alone_rps[1]
    assert 0.5 < background.ratio < 1.05
    assert one.shared.plan == narrow


class StopsAfter(Progress):
    """Asks for a stop when so many runs are done."""

    def __init__(self, runs: int) -> None:
        super().__init__()
        self.left = runs

    def part(self, share: float) -> None:
        self.left -= 1
        if self.left == 0:
            self.stop()


@pytest.mark.parametrize(("runs", "kept"), [(1, 0), (3, 0), (4, 1), (7, 1), (8, 2)])
def test_stop_between_runs_keeps_whole_rounds(runs: int, kept: int) -> None:
    progress = StopsAfter(runs)
    rig, plan = served(Progress(progress))
    with rig, rig.open(plan) as session:
        if not kept:
            with pytest.raises(StoppedError):
                run_beside_alone(rig, session, plan, loads(3), TURN, progress)
            return
        rounds = run_beside_alone(rig, session, plan, loads(3), TURN, progress)
    assert len(rounds) == kept
    assert all(sorted(one.alone) == [0, 2] for one in rounds)


def test_run_that_was_cut_short_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = Progress()
    rig, plan = served(Progress(progress))
    run = SimSession.run
    logs = []

    def stopping(self: SimSession, load: Load, window: Window) -> RunLog:
        log = run(self, load, window)
        if window == TURN:
            logs.append(log)
            if len(logs) == 6:  # the last one of the second round
                progress.stop()  # while it runs, as far as the caller can tell
        return log

    monkeypatch.setattr(SimSession, "run", stopping)
    with rig, rig.open(plan) as session:
        rounds = run_beside_alone(rig, session, plan, loads(3), TURN, progress)
    assert len(logs) == 6
    assert [one.shared.seed for one in rounds] == [0]
