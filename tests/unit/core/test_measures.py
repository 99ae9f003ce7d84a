"""The measures on run logs small enough to compute by hand."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

import logs
from eclip.core.load import CLOSED_LOOP, Load
from eclip.core.measures import busy_share, falls_behind, measure, measure_together
from eclip.core.plan import Plan, Promise, unpartitioned
from eclip.core.runlog import KernelRecords, Requests, RunLog, WorkerCounters
from eclip.core.topology import Topology
from eclip.errors import UsageError
from eclip.files import store
from eclip.gpu.recording import NO_KERNELS, lags_ns, make_log
from eclip.gpu.steps import Ints
from eclip.models.synthetic import synthetic_profile
from eclip.planner.policies import make_plan
from eclip.planner.problem import Problem
from served import served_rows

H200 = store.load_builtin("h200", Topology)
PROFILES = tuple(synthetic_profile(seed, 30, H200, name=name) for seed, name in enumerate("ab"))
PLAN = unpartitioned(H200, PROFILES)


def log_of(
    requests: list[tuple[int, int, int]],  # worker, arrival and end in ms
    alone_rps: tuple[float, ...] = (100.0, 50.0),
    duration_ns: int = 1_000_000_000,
    energy_uj: int = 200_000_000,
    plan: Plan = PLAN,
    offered: tuple[int | None, ...] = (None, None),
) -> RunLog:
    ordered = sorted(requests, key=lambda request: request[2])
    counters = WorkerCounters(kernels=0, barriers=0, lane_waits=0, false_waits=0, false_wait_ns=0)
    return RunLog(
        plan=plan,
        device="by hand",
        modelled=True,
        load="closed loop",
        seed=0,
        duration_ns=duration_ns,
        energy_uj=energy_uj,
        requests=Requests(
            worker=tuple(worker for worker, _, _ in ordered),
            arrival_ns=tuple(arrival * 1_000_000 for _, arrival, _ in ordered),
            start_ns=tuple(end * 1_000_000 - 1 for _, _, end in ordered),
            end_ns=tuple(end * 1_000_000 for _, _, end in ordered),
        ),
        kernels=KernelRecords(window_ns=0, worker=(), position=(), lane=(), start_ns=(), end_ns=()),
        counters=(counters,) * 2,
        unfinished=(0, 0),
        offered=offered,
        lag_ns=(0, 0),
        alone_rps=alone_rps,
    )


def test_stp_is_the_sum_and_fairness_the_quotient_of_the_ratios() -> None:
    log = log_of([(0, 0, 10)] * 60 + [(1, 0, 20)] * 20)
    found = measure(log)
    assert [worker.rate_rps for worker in found.workers] == [60, 20]
    assert [worker.ratio for worker in found.workers] == pytest.approx([0.6, 0.4])
    assert found.stp == pytest.approx(1.0)
    assert found.fairness == pytest.approx(0.4 / 0.6)


def test_rates_are_per_second_of_the_run() -> None:
    found = measure(log_of([(0, 0, 10)] * 60 + [(1, 0, 20)] * 20, duration_ns=2_000_000_000))
    assert found.seconds == 2
    assert [worker.rate_rps for worker in found.workers] == [30, 10]
    assert found.stp == pytest.approx(0.5)
    assert found.power_w == 100
    assert found.efficiency_per_kj == pytest.approx(1000 * 0.5 * 2 / 200)


def test_latency_runs_from_arrival_to_completion() -> None:
    latencies = [1, 2, 3, 4, 100]
    found = measure(log_of([(0, 500 - latency, 500) for latency in latencies]))
    assert found.workers[0].p50_ms == 3
    assert found.workers[0].p95_ms == pytest.approx(np.percentile(latencies, 95))
    assert found.workers[0].p99_ms == pytest.approx(np.percentile(latencies, 99))
    assert found.workers[0].requests == 5


def test_requests_that_arrived_in_the_warm_up_count_whole() -> None:
    found = measure(log_of([(0, -30, 10)]))
    assert found.workers[0].p50_ms == 40


def test_busy_is_the_part_of_the_run_with_a_request_begun_and_not_ended() -> None:
    log = log_of([(0, 0, 10), (0, 0, 20), (0, 30, 40), (0, 95, 105), (1, 0, 50)])
    starts = (-5, 8, 30, 95, 0)  # ms: before the run, before the last one ended, then apart
    requests = msgspec.structs.replace(
        log.requests,
        worker=(0, 0, 0, 0, 1),
        arrival_ns=(-10_000_000,) * 4 + (0,),
        start_ns=tuple(start * 1_000_000 for start in starts),
        end_ns=tuple(end * 1_000_000 for end in (10, 20, 40, 105, 50)),
    )
    log = msgspec.structs.replace(log, requests=requests, duration_ns=200_000_000)
    assert busy_share([log], 0) == pytest.approx((20 + 10 + 10) / 200)
    assert busy_share([log], 1) == pytest.approx(50 / 200)
    assert busy_share([log, log_of([], duration_ns=200_000_000)], 1) == pytest.approx(50 / 400)
    assert [worker.busy for worker in measure(log).workers] == pytest.approx([0.2, 0.25])


def test_energy_is_per_request_and_efficiency_stp_seconds_per_kilojoule() -> None:
    found = measure(log_of([(0, 0, 10)] * 60 + [(1, 0, 20)] * 20))
    assert found.energy_j == found.power_w == 200
    assert found.joules_per_request == pytest.approx(200 / 80)
    assert found.efficiency_per_kj == pytest.approx(1000 * 1.0 * 1.0 / 200)


def test_run_without_requests_has_no_percentiles_and_no_fairness() -> None:
    found = measure(log_of([]))
    assert found.stp == found.fairness == found.efficiency_per_kj == 0
    assert found.joules_per_request is None
    for worker in found.workers:
        assert (worker.requests, worker.rate_rps, worker.ratio) == (0, 0, 0)
        assert worker.p50_ms is worker.p95_ms is worker.p99_ms is None


def test_starved_worker_makes_a_run_unfair() -> None:
    found = measure(log_of([(0, 0, 10)] * 90))
    assert found.fairness == 0
    assert found.stp == pytest.approx(0.9)
    assert found.workers[1].p99_ms is None


def test_run_without_energy_claims_no_efficiency() -> None:
    assert measure(log_of([(0, 0, 10)], energy_uj=0)).efficiency_per_kj == 0


def test_a_run_without_energy_does_not_make_the_others_cheaper() -> None:
    requests = [(0, 0, 10)] * 60 + [(1, 0, 20)] * 20
    logs = [log_of(requests, energy_uj=joules * 1_000_000) for joules in (0, 300, 500)]
    found = measure_together(logs)
    assert found.power_w == pytest.approx(400)
    assert found.energy_j == pytest.approx(400 * 3)
    assert found.joules_per_request == pytest.approx(400 * 3 / 240)
    assert found.efficiency_per_kj == pytest.approx(1000 * found.stp / 400)


def test_switches_are_those_of_the_plan_and_sum_up_over_the_workers() -> None:
    plan = make_plan("kernel", Problem(PLAN.mix, H200, PROFILES))
    found = measure(log_of([(0, 0, 10)], plan=plan))
    switches = [len(part.groups) - 1 for part in plan.main.assignments]
    assert min(switches) > 5
    assert [worker.switches_per_request for worker in found.workers] == switches
    assert found.switches_per_request == sum(switches)
    assert (found.policy, found.device, found.modelled) == ("kernel", "by hand", True)
    assert [worker.name for worker in found.workers] == ["a", "b"]
    assert [str(worker.model) for worker in found.workers] == ["a:1", "b:1"]


def test_measures_can_be_written_as_json() -> None:
    for log in (log_of([]), log_of([(0, 0, 10)])):
        assert b"NaN" not in msgspec.json.encode(measure(log))


# --- Promises that a run does not keep --------------------------------------------------------


def test_worker_that_is_offered_more_than_it_serves_is_called_overloaded() -> None:
    requests = [(0, 0, 10)] * 60 + [(1, 0, 20)] * 20
    found = measure(log_of(requests, offered=(100, 21)))
    first, second = found.workers
    assert (first.offered_rps, second.offered_rps) == (100, 21)
    assert (first.overloaded, second.overloaded) == (True, False)
    assert found.missed == (
        "a is overloaded: 100 requests/s are offered and 60 served, so its queue grows",
    )


def test_worker_that_serves_nothing_of_what_is_offered_is_overloaded() -> None:
    assert measure(log_of([(0, 0, 10)], offered=(1, 3))).workers[1].overloaded


def test_few_requests_under_way_at_the_end_of_a_run_are_no_overload() -> None:
    """Four of ten are missing, which a run as short as that does not tell from chance."""
    assert measure(log_of([(0, 0, 10)] * 6, offered=(10, None))).missed == ()


def test_busy_workers_are_never_overloaded() -> None:
    found = measure(log_of([(0, 0, 10)] * 60))
    assert [worker.offered_rps for worker in found.workers] == [None, None]
    assert found.missed == ()


def test_offered_rate_of_several_runs_is_over_all_of_them() -> None:
    logs = [log_of([(0, 0, 10)] * 60, offered=(count, None)) for count in (60, 80)]
    assert [one.offered_rps for one in measure_together(logs).workers] == [70, None]


def test_p99_above_the_bound_of_its_plan_is_missed_in_words() -> None:
    promises = [
        Promise(bound_ns=bound * 1_000_000, request_ns=1_000_000, some_ns=0, none_ns=0)
        for bound in (9, 20)
    ]
    workers = zip(PLAN.workers, promises, strict=True)
    bounded = msgspec.structs.replace(
        PLAN,
        workers=tuple(msgspec.structs.replace(one, promise=promise) for one, promise in workers),
    )
    kept = measure(log_of([(0, 0, 8), (1, 0, 20)], plan=bounded))
    assert kept.missed == ()
    late = measure(log_of([(0, 0, 10)], plan=bounded))
    assert late.missed == (
        "a misses its bound: p99 10.00 ms, at most 9.00 ms wanted",
        "b misses its bound: p99 none completed, at most 20.00 ms wanted",
    )


def test_less_than_a_floor_is_missed_in_words() -> None:
    floors = zip(PLAN.workers, (0.0, 0.5), strict=True)
    promised = msgspec.structs.replace(
        PLAN, workers=tuple(msgspec.structs.replace(one, floor=floor) for one, floor in floors)
    )
    requests = [(0, 0, 10)] + [(1, 0, 20)] * 24  # of the 25 that half of 50/s are, one under way
    assert measure(log_of(requests, plan=promised)).missed == ()
    assert measure(log_of(requests[:-1], plan=promised)).missed == (
        "b is below its floor: 46.0% of its rate alone, at least 50.0% wanted",
    )
    assert measure(log_of(requests[:-1], plan=promised, offered=(None, 23))).missed == ()
    assert "b is below its floor: 0.0%" in measure(log_of([], plan=promised)).missed[0]


# --- The load generator -----------------------------------------------------------------------


def served(*rows: tuple[int, int, int]) -> Ints:
    """Arrival, start and end of a worker's requests, in microseconds."""
    return served_rows([[1000 * time for time in row] for row in rows])


def test_lag_is_what_an_idle_worker_took_to_notice_an_arrival() -> None:
    """Waiting behind the request before is the policy's, not the generator's."""
    queued = served((0, 0, 500), (10, 500, 1000))
    noticed_late = served((0, 0, 500), (800, 3000, 3500), (3100, 3600, 4000))
    assert lags_ns([queued, noticed_late, served()]) == (0, 2_200_000, 0)


def test_log_of_a_late_generator_says_who_had_to_wait() -> None:
    due = np.array([0, 800_000], dtype=np.int64)
    load = Load(label="by hand", seed=0, arrivals=(due, CLOSED_LOOP))
    rows = [served((0, 0, 500), (800, 3000, 3500)), served((0, 0, 900), (900, 900, 1800))]
    log = make_log(PLAN, "a GPU", load, rows, [30, 30], NO_KERNELS, 10_000_000, 100.0, [])
    assert log.lag_ns == (2_200_000, 0)
    assert log.lagged
    (warning,) = log.warnings
    assert "the load generator lagged (a 2.2 ms)" in warning
    assert log.offered == (2, None)
    prompt = [served((0, 0, 500), (800, 900, 1500)), rows[1]]
    calm = make_log(PLAN, "a GPU", load, prompt, [30, 30], NO_KERNELS, 10_000_000, 100.0, [])
    assert (calm.lagged, calm.warnings) == (False, ())


def test_log_without_rates_alone_is_refused_in_words() -> None:
    log = msgspec.structs.replace(logs.make_log("shared"), alone_rps=())
    with pytest.raises(UsageError, match="no rates alone"):
        measure(log)


def test_worker_that_is_rarely_asked_is_not_called_overloaded() -> None:
    """In a short trial it may have had no request at all."""
    assert not falls_behind(offered_rps=1.0, served_rps=0.0, seconds=0.5)
    assert not falls_behind(offered_rps=300.0, served_rps=290.0, seconds=100.0)
    assert falls_behind(offered_rps=300.0, served_rps=200.0, seconds=0.5)
