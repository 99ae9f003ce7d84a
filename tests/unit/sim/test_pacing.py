"""The simulator at the speed of the clock: exact in simulated time, never early, all answered."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eclip.core.device import CANCELLED, EXPIRED, Completion, Window
from eclip.core.load import Load
from eclip.core.plan import Plan, Promise
from eclip.core.profile import Profile
from eclip.core.program import lower
from eclip.errors import DeviceError, FullError
from eclip.models.synthetic import synthetic_profile
from eclip.planner.joints import JointRules, give_way
from eclip.sim.device import SimDevice, SimSession
from simulations import CALIBRATIONS, H200, flat_profile, pinned
from waiting import until

US, MS = 1_000, 1_000_000
WORKERS = 3


def profiles_of(seed: int) -> list[Profile]:
    return [
        synthetic_profile(seed + worker, 8 + worker, H200, name=f"m{worker}")
        for worker in range(WORKERS)
    ]


def giving_way(profiles: Sequence[Profile], depth: int = 2) -> Plan:
    """The first is a service; the others may give way to it every other kernel."""
    plan = pinned(profiles, ["0-15"] * len(profiles), H200)
    alone_ns = profiles[0].request_ns[-1]
    promise = Promise(bound_ns=50 * alone_ns, request_ns=alone_ns, some_ns=0, none_ns=0)
    rules = JointRules(kernels=2, depth=depth)
    return give_way(plan, profiles, {0: promise}, dict.fromkeys(range(1, len(profiles)), rules))


@contextmanager
def opened(plan: Plan, profiles: Sequence[Profile]) -> Iterator[SimSession]:
    topology = plan.topology
    device = SimDevice(topology, CALIBRATIONS[topology.name])
    with device.open(lower(plan, [profile.trace for profile in profiles]), profiles) as session:
        yield session


def wait_for(session: SimSession, count: int) -> list[Completion]:
    done: list[Completion] = []

    def ended() -> bool:
        done.extend(session.poll(0.01))
        return len(done) >= count

    assert until(ended, pause_s=0.0)
    return done


def served_as_in_a_run(done: Sequence[Completion], plan: Plan, profiles: Sequence[Profile]) -> None:
    """Each request begins and ends as in a run in which the same requests arrive."""
    zero = min(one.arrival_ns for one in done) - MS
    times = [
        sorted(one.arrival_ns - zero for one in done if one.worker == worker)
        for worker in range(len(profiles))
    ]
    load = Load("again", 0, tuple(np.array(one, dtype=np.int64) for one in times))
    seconds = (max(one.end_ns for one in done) - zero) / 1e9 + 0.001
    with opened(plan, profiles) as session:
        log = session.run(load, Window(seconds=seconds, warmup_seconds=0.0, trace_ms=0.0))
    columns = log.requests
    for worker in range(len(profiles)):
        ran = [
            (start, end)
            for of, start, end in zip(columns.worker, columns.start_ns, columns.end_ns, strict=True)
            if of == worker
        ]
        ours = [(one.start_ns - zero, one.end_ns - zero) for one in done if one.worker == worker]
        assert len(ran) == len(ours)
        # Times count from another zero, and are rounded.
        assert np.all(np.abs(np.array(ran) - np.array(ours)) <= 2)


@pytest.mark.parametrize("joints", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_submitted_requests_end_as_in_a_run_with_their_arrivals(seed: int, joints: bool) -> None:
    profiles = profiles_of(seed)
    plan = giving_way(profiles) if joints else pinned(profiles, ["0-15"] * WORKERS, H200)
    random = np.random.default_rng(seed)
    done: list[Completion] = []
    count = 0
    with opened(plan, profiles) as session:
        session.serve(slots=64)
        free_slots = [list(range(64)) for _ in profiles]
        while count < 300:
            for _ in range(random.integers(1, 8)):
                worker = int(random.integers(WORKERS))
                if free_slots[worker]:
                    session.submit(worker, free_slots[worker].pop())
                    count += 1
            time.sleep(random.exponential(0.0005))
            done += (ended := session.poll())
            for one in ended:
                free_slots[one.worker].append(one.slot)
        done += wait_for(session, count - len(done))
        late = session.lateness_ns
    assert {one.error for one in done} == {None}
    served_as_in_a_run(done, plan, profiles)
    assert late.min() >= 0
    assert len(late) == count


def test_a_request_submitted_while_the_pacer_looks_for_news_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    profiles = profiles_of(0)
    plan = pinned(profiles, ["0-15"] * WORKERS, H200)
    with opened(plan, profiles) as session:
        session.serve(slots=4)
        submitting = threading.Thread(target=session.submit, args=(1, 0))
        read = os.eventfd_read

        def interrupted(descriptor: int) -> int:
            found = read(descriptor)
            if threading.current_thread().name == "eclip-sim" and submitting.ident is None:
                submitting.start()
                submitting.join(0.1)  # or it waits for us
            return found

        monkeypatch.setattr(os, "eventfd_read", interrupted)
        session.submit(0, 0)
        assert len(wait_for(session, 2)) == 2
        submitting.join()


@settings(max_examples=25)
@given(seed=st.integers(0, 1 << 32))
def test_every_ticket_is_completed_exactly_once_and_in_order(seed: int) -> None:
    random = np.random.default_rng(seed)
    profiles = profiles_of(seed % 1000)
    plan = giving_way(profiles, depth=int(random.integers(1, 3)))
    tickets: list[list[int]] = [[] for _ in profiles]
    done: list[Completion] = []
    with opened(plan, profiles) as session:
        session.serve(slots=4, background={2} if random.integers(2) else ())
        for _ in range(150):
            worker, slot = int(random.integers(WORKERS)), int(random.integers(4))
            deadline = time.monotonic_ns() + int(random.integers(-MS, 3 * MS))
            try:
                ticket = session.submit(worker, slot, deadline if random.integers(4) == 0 else None)
                tickets[worker].append(ticket)
            except FullError:
                done += session.poll()
            if random.integers(3) == 0 and tickets[worker]:
                session.cancel(int(random.choice(tickets[worker][-4:])))
            if random.integers(6) == 0:
                time.sleep(random.exponential(0.0005))
        if random.integers(2):
            assert session.drain(timeout_s=60.0)
    done += session.poll()
    for worker, given_out in enumerate(tickets):
        ours = [one for one in done if one.worker == worker]
        assert [one.ticket for one in ours] == given_out
        assert all(one.arrival_ns <= one.start_ns <= one.end_ns for one in ours)
        for before, after in itertools.pairwise(ours):
            assert before.end_ns <= after.end_ns


def long_profiles() -> list[Profile]:
    """Kernels of 20 ms."""
    return [flat_profile(f"m{worker}", [20 * MS] * 10) for worker in range(2)]


def long_plan(profiles: Sequence[Profile], depth: int) -> Plan:
    plan = pinned(profiles, ["0-1", "2-3"])
    alone_ns = profiles[0].request_ns[-1]
    promise = Promise(bound_ns=50 * alone_ns, request_ns=alone_ns, some_ns=0, none_ns=0)
    return give_way(plan, profiles, {0: promise}, {1: JointRules(kernels=1, depth=depth)})


@pytest.mark.parametrize("depth", [1, 2])
def test_a_running_request_stops_at_its_next_joint(depth: int) -> None:
    profiles = long_profiles()
    with opened(long_plan(profiles, depth), profiles) as session:
        session.serve(slots=2)
        ticket = session.submit(1, 0)
        session.submit(1, 1)
        time.sleep(0.005)
        before = time.monotonic_ns()
        session.cancel(ticket)
        first, second = wait_for(session, 2)
    assert first.error == CANCELLED
    assert first.end_ns - before < (depth + 1) * 20 * MS
    assert second.error is None
    assert second.end_ns - second.start_ns >= 200 * MS  # a whole request again


def test_a_request_that_yields_is_given_up_at_once() -> None:
    profiles = long_profiles()
    with opened(long_plan(profiles, 1), profiles) as session:
        session.serve(slots=2)
        session.submit(0, 0)
        time.sleep(0.005)
        now = time.monotonic_ns()
        session.submit(1, 0, now + 30 * MS)
        session.submit(1, 1, now + 31 * MS)
        done = wait_for(session, 3)
    assert [one.error for one in done] == [EXPIRED, EXPIRED, None]
    assert now + 30 * MS <= done[0].end_ns < now + 40 * MS
    assert done[2].end_ns - done[2].start_ns >= 200 * MS


def test_completions_are_given_out_soon_after_their_ends() -> None:
    """Of several tries, since the machine may be busy; on a quiet one every p99 is below 1 ms."""
    profiles = profiles_of(0)
    medians = []
    for _ in range(3):
        with opened(giving_way(profiles), profiles) as session:
            session.serve(slots=8, background={2})
            for _ in range(100):
                session.submit(0, 0)
                wait_for(session, 1)
            medians.append(np.median(session.lateness_ns))
            assert session.lateness_ns.min() >= 0
    assert min(medians) < MS


def test_nothing_is_left_behind_by_many_requests() -> None:
    profiles = profiles_of(0)
    plan = pinned(profiles, ["0-15"] * WORKERS, H200)

    def count() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    before = count()
    with opened(plan, profiles) as session:
        session.serve(slots=64)
        serve_some(session, 1_000)
        inside, memory = count(), resident_bytes()
        serve_some(session, 10_000)
        assert count() == inside
        assert resident_bytes() - memory < 8 << 20
    assert count() == before


def serve_some(session: SimSession, requests: int) -> None:
    for _ in range(requests // 64):
        for slot in range(64):
            session.submit(slot % WORKERS, slot, time.monotonic_ns() + 1000 * MS)
        wait_for(session, 64)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_a_session_that_nobody_closes_ends_its_thread() -> None:
    profiles = profiles_of(0)
    before = threading.active_count()
    device = SimDevice(H200, CALIBRATIONS[H200.name])
    plan = pinned(profiles, ["0-15"] * WORKERS, H200)
    session = device.open(lower(plan, [profile.trace for profile in profiles]), profiles)
    session.serve(background={0})
    assert threading.active_count() == before + 1
    del session
    gc.collect()
    assert threading.active_count() == before


def test_a_simulator_that_fails_answers_what_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    profiles = profiles_of(0)
    with opened(giving_way(profiles), profiles) as session:
        session.serve(slots=2)
        assert session._pacer is not None
        monkeypatch.setattr(session._pacer, "_change", lambda *given: 1 / 0)
        monkeypatch.setattr(threading, "excepthook", lambda given: None)
        session.submit(0, 0)
        (done,) = wait_for(session, 1)
        assert done.error == "division by zero"
        with pytest.raises(DeviceError, match="failed"):
            session.submit(0, 1)
