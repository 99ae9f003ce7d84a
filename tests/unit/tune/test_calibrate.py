"""Calibration: which placements it measures, and that nothing measured is lost."""

from __future__ import annotations

import itertools
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from eclip.core.device import Window
from eclip.core.profile import Profile
from eclip.errors import DeviceError, MismatchError, UsageError
from eclip.files import store
from eclip.files.observations import Observations, ObservedHome
from eclip.models.synthetic import synthetic_profile
from eclip.planner.search.placement import Placer
from eclip.progress import Progress
from eclip.rig.rig import Rig
from eclip.sim.device import SimDevice
from eclip.tune import calibrate
from eclip.tune import observe as observing
from eclip.tune.observe import observe, placements
from heard import Heard
from simulations import CALIBRATIONS, H200, case_of

PROFILES = {name: synthetic_profile(n, 20, H200, name=name) for n, name in enumerate("abc")}
CASES = [case_of([PROFILES[name] for name in names]) for names in ("ab", "abc")]
NAMES = [case.mix.name for case in CASES]


class Device(SimDevice):
    """A simulator that says it is a GPU with a driver, and counts the programs that it opens."""

    modelled = False

    def __init__(self, driver: str = "1.0") -> None:
        super().__init__(H200, CALIBRATIONS["h200"])
        self.driver = driver  # type: ignore[assignment]
        self.opened = 0

    def open(self, program: Any, sources: Sequence[Profile], *, brief: bool = False) -> Any:
        self.opened += 1
        return super().open(program, sources, brief=brief)


class Breaking(Device):
    """Opens so many programs, and then fails in this way once or for good."""

    def __init__(self, after: int, error: BaseException, times: int = 1_000_000) -> None:
        super().__init__()
        self.after, self.error, self.times = after, error, times

    def open(self, program: Any, sources: Sequence[Profile], *, brief: bool = False) -> Any:
        if self.opened >= self.after and self.times > 0:
            self.times -= 1
            raise self.error
        return super().open(program, sources, brief=brief)


def measure(path: Path, device: SimDevice | None = None, **options: Any) -> Observations:
    asked: dict[str, Any] = {"runs": 5, "budget_s": 600.0, "seed": 0, "progress": Progress()}
    return calibrate.measure(device or Device(), CASES, path, **(asked | options))


# --- Placements -------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 3, 6, 16, 20])
def test_placements_lie_on_the_device_and_none_comes_twice(workers: int) -> None:
    found = list(itertools.islice(placements(workers, 16, 0), 60))
    assert found[0] == ("shared", ())
    homes = [tuple(part) for _, part in found]
    assert len(set(homes)) == len(homes)
    for kind, part in found[1:]:
        assert len(part) == workers
        assert all(0 <= home.first < 16 and 1 <= home.most <= 16 for home in part)
        assert all((home.switch_max > 0) == (kind == "lanes") for home in part)
        if kind == "split":
            borders = [0, *itertools.accumulate(home.most for home in part)]
            assert [home.first for home in part] == borders[:-1]
            assert borders[-1] == 16
    kinds = {kind for kind, _ in found}
    assert kinds >= {"static", "lanes"}
    assert ("split" in kinds) == (workers <= 16)


def test_placements_follow_from_the_seed() -> None:
    def first(seed: int) -> list[tuple[str, tuple[ObservedHome, ...]]]:
        return list(itertools.islice(placements(3, 16, seed), 20))

    assert first(1) == first(1) != first(2)


def test_placements_end_where_there_are_no_more() -> None:
    assert 5 < len(list(placements(1, 2, 0))) < 100


# --- Measuring --------------------------------------------------------------------------------


def test_observed_rate_and_power_are_those_of_the_run() -> None:
    case = CASES[0]
    rig = Rig(case, Device())
    homes = (ObservedHome(0, 1, 8), ObservedHome(8, 1, 8))
    run = observe(rig, Placer(case.problem()), "split", homes)
    assert run is not None
    assert (run.mix, run.kind, run.homes) == (case.mix.name, "split", homes)
    assert run.alone_rps == rig.alone_rps
    for profile, rate in zip(case.profiles, run.rates_rps, strict=True):
        alone = 1e9 / (profile.busy_at(64) + profile.gap_at(64)).sum()
        assert 0.6 * alone < rate < alone
    assert run.power_w > CALIBRATIONS["h200"].power.idle_w


def test_worker_that_gets_nowhere_gives_no_observation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observing, "WINDOW", Window(1e-3, 0.0, 0.0))
    slow = case_of([synthetic_profile(0, 400, H200, name="a"), PROFILES["b"]])
    assert slow.profiles[0].request_ns[-1] > 1_000_000
    assert observe(Rig(slow, Device()), Placer(slow.problem()), "shared", ()) is None


def test_every_mix_gets_its_runs_and_all_are_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "o.json.gz"
    made = measure(path)
    assert store.load(path, Observations) == made
    assert [run.mix for run in made.runs] == [name for name in NAMES for _ in range(5)]
    assert made.fingerprint.driver == "1.0"
    assert set(made.fingerprint.traces) == {"a:1", "b:1", "c:1"}
    assert all(run.seconds == observing.WINDOW.seconds for run in made.runs)


def test_measuring_goes_on_where_it_stopped(tmp_path: Path) -> None:
    once, twice = tmp_path / "once.json", tmp_path / "twice.json"
    whole = measure(once)
    few = measure(twice, runs=2)
    assert len(few.runs) == 4
    rest = measure(twice)
    assert rest.runs[:4] == few.runs
    assert len(rest.runs) == len(whole.runs)
    assert set(rest.runs) == set(whole.runs)
    assert measure(twice) == rest


def test_an_interrupt_keeps_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "o.json"
    alone = 1  # program that is opened for the rates alone, between the first and its log
    with pytest.raises(KeyboardInterrupt):
        measure(path, Breaking(alone + 3, KeyboardInterrupt()))
    assert len(store.load(path, Observations).runs) == 3
    assert set(measure(path).runs) == set(measure(tmp_path / "whole.json").runs)


def test_a_stop_request_keeps_what_was_measured_and_says_what_is_missing(tmp_path: Path) -> None:
    path, progress = tmp_path / "o.json", Heard(stop_at=0.3)
    made = measure(path, progress=progress)
    assert [run.mix for run in made.runs] == NAMES[:1] * 3
    assert store.load(path, Observations) == made
    assert progress.warnings == [
        f"{NAMES[0]} has 3 of 5 runs; call again to add the rest",
        f"{NAMES[1]} has 0 of 5 runs; call again to add the rest",
    ]
    assert set(measure(path).runs) == set(measure(tmp_path / "whole.json").runs)


def test_placement_that_does_not_fit_is_left_out_with_the_reason(tmp_path: Path) -> None:
    progress = Heard()
    device = Breaking(3, DeviceError("no place for a cluster"), times=1)
    made = measure(tmp_path / "o.json", device, progress=progress)
    assert len(made.runs) == 10
    (warning,) = progress.warnings
    assert "no place for a cluster" in warning


def test_device_that_only_fails_ends_the_measurement(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="broken"):
        measure(tmp_path / "o.json", Breaking(3, DeviceError("broken")))


@pytest.mark.slow
def test_time_is_dealt_out_evenly_and_what_is_missing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, progress = itertools.count(), Heard()
    clock = types.SimpleNamespace(monotonic=lambda: float(next(now)))  # nobody else looks at it
    monkeypatch.setattr("eclip.tune.calibrate.time", clock)
    made = measure(tmp_path / "o.json", runs=1000, budget_s=40.0, progress=progress)
    counts = [sum(run.mix == name for run in made.runs) for name in NAMES]
    assert counts[0] == pytest.approx(counts[1], abs=3)
    assert 30 < sum(counts) < 45
    assert any(f"{NAMES[1]} has {counts[1]} of 1000 runs" in one for one in progress.warnings)


def test_runs_of_another_driver_are_not_added_to(tmp_path: Path) -> None:
    path = tmp_path / "o.json"
    measure(path, runs=1)
    with pytest.raises(MismatchError, match=r"driver 1\.0.*of observations"):
        measure(path, Device(driver="2.0"))


def test_runs_of_the_simulator_say_so_and_are_kept_apart_from_measured_ones(
    tmp_path: Path,
) -> None:
    simulator = SimDevice(H200, CALIBRATIONS["h200"])
    simulated, measured = tmp_path / "simulated.json", tmp_path / "measured.json"
    made = measure(simulated, simulator, runs=1)
    assert made.modelled and made.fingerprint.driver == ""
    assert "simulator of" in made.source
    assert not measure(measured, runs=1).modelled
    with pytest.raises(MismatchError, match=r"has measured runs; .*of observations"):
        measure(measured, simulator, runs=2)
    with pytest.raises(MismatchError, match=r"has simulated runs; .*of observations"):
        measure(simulated, runs=2)


def test_nothing_measured_cannot_be_fitted(tmp_path: Path) -> None:
    nothing = measure(tmp_path / "o.json", budget_s=1e-6)
    assert nothing.runs == ()
    with pytest.raises(UsageError, match="there are no runs to fit"):
        calibrate.fit_observations(nothing, H200, CALIBRATIONS["h200"], [])
