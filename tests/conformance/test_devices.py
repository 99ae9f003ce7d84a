"""The device contract: every device passes these tests. What only some devices can do is in
test_capabilities.py, and which device takes which test in conftest.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from benches import WAYS, WORKERS, Bench, closed_loop, spaced_arrivals, with_needs
from eclip.core.device import Window
from eclip.core.load import CLOSED_LOOP, Load
from eclip.core.model_key import ModelKey
from eclip.core.plan import Lanes
from eclip.core.program import lower
from eclip.core.runlog import RunLog
from eclip.core.topology import Topology
from eclip.core.trace import with_traces
from eclip.errors import MismatchError, UsageError
from eclip.files import store
from eclip.planner.alone import alone_rates
from eclip.planner.policies import POLICIES, make_plan
from eclip.planner.problem import Problem
from eclip.planner.tiers import FOR_SERVICES

MakeProblem = Callable[..., Problem]
PLAIN = [policy for policy in POLICIES if policy not in FOR_SERVICES]


def test_device_says_what_it_is(bench: Bench) -> None:
    device = bench.device
    assert device.topology == bench.problem.topology
    assert device.title
    assert device.index >= 0
    assert (device.driver is None) == bench.run(closed_loop()).modelled
    assert device.source_kind(Lanes()) in bench.sources


def test_log_says_what_ran_where_and_for_how_long(bench: Bench) -> None:
    log = bench.run(closed_loop(seed=7))
    assert log.plan == bench.plan()
    assert log.device
    assert (log.load, log.seed) == ("closed loop", 7)
    assert log.duration_ns == pytest.approx(bench.seconds * 1e9, rel=0.01)
    assert log.alone_rps == ()
    assert set(log.requests.worker) == set(range(WORKERS))
    # What a GPU says of a run this short, and of a host that others use.
    rough = ("energy is measured over", "the load generator lagged")
    assert [warning for warning in log.warnings if not warning.startswith(rough)] == []


@pytest.mark.parametrize("policy", [with_needs(policy, WAYS) for policy in PLAIN])
def test_plan_of_every_policy_runs(bench: Bench, policy: str) -> None:
    log = bench.run(closed_loop(), policy=policy)
    assert log.plan.policy == policy
    assert set(log.requests.worker) == set(range(WORKERS))


def test_log_survives_its_file(bench: Bench, tmp_path: Path) -> None:
    log = bench.run(closed_loop())
    store.save(log, tmp_path / "run.json")
    assert store.load(tmp_path / "run.json", RunLog) == log


def test_requests_are_in_order_of_completion_and_within_the_run(bench: Bench) -> None:
    for load in (closed_loop(), spaced_arrivals()):
        log = bench.run(load)
        arrival, start, end = (
            np.array(column)
            for column in (log.requests.arrival_ns, log.requests.start_ns, log.requests.end_ns)
        )
        assert (arrival <= start).all() and (start < end).all()
        assert (np.diff(end) >= 0).all()
        assert end.min() >= 0 and end.max() <= log.duration_ns


def test_worker_has_one_request_at_a_time(bench: Bench) -> None:
    for load in (closed_loop(), spaced_arrivals()):
        log = bench.run(load)
        for worker in range(WORKERS):
            mine = np.array(log.requests.worker) == worker
            start, end = (
                np.array(column)[mine] for column in (log.requests.start_ns, log.requests.end_ns)
            )
            assert (start[1:] >= end[:-1]).all()


def test_every_arrival_completes_or_is_unfinished(bench: Bench) -> None:
    load = spaced_arrivals()
    log = bench.run(load)
    assert log.unfinished == (0,) * WORKERS
    for worker, times in enumerate(load.arrivals):
        assert times is not None
        mine = np.array(log.requests.worker) == worker
        assert np.array(log.requests.arrival_ns)[mine].tolist() == times.tolist()
    short = Window(seconds=0.0152, warmup_seconds=0.0, trace_ms=1.0)
    cut = bench.run(load, short)
    for worker, times in enumerate(load.arrivals):
        assert times is not None
        arrived = np.count_nonzero(times < cut.duration_ns)
        assert cut.requests.worker.count(worker) + cut.unfinished[worker] == arrived
    assert sum(cut.unfinished) > 0


def test_log_says_what_was_offered_and_how_late_the_load_was(bench: Bench) -> None:
    """Arrivals are those of the load, whenever the device came to them."""
    early = np.array([-4_000_000, -2_000_000])
    load = spaced_arrivals()
    times = [np.concatenate([early, worker]) for worker in load.arrivals if worker is not None]
    window = Window(seconds=bench.seconds, warmup_seconds=0.005, trace_ms=0.0)
    log = bench.run(Load(label="bursts", seed=0, arrivals=tuple(times)), window)
    assert log.offered == (20,) * WORKERS  # what came before is not of the measured part
    for worker in range(WORKERS):
        mine = np.array(log.requests.worker) == worker
        arrived = np.array(log.requests.arrival_ns)[mine]
        assert arrived[arrived >= 0].tolist() == times[worker][2:].tolist()
        assert set(arrived[arrived < 0].tolist()) <= set(early.tolist())
    assert len(log.lag_ns) == WORKERS and min(log.lag_ns) >= 0
    assert any("lagged" in warning for warning in log.warnings) == log.lagged
    assert bench.run(closed_loop()).offered == (None,) * WORKERS


def test_log_takes_rates_alone_of_all_its_workers_or_none(bench: Bench) -> None:
    log = bench.run(closed_loop())
    known = msgspec.structs.replace(log, alone_rps=(1.0,) * WORKERS)
    assert len(known.alone_rps) == WORKERS
    with pytest.raises(ValueError, match="alone_rps"):
        msgspec.structs.replace(log, alone_rps=(1.0,))


def test_counters_are_those_of_the_requests(bench: Bench) -> None:
    log = bench.run(closed_loop())
    for part, counter in zip(log.plan.main.assignments, log.counters, strict=True):
        done = log.requests.worker.count(part.worker)
        kernels = log.plan.workers[part.worker].kernels
        assert part.switches > 0
        assert done * kernels <= counter.kernels <= (done + 1) * kernels
        assert done * part.switches <= counter.barriers <= (done + 1) * part.switches
        assert log.unfinished[part.worker] == 1


def test_trace_window_of_0_records_no_kernels(bench: Bench) -> None:
    log = bench.run(closed_loop(), Window(seconds=0.01, warmup_seconds=0.0, trace_ms=0.0))
    assert log.kernels.worker == ()
    assert log.kernels.window_ns == 0


def test_session_runs_more_than_once(bench: Bench) -> None:
    with bench.device.open(bench.program(), bench.plain) as session:
        first = session.run(closed_loop(), bench.window)
        other = session.run(spaced_arrivals(), bench.window)
        again = session.run(closed_loop(), bench.window)
    assert len(other.requests.worker) == 20 * WORKERS
    done = pytest.approx(len(first.requests.worker), rel=bench.tolerance)
    assert len(again.requests.worker) == done


@pytest.mark.modelled
def test_modelled_run_repeats_itself_exactly(bench: Bench) -> None:
    log = bench.run(closed_loop(seed=3))
    assert log.modelled
    assert bench.run(closed_loop(seed=3)) == log


def test_two_sessions_do_not_disturb_each_other(bench: Bench) -> None:
    expected = bench.run(closed_loop())
    with (
        bench.device.open(bench.program("shared"), bench.plain) as one,
        bench.device.open(bench.program(), bench.plain) as other,
    ):
        one.run(closed_loop(), bench.window)
        log = other.run(closed_loop(), bench.window)
    assert log.plan == expected.plan
    done = pytest.approx(len(expected.requests.worker), rel=bench.tolerance)
    assert len(log.requests.worker) == done


def test_session_may_be_closed_twice_and_lets_errors_through(bench: Bench) -> None:
    session = bench.device.open(bench.program(), bench.plain)
    with pytest.raises(ZeroDivisionError), session:
        raise ZeroDivisionError
    session.close()


def test_device_and_its_sessions_may_be_closed_twice(bench: Bench) -> None:
    """And whoever has the same device is not disturbed."""
    own = bench.another()
    sessions = [own.open(bench.program(policy), bench.plain) for policy in ("eclip", "shared")]
    assert sessions[0].run(closed_loop(), bench.window).requests.worker
    own.close()
    own.close()
    for session in sessions:
        session.close()
        session.close()
    with bench.another() as other, other.open(bench.program(), bench.plain) as session:
        assert session.run(closed_loop(), bench.window).requests.worker
    assert bench.run(closed_loop()).requests.worker


def test_session_that_was_opened_briefly_runs_the_same_plan(bench: Bench) -> None:
    with bench.device.open(bench.program(), bench.plain, brief=True) as session:
        log = session.run(closed_loop(), bench.window)
    assert log.plan == bench.plan()
    assert set(log.requests.worker) == set(range(WORKERS))


def test_plan_for_another_device_is_refused_with_the_reason(
    bench: Bench, mi50: Topology, make_problem: MakeProblem
) -> None:
    foreign = make_problem(mi50, WORKERS)
    program = lower(make_plan("shared", foreign), [profile.trace for profile in foreign.profiles])
    units = bench.device.topology.units
    with pytest.raises(MismatchError, match=f"different devices: units 60 against {units}"):
        bench.device.open(program, bench.stand_ins(foreign.profiles))


def test_plan_from_a_twin_of_the_device_runs_with_a_warning(bench: Bench) -> None:
    plan = bench.plan("shared")
    twin = msgspec.structs.replace(plan.fingerprint, device="NVIDIA H100 SXM")
    plan = msgspec.structs.replace(plan, fingerprint=twin)
    program = lower(plan, [profile.trace for profile in bench.problem.profiles])
    with bench.device.open(program, bench.plain) as session:
        log = session.run(closed_loop(), bench.window)
    title = bench.device.topology.title
    assert any("H100" in warning and title in warning for warning in log.warnings)


def test_wrong_number_of_sources_is_refused(bench: Bench) -> None:
    for sources in ([], bench.plain[:-1], [*bench.plain, bench.plain[0]]):
        with pytest.raises(MismatchError, match=f"{WORKERS} workers"):
            bench.device.open(bench.program(), sources)


def test_sources_in_another_order_are_refused(bench: Bench) -> None:
    with pytest.raises(MismatchError):
        bench.device.open(bench.program(), list(bench.plain)[::-1])


def test_source_of_other_kernels_is_refused(
    bench: Bench, make_problem: MakeProblem, h200: Topology
) -> None:
    same_name = make_problem(h200, WORKERS, seed=50)
    with pytest.raises(MismatchError):
        bench.device.open(bench.program(), bench.stand_ins(same_name.profiles))
    profile = same_name.profiles[0]
    trace = msgspec.structs.replace(profile.trace, model=ModelKey("stranger", 1))
    stranger = msgspec.structs.replace(
        profile,
        trace=trace,
        fingerprint=with_traces(profile.fingerprint, [trace]),
    )
    strangers = bench.stand_ins([stranger, *bench.problem.profiles[1:]])
    with pytest.raises(MismatchError):
        bench.device.open(bench.program(), strangers)


def test_load_for_another_number_of_workers_is_refused(bench: Bench) -> None:
    with bench.device.open(bench.program(), bench.plain) as session:
        for workers in (WORKERS - 1, WORKERS + 1):
            load = Load(label="", seed=0, arrivals=(CLOSED_LOOP,) * workers)
            with pytest.raises(UsageError, match=f"{workers} workers, not {WORKERS}"):
                session.run(load, bench.window)


def test_rates_alone_are_measured_once_per_model_and_are_no_slower_than_shared(
    bench: Bench,
) -> None:
    profiles = bench.problem.profiles
    rates = alone_rates(bench.device, [*profiles, profiles[0]], [*bench.plain, bench.plain[0]])
    assert rates[0] == rates[-1]
    log = bench.run(closed_loop(), policy="shared")
    for worker, rate in enumerate(rates[:-1]):
        assert log.requests.worker.count(worker) / bench.seconds <= rate * (1 + bench.tolerance / 2)


@pytest.mark.modelled
def test_rate_alone_beside_idle_workers_is_exactly_that_of_a_session_of_its_own(
    bench: Bench,
) -> None:
    profiles = bench.problem.profiles
    together = alone_rates(bench.device, profiles, bench.plain)
    apart = [
        alone_rates(bench.device, [profile], [source])
        for profile, source in zip(profiles, bench.plain, strict=True)
    ]
    assert [(rate,) for rate in together] == apart


def test_rate_alone_beside_idle_workers_is_about_that_of_a_session_of_its_own(
    bench: Bench,
) -> None:
    profiles = bench.problem.profiles
    together = alone_rates(bench.device, profiles, bench.plain)
    for rate, profile, source in zip(together, profiles, bench.plain, strict=True):
        (apart,) = alone_rates(bench.device, [profile], [source])
        assert rate == pytest.approx(apart, rel=1.5 * bench.tolerance)
