"""Loads and windows: when requests arrive, from where, for how long, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eclip.artefacts.mix import parse_mix
from eclip.devices.base import Window
from eclip.devices.load import CLOSED_LOOP, load_of_csv, load_of_mix
from eclip.devices.sim.device import SimDevice
from eclip.errors import ArtefactError, UsageError
from eclip.frontends.synthetic import synthetic_profile
from eclip.lab.arrivals import Arrivals
from eclip.lab.stand import Stand
from eclip.planning.policies import make_plan
from simulations import (
    H200,
    MI50,
    arrivals,
    case_of,
    closed,
    flat_profile,
    free,
    pinned,
    problem_of,
    run,
)

# --- Loads ------------------------------------------------------------------------------------


def test_same_seed_gives_an_equal_log() -> None:
    profiles = [synthetic_profile(seed, 10, H200, name=f"m{seed}") for seed in range(3)]
    plan = make_plan("eclip", problem_of(profiles, H200))
    poisson = load_of_mix(parse_mix("m0@900rps,m1,m2@2000rps"), 0.02, 0.01, seed=5)
    for load in (closed(plan, seed=5), poisson):
        first = run(plan, profiles, load, warmup_seconds=0.01)
        assert first == run(plan, profiles, load, warmup_seconds=0.01)
        assert len(first.requests.worker) > 20


def test_other_seed_gives_other_starts_and_arrivals() -> None:
    profiles = [synthetic_profile(seed, 10, H200, name=f"m{seed}") for seed in range(2)]
    plan = make_plan("shared", problem_of(profiles, H200))
    logs = [run(plan, profiles, closed(plan, seed)) for seed in (1, 2)]
    assert logs[0].requests.start_ns != logs[1].requests.start_ns
    mix = parse_mix("m0@500rps,m1@500rps")
    loads = [load_of_mix(mix, 1.0, 0.0, seed) for seed in (1, 2)]
    for worker in range(2):
        drawn = [load.arrivals[worker] for load in loads]
        assert drawn[0] is not None and drawn[1] is not None
        assert drawn[0].tolist() != drawn[1].tolist()


def test_closed_loop_begins_a_request_when_the_last_one_ends() -> None:
    profiles = [synthetic_profile(seed, 5, H200, name=f"m{seed}") for seed in range(3)]
    plan = make_plan("shared", problem_of(profiles, H200))
    log = run(plan, profiles, closed(plan))
    for worker in plan.everyone:
        mine = np.array(log.requests.worker) == worker
        start, end = np.array(log.requests.start_ns)[mine], np.array(log.requests.end_ns)[mine]
        assert start[1:].tolist() == end[:-1].tolist()
        assert (np.array(log.requests.arrival_ns)[mine] == start).all()
        assert log.unfinished[worker] == 1


def test_open_loop_requests_wait_their_turn_and_none_is_lost() -> None:
    profiles = [flat_profile("a", [100_000]), flat_profile("b", [400_000])]
    plan = pinned(profiles, ["0", "1"])
    mix = parse_mix("a@5000rps,b@5000rps")
    load = load_of_mix(mix, 0.02, 0.0, seed=1)
    log = run(plan, profiles, load, free())
    for worker, times in enumerate(load.arrivals):
        assert times is not None
        mine = np.array(log.requests.worker) == worker
        arrival, start, end = (
            np.array(column)[mine]
            for column in (log.requests.arrival_ns, log.requests.start_ns, log.requests.end_ns)
        )
        assert arrival.tolist() == times[: len(arrival)].tolist()
        previous_end = np.concatenate([[0], end[:-1]])
        assert start.tolist() == np.maximum(arrival, previous_end).tolist()
        assert np.count_nonzero(mine) + log.unfinished[worker] == len(times)
    assert log.unfinished[1] > 30


def test_arrivals_after_the_end_are_not_unfinished() -> None:
    profile = flat_profile("a", [1_000_000])
    plan = pinned([profile], ["0"])
    log = run(plan, [profile], arrivals([0, 19_500_000, 19_600_000, 20_000_000, 30_000_000]))
    assert len(log.requests.worker) == 1
    assert log.unfinished == (2,)


def test_poisson_arrivals_have_the_rate_and_the_variance_of_a_poisson_process() -> None:
    mix = parse_mix("a@1000rps")
    counts, totals = [], []
    for seed in range(200):
        times = load_of_mix(mix, 0.8, 0.2, seed).arrivals[0]
        assert times is not None
        totals.append(len(times))
        assert -200_000_000 <= times[0] <= times[-1] < 800_000_000
        assert (np.diff(times) >= 0).all()
        counts += np.histogram(times, bins=10, range=(-200_000_000, 800_000_000))[0].tolist()
    assert np.mean(counts) == pytest.approx(100, rel=0.01)
    assert np.var(counts) == pytest.approx(100, rel=0.15)
    assert np.var(totals) == pytest.approx(1000, rel=0.3)


def test_arrivals_of_a_worker_do_not_depend_on_the_policy_or_the_other_workers() -> None:
    alone = load_of_mix(parse_mix("a@700rps"), 1.0, 0.1, seed=3).arrivals[0]
    beside = load_of_mix(parse_mix("a@700rps,b,c@90rps"), 1.0, 0.1, seed=3)
    assert alone is not None and beside.arrivals[0] is not None
    assert alone.tolist() == beside.arrivals[0].tolist()
    assert beside.arrivals[1] is CLOSED_LOOP
    profiles = [flat_profile(name, [1_000]) for name in "abc"]
    problem = problem_of(profiles, MI50)
    seen = [
        sorted(zip(log.requests.worker, log.requests.arrival_ns, strict=True))
        for policy in ("shared", "timeslice")
        for log in [
            run(
                make_plan(policy, problem),
                profiles,
                load_of_mix(parse_mix("a@700rps,b@50rps,c@90rps"), 0.02, 0.0, seed=3),
            )
        ]
    ]
    assert seen[0] == seen[1]
    assert len(seen[0]) > 5


def test_more_arrivals_than_anyone_can_mean_are_refused() -> None:
    with pytest.raises(UsageError, match="lower the rate or the time"):
        load_of_mix(parse_mix("a@999999999rps"), 10.0, 0.0, seed=0)


def test_load_for_another_number_of_workers_is_refused() -> None:
    profile = flat_profile("a", [1000])
    with pytest.raises(UsageError, match="2 workers, not 1"):
        run(pinned([profile], ["0"]), [profile], arrivals([0], [0]))


def test_csv_arrivals_are_sorted_and_workers_not_named_stay_idle(tmp_path: Path) -> None:
    path = tmp_path / "arrivals.csv"
    path.write_text("time_s, worker\r\n0.5,b\r\n0,a\r\n0.25, b\r\n")
    load = load_of_csv(path, ["a", "b", "c"], seed=0)
    found = [times.tolist() for times in load.arrivals if times is not None]
    assert found == [[0], [250_000_000, 500_000_000], []]
    assert load.label == "arrivals from arrivals.csv"


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "header"),
        (b"worker,time_s\n1,a\n", "header"),
        (b"0.1,a\n", "header"),
        (b"time_s,worker\n", "no arrivals"),
        (b"time_s,worker\nsoon,a\n", "line 2: 'soon'"),
        (b"time_s,worker\n0.1,a\n,a\n", "line 3: ''"),
        (b"time_s,worker\nnan,a\n", "finite"),
        (b"time_s,worker\ninf,a\n", "finite"),
        (b"time_s,worker\n-0.1,a\n", "at least 0"),
        (b"time_s,worker\n1e30,a\n", "line 2"),
        (b"time_s,worker\n0.1,z\n", "unknown worker 'z'; choose one of: a, b"),
        (b"time_s,worker\n0.1\n", "1 columns"),
        (b"time_s,worker\n0.1,a,b\n", "3 columns"),
        (b"\x00\xff\xfe\x80", ""),
        (b"\x1f\x8b\x08\x00", ""),
        (b"time_s,worker\n0.1,a\xff\n", "not a CSV text file"),
        (b"time_s,worker\n0.1," + b"a" * 200_000, "not a CSV text file"),
        (b'time_s,worker\n"0.1,a\n', ""),
        (b"time_s,worker\n0.1\x00,a\n", ""),
    ],
)
def test_bad_csv_is_refused_with_the_file_and_the_fault(
    tmp_path: Path, content: bytes, fault: str
) -> None:
    path = tmp_path / "arrivals.csv"
    path.write_bytes(content)
    with pytest.raises(ArtefactError) as refusal:
        load_of_csv(path, ["a", "b"], seed=0)
    assert str(path) in str(refusal.value)
    assert fault in str(refusal.value)


def test_missing_csv_and_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.csv", tmp_path):
        with pytest.raises(ArtefactError, match="cannot read"):
            load_of_csv(path, ["a"], seed=0)


# --- Windows ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "window",
    [
        {"seconds": 0.0},
        {"seconds": -1.0},
        {"seconds": float("nan")},
        {"seconds": float("inf")},
        {"seconds": 1e9},
        {"warmup_seconds": -0.1},
        {"warmup_seconds": float("nan")},
        {"warmup_seconds": float("inf")},
        {"trace_ms": -1.0},
        {"trace_ms": float("nan")},
        {"trace_ms": 2000.1},
    ],
)
def test_impossible_window_is_refused(window: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        Window(**window)


@settings(max_examples=200, deadline=None)
@given(milliseconds=st.integers(1, 100_000))
def test_trace_window_may_be_the_whole_run(milliseconds: int) -> None:
    Window(seconds=milliseconds / 1000, trace_ms=float(milliseconds))


# --- Arrivals of a contest --------------------------------------------------------------------


def test_load_of_a_part_draws_arrivals_so_a_mix_with_rates_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--load draws the arrivals; leave rates \(@rps\) out"):
        Arrivals(parse_mix("m0@900rps,m1"), Window(), part=0.6)
    Arrivals(parse_mix("m0@900rps,m1"), Window())
    Arrivals(parse_mix("m0,m1"), Window(), part=0.6)


@pytest.mark.parametrize("part", [0.0, -0.5, 11.0, float("nan")])
def test_load_that_is_no_part_of_a_rate_is_refused(part: float) -> None:
    with pytest.raises(UsageError, match="a part of a rate"):
        Arrivals(parse_mix("m0,m1"), Window(), part=part)


def test_load_of_no_requests_is_refused() -> None:
    with pytest.raises(UsageError, match="requests start at 1"):
        Arrivals(parse_mix("m0,m1"), Window(), part=0.6, requests=0)


def test_arrivals_from_a_file_are_the_same_in_every_repeat(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("time_s,worker\n0.001,m0\n0.002,m1\n")
    case = case_of([flat_profile(name, [100_000], H200) for name in ("m0", "m1")])
    window = Window(0.01, 0.0, 0.0)
    replayed = Arrivals(case.mix, window, repeats=2, file=path)
    stand = Stand(case, SimDevice(case.topology, case.calibration))
    first, second = (replayed.load(stand, repeat) for repeat in range(2))
    assert first is second
    assert first.label == "arrivals from a.csv"
    assert replayed.window(stand) == window


def test_offered_requests_are_those_that_arrive_in_the_measured_part() -> None:
    load = arrivals([-5, 0, 7, 9, 10], None, [])
    assert load.offered(10) == (3, None, 0)
