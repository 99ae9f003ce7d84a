"""Who may run when in the simulator: order on lanes and hardware queues, and time-slicing."""

from __future__ import annotations

import itertools
from collections import defaultdict

import msgspec
import numpy as np
import pytest

from eclip.core.measures import measure
from eclip.core.plan import ALL_WORKERS, Lane
from eclip.core.runlog import RunLog
from eclip.models.synthetic import synthetic_profile
from eclip.planner.alone import alone_rates
from eclip.planner.policies import make_plan
from eclip.sim import device as sim
from simulations import (
    CALIBRATIONS,
    H200,
    MI50,
    arrivals,
    closed,
    flat_profile,
    free,
    pinned,
    problem_of,
    random_bursts,
    random_mix,
    random_plan,
    run,
)

# --- Order, lanes and hardware queues ---------------------------------------------------------


@pytest.mark.parametrize("queues", [1, 2, 3, 32])
@pytest.mark.parametrize("seed", range(4))
def test_kernels_keep_their_order_and_no_two_share_a_hardware_queue(seed: int, queues: int) -> None:
    topology = msgspec.structs.replace(MI50, hardware_queues=queues)
    profiles = random_mix(seed, topology)
    plan = random_plan(seed, profiles, topology)
    log = run(plan, profiles, closed(plan), trace_ms=5.0)
    lane_of = [
        [group.lane for group in part.groups for _ in range(group.kernels)]
        for part in plan.main.assignments
    ]
    by_worker: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    by_queue: dict[int, list[tuple[int, int]]] = defaultdict(list)
    columns = log.kernels
    for worker, position, lane, start, end in columns.rows():
        assert lane == lane_of[worker][position]
        by_worker[worker].append((start, end, position))
        by_queue[lane % queues].append((start, end))
    assert sorted(by_worker) == list(plan.everyone)
    for worker, records in by_worker.items():
        count = plan.workers[worker].kernels
        for (_, end, position), (start, _, following) in itertools.pairwise(records):
            assert start >= end
            assert following == (position + 1) % count
    for spans in by_queue.values():
        assert all(later >= end for (_, end), (later, _) in itertools.pairwise(sorted(spans)))
    assert list(columns.end_ns) == sorted(columns.end_ns)


def test_lane_owned_by_all_serves_kernels_in_the_order_they_became_ready() -> None:
    profiles = [synthetic_profile(seed, 6, MI50, name=f"m{seed}") for seed in range(3)]
    plan = problem_of(profiles, MI50).plan(
        policy="by hand",
        lanes=[Lane(ALL_WORKERS, MI50.full)],
        choices=[np.zeros(6, dtype=np.int64)] * 3,
        whys=[""] * 3,
        why="",
    )
    log = run(plan, profiles, closed(plan))
    ready: dict[int, float] = {}
    served = []
    columns = log.kernels
    for worker, position, start, end in zip(
        columns.worker, columns.position, columns.start_ns, columns.end_ns, strict=True
    ):
        if worker in ready and position > 0:
            served.append((ready[worker], start))
        ready[worker] = end + profiles[worker].gap_ns[position][-1]
    assert len(served) > 100
    assert all(start >= when - 1 for when, start in served)
    for (first, _), (second, _) in itertools.pairwise(served):
        assert first <= second + 1
    assert all(counter.lane_waits for counter in log.counters)
    assert all(counter.false_waits == 0 for counter in log.counters)


def test_lanes_beyond_the_hardware_queues_wait_falsely() -> None:
    def simulate(queues: int) -> RunLog:
        topology = msgspec.structs.replace(MI50, hardware_queues=queues)
        profiles = [flat_profile(f"m{n}", [10_000] * 10, topology) for n in range(4)]
        plan = pinned(profiles, ["0", "1", "2", "3"], topology)
        return run(plan, profiles, closed(plan), free())

    enough, few = simulate(4), simulate(2)
    assert [counter.false_waits for counter in enough.counters] == [0] * 4
    assert enough.warnings == ()
    assert all(counter.false_waits for counter in few.counters)
    assert all(counter.false_wait_ns for counter in few.counters)
    assert any("hardware queues" in warning for warning in few.warnings)
    calm, crowded = (
        float(np.mean(np.subtract(log.requests.end_ns, log.requests.start_ns)))
        for log in (enough, few)
    )
    assert calm == 100_000
    assert crowded > 150_000


def test_false_wait_time_is_the_time_waited() -> None:
    topology = msgspec.structs.replace(MI50, hardware_queues=1)
    profiles = [flat_profile(f"m{n}", [10_000], topology) for n in range(3)]
    plan = pinned(profiles, ["0", "1", "2"], topology)
    log = run(plan, profiles, arrivals([0], [1_000], [2_000]), free())
    assert log.requests.end_ns == (10_000, 20_000, 30_000)
    assert [counter.false_wait_ns for counter in log.counters] == [0, 9_000, 18_000]
    assert [counter.false_waits for counter in log.counters] == [0, 1, 1]


# --- Time-slicing -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_time_sliced_workers_never_progress_together(seed: int) -> None:
    profiles = random_mix(seed, H200)
    plan = make_plan("timeslice", problem_of(profiles, H200))
    calibration = free(H200, turn_ns=30_000, turn_switch_ns=2_000)
    load = random_bursts(seed, len(profiles), 0, 1_000_000)
    log = run(plan, profiles, load, calibration)
    assert sum(log.unfinished) == 0
    columns = log.kernels
    start, end = np.array(columns.start_ns), np.array(columns.end_ns)
    busy = np.array(
        [
            profiles[worker].busy_ns[position][-1]
            for worker, position in zip(columns.worker, columns.position, strict=True)
        ]
    )
    assert (end - start >= busy - 1).all()
    for first in np.unique(start):
        inside = np.cumsum(np.where(start >= first, busy, 0))  # records are in order of completion
        assert (inside <= end - first + 1)[start >= first].all()


def test_time_sliced_workers_get_equal_shares_and_no_more_than_the_device() -> None:
    """Those whose requests take several turns."""
    profiles = [flat_profile(f"m{n}", [100_000] * n, H200) for n in (70, 90, 120)]
    plan = make_plan("timeslice", problem_of(profiles, H200))
    device = sim.SimDevice(H200, CALIBRATIONS["h200"])
    log = run(plan, profiles, closed(plan), seconds=2.0, trace_ms=0.0)
    rates = alone_rates(device, profiles, profiles)
    measures = measure(msgspec.structs.replace(log, alone_rps=rates))
    assert 0.85 < measures.stp <= 1.0
    assert measures.fairness > 0.9


def test_turn_ends_with_a_request_so_that_short_ones_get_little() -> None:
    profiles = [flat_profile("short", [100_000]), flat_profile("long", [100_000] * 90)]
    plan = make_plan("timeslice", problem_of(profiles, MI50))
    log = run(plan, profiles, closed(plan), free(turn_ns=900_000), seconds=2.0, trace_ms=0.0)
    short, long = (worker.rate_rps for worker in measure(log).workers)
    assert short == pytest.approx(1000, rel=0.02)  # one in every 0.1 + 0.9 ms
    assert long == pytest.approx(100, rel=0.02)


def test_time_sliced_workers_do_not_share_hardware_queues() -> None:
    topology = msgspec.structs.replace(MI50, hardware_queues=1)
    profiles = [flat_profile(name, [10_000] * 5, topology, gap_ns=1_000) for name in "abc"]
    plan = make_plan("timeslice", problem_of(profiles, topology))
    log = run(plan, profiles, closed(plan), free(turn_ns=7_000))
    assert log.warnings == ()
    waits = [(counter.false_waits, counter.lane_waits) for counter in log.counters]
    assert waits == [(0, 0)] * 3
    assert set(log.requests.worker) == {0, 1, 2}


def test_handing_over_the_device_costs_time_and_keeping_it_does_not() -> None:
    profiles = [flat_profile(name, [1_000_000] * 2) for name in "ab"]
    plan = make_plan("timeslice", problem_of(profiles, MI50))
    calibration = free(turn_ns=1_000_000, turn_switch_ns=100_000)
    alone = run(plan, profiles, arrivals([0], []), calibration)
    both = run(plan, profiles, arrivals([0], [0]), calibration)
    assert alone.requests.end_ns == (2_100_000,)
    assert max(both.requests.end_ns) == 4 * 1_100_000
