"""The measures on run logs small enough to compute by hand."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from eclip.artefacts import store
from eclip.artefacts.measures import measure, measure_together
from eclip.artefacts.plan import Plan, unpartitioned
from eclip.artefacts.runlog import KernelRecords, Requests, RunLog, WorkerCounters
from eclip.artefacts.topology import Topology
from eclip.frontends.synthetic import synthetic_profile
from eclip.planning.policies import make_plan
from eclip.planning.problem import Problem

H200 = store.load_builtin("h200", Topology)
PROFILES = tuple(synthetic_profile(seed, 30, H200, name=name) for seed, name in enumerate("ab"))
PLAN = unpartitioned(H200, PROFILES)


def log_of(
    requests: list[tuple[int, int, int]],  # worker, arrival and end in ms
    alone_rps: tuple[float, ...] = (100.0, 50.0),
    duration_ns: int = 1_000_000_000,
    energy_uj: int = 200_000_000,
    plan: Plan = PLAN,
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
    assert [worker.model for worker in found.workers] == ["a:1", "b:1"]


def test_measures_can_be_written_as_json() -> None:
    for log in (log_of([]), log_of([(0, 0, 10)])):
        assert b"NaN" not in msgspec.json.encode(measure(log))
