"""What only some devices can do: a tag for each capability, and no capability without a test."""

from __future__ import annotations

import select
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from account import Account, Ended
from benches import (
    TRACE_MS,
    WAYS,
    WORKERS,
    Bench,
    closed_loop,
    with_needs,
)
from eclip.core.credit import NO_VERDICT, fate_of
from eclip.core.device import (
    CANCELLED,
    CLOSED,
    EXPIRED,
    Capability,
    Completion,
    Session,
    Slot,
    Window,
)
from eclip.core.load import CLOSED_LOOP, Load
from eclip.core.plan import P99_GAIN, Lane, Plan, Processes, Promise, Slack
from eclip.core.program import lower
from eclip.core.rules import SPENT
from eclip.core.runlog import RunLog
from eclip.core.topology import Mask
from eclip.cuda.device import CudaDevice
from eclip.errors import EclipError, FullError, MismatchError, UsageError
from eclip.files import store
from eclip.planner.alone import alone_rates
from eclip.planner.joints import JointRules, give_way
from eclip.planner.policies import make_plan, with_shares
from eclip.sim.device import SimDevice
from waiting import until


def test_every_capability_has_a_test() -> None:
    tested = {
        mark.args[0]
        for name, test in globals().items()
        if name.startswith("test_")
        for mark in getattr(test, "pytestmark", [])
        if mark.name == "needs"
    }
    assert tested == set(Capability)
    assert SimDevice.capabilities | CudaDevice.capabilities == set(Capability)


@pytest.mark.parametrize("policy", [with_needs(policy, WAYS, mark="lacks") for policy in WAYS])
def test_plan_is_refused_where_its_capability_is_missing(bench: Bench, policy: str) -> None:
    plan = bench.plan(policy)
    with pytest.raises(EclipError) as refused:
        bench.device.open(bench.program_of(plan), bench.sources_of(plan))
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.lacks(Capability.PROCESSES)
def test_processes_are_not_started_where_there_are_none(bench: Bench) -> None:
    plan = bench.plan("mps")
    with pytest.raises(EclipError) as refused:
        bench.device.start([plan], [bench.sources_of(plan)])
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.lacks(Capability.PRIORITIES)
def test_priorities_that_do_nothing_are_not_kept_quiet(bench: Bench) -> None:
    log = bench.run(closed_loop(), policy="priority")
    assert any("priorities" in warning for warning in log.warnings)


@pytest.mark.needs(Capability.PRIORITIES)
def test_worker_with_the_highest_priority_is_no_worse_off(bench: Bench) -> None:
    """How much it gains is told in tests/gpu/test_compare.py, with kernels that compete."""
    plan = bench.plan("priority")
    first = max(plan.everyone, key=lambda worker: plan.lanes[worker].priority)
    assert plan.lanes[first].priority > 0
    plain = bench.run(closed_loop(), policy="shared")
    log = bench.run_plan(plan, closed_loop())
    assert not any("priorities" in warning for warning in log.warnings)
    assert log.requests.worker.count(first) >= 0.9 * plain.requests.worker.count(first)


@pytest.mark.needs(Capability.TURNS)
def test_turns_of_the_whole_device_gain_nothing(bench: Bench) -> None:
    alone = alone_rates(bench.device, bench.problem.profiles, bench.plain)
    log = bench.run(closed_loop(), policy="timeslice")
    done = [log.requests.worker.count(worker) / bench.seconds for worker in range(WORKERS)]
    assert min(done) > 0
    assert sum(rate / most for rate, most in zip(done, alone, strict=True)) <= 1.1


@pytest.mark.needs(Capability.TURNS)
def test_stored_plan_of_turns_opens_like_any_other(bench: Bench, tmp_path: Path) -> None:
    plan = bench.plan("timeslice")
    store.save(plan, tmp_path / "plan.json")
    kept = store.load(tmp_path / "plan.json", Plan)
    assert kept == plan
    log = bench.run_plan(kept, closed_loop())
    assert log.plan == plan
    assert set(log.requests.worker) == set(range(WORKERS))


@pytest.mark.parametrize("policy", [with_needs(policy, WAYS) for policy in WAYS])
def test_sources_in_another_order_are_refused_however_the_device_is_shared(
    bench: Bench, policy: str
) -> None:
    plan = bench.plan(policy)
    program, sources = bench.program_of(plan), list(bench.sources_of(plan))
    for wrong in (sources[::-1], sources[:-1], [*sources, sources[0]]):
        with pytest.raises(MismatchError, match="worker"):
            bench.device.open(program, wrong)


@pytest.mark.needs(Capability.PROCESSES)
def test_processes_of_several_plans_are_started_at_once(bench: Bench) -> None:
    shared = bench.plan("shared")
    plans = [with_shares(shared, (share,) * WORKERS) for share in (100, 50)]
    started = bench.device.start(plans, [bench.sources_of(plan) for plan in plans])
    try:
        started.wait()
        logs = [session.run(closed_loop(), bench.window) for session in started.sessions]
    finally:
        started.close()
        started.close()
    for plan, log in zip(plans, logs, strict=True):
        assert log.plan == plan
        assert isinstance(log.plan.sharing, Processes)
        assert set(log.requests.worker) == set(range(WORKERS))
    with pytest.raises(EclipError):
        started.sessions[0].run(closed_loop(), bench.window)


@pytest.mark.needs(Capability.TRACE)
def test_kernels_are_recorded_in_the_trace_window_in_order(bench: Bench) -> None:
    log = bench.run(closed_loop())
    columns = log.kernels
    assert columns.window_ns == TRACE_MS * 1e6
    assert len(columns.worker) > 100
    assert list(columns.end_ns) == sorted(columns.end_ns)
    assert columns.end_ns[0] >= 0 and columns.end_ns[-1] <= columns.window_ns
    routes = bench.program().routes[0]
    last = dict.fromkeys(range(WORKERS), (-1, 0))
    for worker, position, lane, start, end in columns.rows():
        before, free = last[worker]
        assert position == (before + 1) % log.plan.workers[worker].kernels
        assert lane == routes[worker].lane[position]
        assert free <= start < end
        last[worker] = (position, end)


@pytest.mark.needs(Capability.ENERGY)
def test_device_without_work_uses_energy_and_completes_nothing(bench: Bench) -> None:
    idle = Load(label="idle", seed=0, arrivals=(np.empty(0, dtype=np.int64),) * WORKERS)
    log = bench.run(idle)
    assert log.requests.worker == log.kernels.worker == ()
    assert {counter.kernels for counter in log.counters} == {0}
    assert 0 < log.energy_uj < bench.run(closed_loop()).energy_uj


@pytest.mark.needs(Capability.CLUSTERS)
def test_kernels_with_clusters_run_on_all_units(bench: Bench) -> None:
    assert bench.clustered is not None, "the bench has no worker with clusters"
    problem, source = bench.clustered
    (profile,) = problem.profiles
    assert max(kernel.cluster for kernel in profile.trace.kernels) > 1
    program = lower(make_plan("shared", problem), [profile.trace])
    load = Load(label="closed loop", seed=0, arrivals=(CLOSED_LOOP,))
    with bench.device.open(program, [source]) as session:
        log = session.run(load, Window(seconds=0.1, warmup_seconds=0.0, trace_ms=0.0))
    assert len(log.requests.worker) > 10


# --- Joints: worker 0 is a service, the others give way to it ---------------------------------


def giving_way(bench: Bench, floor: float = 0.0, **given: Any) -> Plan:
    """Background that may give way every other kernel."""
    alone_ns = bench.problem.profiles[0].request_ns[-1]
    promise = Promise(bound_ns=20 * alone_ns, request_ns=alone_ns, some_ns=0, none_ns=0)
    rules = JointRules(kernels=2, **given)
    plan = give_way(
        bench.plan("shared"),
        bench.problem.profiles,
        {0: promise},
        dict.fromkeys(range(1, WORKERS), rules),
    )
    workers = [
        msgspec.structs.replace(worker, floor=floor if index else 0.0)
        for index, worker in enumerate(plan.workers)
    ]
    return msgspec.structs.replace(plan, workers=tuple(workers))


def bursts_for_the_service() -> Load:
    times = np.repeat(np.arange(0, 18_000_000, 2_000_000), 3)
    return Load(label="bursts", seed=0, arrivals=(times, *[CLOSED_LOOP for _ in range(1, WORKERS)]))


@pytest.mark.needs(Capability.JOINTS)
@pytest.mark.parametrize("depth", [1, 2])
def test_background_yields_to_a_service_and_comes_back(bench: Bench, depth: int) -> None:
    log = bench.run_plan(giving_way(bench, depth=depth), bursts_for_the_service())
    service, *background = log.counters
    last_arrival = max(
        arrival
        for arrival, of in zip(log.requests.arrival_ns, log.requests.worker, strict=True)
        if of == 0
    )
    assert log.offered[0] == log.requests.worker.count(0)
    assert (service.yields, service.moves, service.longest_pause_ns) == (0, 0, 0)
    for worker, counter in enumerate(background, start=1):
        assert counter.yields > 0
        assert counter.moves == 0
        assert counter.longest_pause_ns > 0
        # Most of the run has no service in it.
        assert log.requests.worker.count(worker) > 10
        ends = zip(log.requests.end_ns, log.requests.worker, strict=True)
        assert max(end for end, of in ends if of == worker) > last_arrival


@pytest.mark.needs(Capability.TRACE)
@pytest.mark.needs(Capability.JOINTS)
def test_background_that_moves_is_recorded_where_it_ran(bench: Bench) -> None:
    corner = Mask([0])
    plan = giving_way(bench, yields=None, moves=Slack.PLENTY, lane=corner)
    log = bench.run_plan(plan, bursts_for_the_service())
    seen = set(zip(log.kernels.worker, log.kernels.lane, strict=True))
    for worker in range(1, WORKERS):
        small = plan.lanes.index(Lane(worker, corner))
        assert log.counters[worker].yields == 0
        assert log.counters[worker].moves > 0
        assert {(worker, worker), (worker, small)} <= seen
        # It changes lane and comes back: at most two barriers for a stretch that moved.
        assert 0 < log.counters[worker].barriers <= 2 * log.counters[worker].moves
    assert {lane for worker, lane in seen if worker == 0} == {0}


@pytest.mark.needs(Capability.TRACE)
@pytest.mark.needs(Capability.JOINTS)
def test_kernels_keep_their_order_over_yields_and_moves(bench: Bench) -> None:
    plan = giving_way(bench, yields=Slack.NONE, moves=Slack.PLENTY, lane=Mask([0]))
    log = bench.run_plan(plan, bursts_for_the_service())
    last = dict.fromkeys(range(WORKERS), (-1, 0))
    columns = log.kernels
    for worker, position, start, end in zip(
        columns.worker, columns.position, columns.start_ns, columns.end_ns, strict=True
    ):
        before, free = last[worker]
        assert position == (before + 1) % log.plan.workers[worker].kernels
        assert free <= start < end
        last[worker] = (position, end)


@pytest.mark.needs(Capability.JOINTS)
def test_overloaded_service_leaves_background_its_floor(bench: Bench) -> None:
    alone = alone_rates(bench.device, bench.problem.profiles, bench.plain)
    flood = np.zeros(round(10 * alone[0] * bench.seconds), dtype=np.int64)
    load = Load(label="flood", seed=0, arrivals=(flood, *[CLOSED_LOOP for _ in range(1, WORKERS)]))
    promised = bench.run_plan(giving_way(bench, floor=0.2), load)
    starved = bench.run_plan(giving_way(bench), load)
    for worker in range(1, WORKERS):
        least = 0.2 * alone[worker] * bench.seconds
        assert promised.requests.worker.count(worker) >= (1 - bench.tolerance) * least - 1
        assert starved.requests.worker.count(worker) < 0.5 * least


@pytest.mark.needs(Capability.JOINTS)
def test_accounts_say_of_each_request_what_they_made_of_it_and_begin_anew_with_each_run(
    bench: Bench, tmp_path: Path
) -> None:
    plan = giving_way(bench, yields=Slack.NONE)
    service = plan.workers[0]
    assert service.promise is not None
    promise = msgspec.structs.replace(service.promise, gain=P99_GAIN)
    service = msgspec.structs.replace(service, promise=promise)
    plan = msgspec.structs.replace(plan, workers=(service, *plan.workers[1:]))
    store.save(plan, tmp_path / "plan.json")
    plan = store.load(tmp_path / "plan.json", Plan)
    with bench.device.open(bench.program_of(plan), bench.sources_of(plan)) as session:
        logs = [session.run(bursts_for_the_service(), bench.window) for _ in range(2)]
    for log in logs:
        account = Account(promise)
        columns = log.requests
        rows = list(
            zip(columns.worker, columns.arrival_ns, columns.end_ns, columns.verdict, strict=True)
        )
        served = [Ended(*times) for worker, *times in rows if worker == 0]
        for one in served:
            account.check(one)
        assert len(served) == log.offered[0]
        assert fate_of(served[0].verdict)[1] == SPENT  # it begins strict
        assert {verdict for worker, *_, verdict in rows if worker > 0} == {NO_VERDICT}
    store.save(logs[0], tmp_path / "run.json")
    assert store.load(tmp_path / "run.json", RunLog) == logs[0]


@pytest.mark.needs(Capability.JOINTS)
def test_stored_plan_with_joints_opens_like_any_other(bench: Bench, tmp_path: Path) -> None:
    plan = giving_way(bench, floor=0.1)
    store.save(plan, tmp_path / "plan.json")
    kept = store.load(tmp_path / "plan.json", Plan)
    assert kept == plan
    log = bench.run_plan(kept, bursts_for_the_service())
    store.save(log, tmp_path / "run.json")
    assert store.load(tmp_path / "run.json", RunLog) == log


# --- Submitting -------------------------------------------------------------------------------


@contextmanager
def serving(
    bench: Bench, plan: Plan | None = None, **given: Any
) -> Iterator[tuple[Session, list[Completion]]]:
    """A session that serves, and a list of what it has completed, closing included."""
    plan = plan or bench.plan("shared")
    done: list[Completion] = []
    with bench.device.open(bench.program_of(plan), bench.sources_of(plan)) as session:
        session.serve(**given)
        yield session, done
        done += session.poll()
    done += session.poll()


MANY = 1024  # requests: they take longer than this test's thread is kept waiting


def wait_for(session: Session, done: list[Completion], count: int) -> list[Completion]:
    def ended() -> bool:
        done.extend(session.poll(0.01))
        return len(done) >= count

    assert until(ended, pause_s=0.0)
    return done


@pytest.mark.needs(Capability.SUBMIT)
def test_submitted_requests_are_completed_in_order_and_in_time(bench: Bench) -> None:
    with serving(bench, slots=8) as (session, done):
        before = time.monotonic_ns()
        tickets = [session.submit(worker, slot) for slot in range(8) for worker in range(WORKERS)]
        wait_for(session, done, len(tickets))
        after = time.monotonic_ns()
        assert sorted(one.ticket for one in done) == sorted(tickets)
        assert session.served == (8,) * WORKERS
    for worker in range(WORKERS):
        ours = [one for one in done if one.worker == worker]
        assert [one.slot for one in ours] == list(range(8))
        assert [one.error for one in ours] == [None] * 8
        free_ns = before
        for one in ours:
            assert before <= one.arrival_ns <= one.start_ns < one.end_ns <= after
            assert one.start_ns >= free_ns
            free_ns = one.end_ns


@pytest.mark.needs(Capability.SUBMIT)
def test_wakeup_is_readable_while_there_is_something_to_poll(bench: Bench) -> None:
    with serving(bench) as (session, done):

        def readable(seconds: float) -> bool:
            return bool(select.select([session.wakeup], [], [], seconds)[0])

        assert not readable(0.0)
        session.submit(0, 0)
        assert readable(60.0)
        assert session.drain()
        assert len(wait_for(session, done, 1)) == 1
        assert not readable(0.0)
        assert session.poll(0.02) == []


@pytest.mark.needs(Capability.SUBMIT)
def test_slot_is_taken_until_it_is_polled(bench: Bench) -> None:
    with serving(bench, slots=2) as (session, done):
        session.submit(1, 1)
        assert session.drain(1, 60.0)
        with pytest.raises(FullError) as refused:
            session.submit(1, 1)
        assert len(str(refused.value).splitlines()) == 1
        session.submit(0, 1)
        wait_for(session, done, 2)
        session.submit(1, 1)


@pytest.mark.needs(Capability.SUBMIT)
def test_requests_given_up_in_the_queue_are_not_run(bench: Bench) -> None:
    with serving(bench, slots=MANY) as (session, done):
        tickets = [session.submit(0, slot) for slot in range(MANY - 4)]
        late = [session.submit(0, slot, time.monotonic_ns()) for slot in range(MANY - 4, MANY)]
        for ticket in reversed(tickets[1::2]):
            session.cancel(ticket)
        wait_for(session, done, MANY)
        whole = sum(one.error is None for one in done)
        assert session.served[0] == whole
    assert [one.ticket for one in done] == tickets + late
    errors = [one.error for one in done]
    assert errors[-4:] == [EXPIRED] * 4
    assert set(errors[:-4:2]) == {None}
    assert set(errors[1:-4:2]) <= {None, CANCELLED}
    assert CANCELLED in errors


@pytest.mark.needs(Capability.SUBMIT)
@pytest.mark.needs(Capability.JOINTS)
@pytest.mark.parametrize("error", [CANCELLED, EXPIRED])
def test_running_request_stops_at_a_joint(bench: Bench, error: str) -> None:
    """A worker that yields to a service without end."""
    with serving(bench, giving_way(bench), slots=MANY) as (session, done):
        service = [session.submit(0, slot) for slot in range(MANY)]
        deadline = time.monotonic_ns() + 2_000_000
        ticket = session.submit(1, 0, deadline if error == EXPIRED else None)
        if error == CANCELLED:
            session.cancel(ticket)
        wait_for(session, done, len(service) + 1)
    (ended,) = (one for one in done if one.ticket == ticket)
    assert ended.error == error
    assert [one.error for one in done if one.worker == 0] == [None] * MANY


@pytest.mark.needs(Capability.SUBMIT)
def test_background_runs_beside_services(bench: Bench) -> None:
    with serving(bench, background={2}) as (session, done):
        assert until(lambda: session.served[2] > 3)
        session.submit(0, 0)
        session.submit(2, 0)
        wait_for(session, done, 2)
        before = session.served[2]
        assert until(lambda: session.served[2] > before + 3)
    assert [one.error for one in done] == [None, None]
    assert sorted(one.worker for one in done) == [0, 2]


@pytest.mark.needs(Capability.SUBMIT)
def test_session_closed_while_it_serves_answers_everything(bench: Bench) -> None:
    with serving(bench, slots=MANY) as (session, done):
        tickets = [session.submit(0, slot) for slot in range(MANY)]
    assert [one.ticket for one in done] == tickets
    assert {one.error for one in done} <= {None, CLOSED}
    assert done[-1].error == CLOSED
    with pytest.raises(EclipError, match="closed"):
        session.submit(0, 0)
    session.close()


@pytest.mark.needs(Capability.SUBMIT)
def test_session_runs_or_serves(bench: Bench) -> None:
    plan = bench.plan("shared")
    with bench.device.open(bench.program_of(plan), bench.sources_of(plan)) as session:
        with pytest.raises(UsageError, match="serve"):
            session.submit(0, 0)
        for wrong in ({"slots": 0}, {"slots": [[Slot()]]}, {"background": {WORKERS}}):
            with pytest.raises(UsageError):
                session.serve(**wrong)
        session.run(closed_loop(), bench.window)
        session.serve()
        with pytest.raises(UsageError, match="serves"):
            session.run(closed_loop(), bench.window)
        with pytest.raises(UsageError, match="serves already"):
            session.serve()
