"""Loads and windows: when requests arrive, from where, for how long, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eclip.core.device import Window
from eclip.core.load import CLOSED_LOOP, load_of_csv, load_of_mix
from eclip.core.load import Arrivals as Arrived
from eclip.core.mix import Mix, parse_mix
from eclip.core.shapes import Bursts, shape_of
from eclip.errors import ArtefactError, UsageError
from eclip.models.synthetic import synthetic_profile
from eclip.planner.policies import make_plan
from eclip.rig.arrivals import Arrivals, parts_of_load
from eclip.rig.rig import Rig
from eclip.sim.device import SimDevice
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
    load = load_of_csv(path, parse_mix("a,b,c"), 1.0, seed=0)
    found = [times.tolist() for times in load.arrivals if times is not None]
    assert found == [[0], [250_000_000, 500_000_000], []]
    assert load.label == "arrivals from arrivals.csv"


def test_background_that_a_csv_does_not_name_runs_on(tmp_path: Path) -> None:
    path = tmp_path / "arrivals.csv"
    path.write_text("time_s,worker\n0.5,a\n")
    mix = parse_mix("a@9rps/5ms,b@background,c,d@9rps")

    def lengths() -> list[int | None]:
        load = load_of_csv(path, mix, 1.0, seed=0)
        return [None if times is None else len(times) for times in load.arrivals]

    assert lengths() == [1, CLOSED_LOOP, CLOSED_LOOP, 0]
    path.write_text("time_s,worker\n0.5,b\n0.5,a\n")
    assert lengths() == [1, 1, CLOSED_LOOP, 0]


def test_a_csv_whose_arrivals_come_after_the_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "arrivals.csv"
    path.write_text("time_s,worker\n7,b\n5,a\n")
    with pytest.raises(UsageError, match=r"within a run of 2 s: the first comes after 5 s; run"):
        load_of_csv(path, parse_mix("a,b"), 2.0, seed=0)
    with pytest.raises(UsageError, match="within a run of 2 s"):
        load_of_csv(path, parse_mix("a@9rps,b@9rps,c@background"), 2.0, seed=0)
    assert load_of_csv(path, parse_mix("a,b"), 6.0, seed=0).label.endswith(": the first 1 of 2")


def test_a_service_without_arrivals_is_refused_since_no_bound_is_kept_or_missed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "arrivals.csv"
    path.write_text("time_s,worker\n0.5,a\n3,b\n")
    for mix in ("a@9rps/5ms,b@9rps/5ms", "a,b@9rps/1.5x"):
        with pytest.raises(UsageError, match=r"no arrival of the service b within .* 1 s; run"):
            load_of_csv(path, parse_mix(mix), 1.0, seed=0)
    load_of_csv(path, parse_mix("a@9rps/5ms,b@9rps/5ms"), 4.0, seed=0)


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
        load_of_csv(path, parse_mix("a,b"), 1.0, seed=0)
    assert str(path) in str(refusal.value)
    assert fault in str(refusal.value)


def test_missing_csv_and_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.csv", tmp_path):
        with pytest.raises(ArtefactError, match="cannot read"):
            load_of_csv(path, parse_mix("a"), 1.0, seed=0)


# --- Shapes -----------------------------------------------------------------------------------

SHAPES = ("poisson", "bursts", "bursts:on=20ms,off=0.03s", "azure-code", "azure-conv")
SERVICES = parse_mix("a@700rps,b,c@300rps")


def drawn(text: str, seed: int = 0, seconds: float = 8.0, mix: Mix = SERVICES) -> list[Arrived]:
    load = load_of_mix(mix, seconds, 2.0, seed, shape_of(text))
    return [times for times in load.arrivals if times is not CLOSED_LOOP]


def burstiness(times: Arrived, bin_ns: int = 100_000_000) -> float:
    """Variance over mean of the arrivals in a bin: 1 for a Poisson process."""
    counts = np.bincount((times - times[0]) // bin_ns)
    return float(counts.var() / counts.mean())


@pytest.mark.parametrize("text", SHAPES)
def test_every_shape_keeps_the_rate_and_the_bounds_of_the_run(text: str) -> None:
    for seed in range(20):
        for times, rate in zip(drawn(text, seed), (700, 300), strict=True):
            assert len(times) == pytest.approx(rate * 10, abs=4 * np.sqrt(rate * 10))
            assert -2_000_000_000 <= times[0] <= times[-1] < 8_000_000_000
            assert (np.diff(times) >= 0).all()


@pytest.mark.parametrize("text", SHAPES)
def test_a_shape_is_the_same_again_with_its_seed_only(text: str) -> None:
    first, again, other = drawn(text, 1), drawn(text, 1), drawn(text, 2)
    assert [times.tolist() for times in first] == [times.tolist() for times in again]
    assert first[0].tolist() != other[0].tolist()
    beside = drawn(text, 1, mix=parse_mix("a@700rps"))
    assert first[0].tolist() == beside[0].tolist()


def test_bursts_come_three_times_as_fast_and_not_at_all_for_two_thirds_of_the_time() -> None:
    (times,) = drawn("bursts", seconds=60.0, mix=parse_mix("a@1000rps"))
    counts = np.bincount((times - times[0]) // 5_000_000)
    assert np.mean(counts == 0) == pytest.approx(2 / 3, abs=0.05)
    assert np.median(counts[counts > 0]) == pytest.approx(15, abs=2)
    pauses = np.diff(times)[np.diff(times) > 20_000_000] / 1e9
    assert np.mean(pauses) == pytest.approx(0.2 + 0.02, abs=0.04)  # those above 20 ms
    assert np.std(pauses) == pytest.approx(0.2, abs=0.05)  # exponential: as large as the mean


def test_recorded_arrivals_are_as_bursty_as_the_service_was() -> None:
    mix = parse_mix("a@1000rps")
    found = {
        text: np.median([burstiness(drawn(text, seed, mix=mix)[0]) for seed in range(10)])
        for text in ("poisson", "azure-conv", "azure-code", "bursts")
    }
    assert found["poisson"] == pytest.approx(1, abs=0.3)
    assert 1 < found["azure-conv"] < 5
    assert found["azure-code"] > 20 and found["bursts"] > 20


def test_workers_begin_at_different_places_of_a_record() -> None:
    first, second = drawn("azure-code", mix=parse_mix("a@300rps,b@300rps"))
    together = [np.histogram(times, 100, (-2e9, 8e9))[0] for times in (first, second)]
    assert abs(np.corrcoef(np.array(together))[0, 1]) < 0.9


def test_a_record_begins_again_at_its_end() -> None:
    (times,) = drawn("azure-code", mix=parse_mix("a@3000rps"))
    gaps = np.diff(times)
    assert len(times) == 30_000
    record = 8818  # gaps that it has
    assert np.abs(gaps[1:5000] - gaps[1 + record : 5000 + record]).max() <= 2  # rounding


@pytest.mark.parametrize("requests", [0, 1, 2])
def test_a_run_may_be_too_short_for_its_shape(requests: int) -> None:
    for text in ("azure-code", "azure-conv"):
        for seed in range(200):
            assert len(drawn(text, seed, 8.0, parse_mix(f"a@{requests / 10 + 0.01}rps"))[0]) == (
                requests
            )
    assert len(drawn("bursts:on=1s,off=3000s", seconds=0.1, mix=parse_mix("a@100rps"))[0]) > 100


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("bursts:", None),
        ("bursts:on=0.1s", None),
        ("bursts:off=5ms,on=1s", None),
        ("bursts:on", "'on'"),
        ("bursts:on=0.1", "'on=0.1'"),
        ("bursts:on=-1s", "'on=-1s'"),
        ("bursts:on=1s,on=2s", "'on=2s'"),
        ("bursts:on=1s,", "''"),
        ("bursts:on=nans", "'on=nans'"),
        ("bursts:on=0s", "on lasts 0.001 to 3600 s, not 0"),
        ("bursts:off=2h", "'off=2h'"),
        ("bursts:off=99999s", "off lasts"),
    ],
)
def test_bursts_are_read_or_refused_in_one_line(text: str, fault: str | None) -> None:
    if fault is None:
        assert isinstance(shape_of(text), Bursts)
        return
    with pytest.raises(UsageError) as refusal:
        shape_of(text)
    assert fault in str(refusal.value) and "\n" not in str(refusal.value)


def test_what_names_no_shape_is_a_file(tmp_path: Path) -> None:
    assert shape_of("arrivals.csv") is shape_of(tmp_path / "bursts") is None
    assert parts_of_load(0.6) == (0.6, None, None)
    assert parts_of_load("a.csv") == (None, None, Path("a.csv"))
    assert parts_of_load("bursts") == (None, Bursts(0.1, 0.2), None)
    with pytest.raises(ArtefactError, match=r"poisson, bursts, azure-code, azure-conv"):
        load_of_csv(Path("azure"), parse_mix("a"), 1.0, seed=0)


def test_shape_of_arrivals_that_nobody_has_is_refused() -> None:
    with pytest.raises(UsageError, match="azure-code arrivals need a rate, and no worker"):
        Arrivals(parse_mix("m0,m1"), Window(), shape=shape_of("azure-code"))
    with pytest.raises(UsageError, match="no worker of the mix has one"):
        load_of_mix(parse_mix("m0,m1"), 1.0, 0.0, 0, shape_of("bursts"))


def test_arrivals_of_a_contest_have_the_shape_in_every_repeat() -> None:
    case = case_of([flat_profile(name, [100_000], H200) for name in ("m0", "m1")])
    mix, window = parse_mix("m0:1@500rps,m1:1"), Window(2.0, 0.1, 0.0)
    asked = Arrivals(mix, window, repeats=2, shape=shape_of("bursts:on=10ms,off=30ms"))
    rig = Rig(case, SimDevice(case.topology, case.calibration))
    first, second = (asked.load(rig, repeat) for repeat in range(2))
    assert first.label == "workers: 1 bursts (on 10 ms, off 30 ms) at 500/s, 1 closed loop"
    assert first.arrivals[0] is not None and second.arrivals[0] is not None
    assert first.arrivals[0].tolist() != second.arrivals[0].tolist()
    assert first.arrivals[1] is CLOSED_LOOP


def test_the_same_arrivals_alone_leave_all_others_idle() -> None:
    load = load_of_mix(SERVICES, 1.0, 0.1, 3)
    alone = load.only(2)
    assert [len(times) if times is not None else None for times in alone.arrivals[:2]] == [0, 0]
    assert alone.arrivals[2] is load.arrivals[2]
    assert alone.label == f"{load.label}; all others idle"
    assert alone.seed == load.seed
    assert load.only(1).arrivals[1] is CLOSED_LOOP
    assert alone.only(2).label == alone.label


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
    with pytest.raises(
        UsageError, match=r"the load 0.6 draws the arrivals; leave rates \(@rps\) out"
    ):
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
    rig = Rig(case, SimDevice(case.topology, case.calibration))
    first, second = (replayed.load(rig, repeat) for repeat in range(2))
    assert first is second
    assert first.label == "arrivals from a.csv"
    assert replayed.window(rig) == window


def test_offered_requests_are_those_that_arrive_in_the_measured_part() -> None:
    load = arrivals([-5, 0, 7, 9, 10], None, [])
    assert load.offered(10) == (3, None, 0)
