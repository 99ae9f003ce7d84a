"""``eclip calibrate``: which placements it measures, and that nothing measured is lost."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from eclip.artefacts import store
from eclip.artefacts.mix import parse_mix
from eclip.artefacts.observations import Observations, ObservedHome
from eclip.artefacts.profile import Profile
from eclip.cli import calibrate
from eclip.devices.base import Window
from eclip.devices.sim.device import SimDevice
from eclip.errors import DeviceError, MismatchError
from eclip.frontends.synthetic import synthetic_profile
from eclip.lab import observe as observing
from eclip.lab.observe import observe, placements
from eclip.planning.problem import Problem
from eclip.planning.search.placement import Placer
from simulations import CALIBRATIONS, H200

PROFILES = {name: synthetic_profile(n, 20, H200, name=name) for n, name in enumerate("abc")}
MIXES = [parse_mix("a:1,b:1"), parse_mix("a:1,b:1,c:1")]


def measure(path: Path, device: Any = None, **options: Any) -> Observations:
    asked: dict[str, Any] = {"runs": 5, "budget": 600.0, "seed": 0, "driver": "1.0"} | options
    return calibrate.measure(
        device or SimDevice(H200, CALIBRATIONS["h200"]),
        lambda profiles: profiles,
        {mix.name: tuple(PROFILES[w.model] for w in mix.workers) for mix in MIXES},
        MIXES,
        path,
        **asked,
    )


class Breaking(SimDevice):
    """Opens so many programs, and then fails in this way once or for good."""

    def __init__(self, after: int, error: BaseException, times: int = 1_000_000) -> None:
        super().__init__(H200, CALIBRATIONS["h200"])
        self.after, self.error, self.times = after, error, times

    def open(self, program: Any, sources: Sequence[Profile]) -> Any:
        self.after -= 1
        if self.after < 0 and self.times > 0:
            self.times -= 1
            raise self.error
        return super().open(program, sources)


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
    mix = MIXES[0]
    profiles = tuple(PROFILES[worker.model] for worker in mix.workers)
    device = SimDevice(H200, CALIBRATIONS["h200"])
    placer = Placer(Problem(mix, H200, profiles))
    homes = (ObservedHome(0, 1, 8), ObservedHome(8, 1, 8))
    run = observe(device, placer, profiles, (7.0, 9.0), "split", homes)
    assert run is not None
    assert (run.mix, run.kind, run.homes, run.alone_rps) == (mix.name, "split", homes, (7.0, 9.0))
    for profile, rate in zip(profiles, run.rates_rps, strict=True):
        alone = 1e9 / (profile.busy_at(64) + profile.gap_at(64)).sum()
        assert 0.6 * alone < rate < alone
    assert run.power_w > CALIBRATIONS["h200"].power.idle_w


def test_worker_that_gets_nowhere_gives_no_observation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observing, "WINDOW", Window(1e-3, 0.0, 0.0))
    longer = [synthetic_profile(1, 400, H200, name=worker.model) for worker in MIXES[0].workers]
    profiles = tuple(longer)
    placer = Placer(Problem(MIXES[0], H200, profiles))
    device = SimDevice(H200, CALIBRATIONS["h200"])
    assert observe(device, placer, profiles, (1.0, 1.0), "shared", ()) is None


def test_every_mix_gets_its_runs_and_all_are_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "o.json.gz"
    made = measure(path)
    assert store.load(path, Observations) == made
    assert [run.mix for run in made.runs] == [mix.name for mix in MIXES for _ in range(5)]
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
    alone = 2  # programs that are opened for the rates alone
    with pytest.raises(KeyboardInterrupt):
        measure(path, Breaking(alone + 3, KeyboardInterrupt()))
    assert len(store.load(path, Observations).runs) == 3
    assert set(measure(path).runs) == set(measure(tmp_path / "whole.json").runs)


def test_placement_that_does_not_fit_is_left_out_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = measure(tmp_path / "o.json", Breaking(3, DeviceError("no place for a cluster"), times=1))
    assert len(made.runs) == 10
    assert "no place for a cluster" in capsys.readouterr().err


def test_device_that_only_fails_ends_the_measurement(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="broken"):
        measure(tmp_path / "o.json", Breaking(3, DeviceError("broken")))


def test_time_is_dealt_out_evenly_and_what_is_missing_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = itertools.count()
    monkeypatch.setattr("eclip.cli.calibrate.time.monotonic", lambda: float(next(now)))
    made = measure(tmp_path / "o.json", runs=1000, budget=40.0)
    counts = [sum(run.mix == mix.name for run in made.runs) for mix in MIXES]
    assert counts[0] == pytest.approx(counts[1], abs=3)
    assert 30 < sum(counts) < 45
    assert f"{MIXES[1].name} has {counts[1]} of 1000 runs" in capsys.readouterr().err


def test_runs_of_another_driver_are_not_added_to(tmp_path: Path) -> None:
    path = tmp_path / "o.json"
    measure(path, runs=1)
    with pytest.raises(MismatchError, match=r"driver 1\.0.*--observations"):
        measure(path, driver="2.0")
