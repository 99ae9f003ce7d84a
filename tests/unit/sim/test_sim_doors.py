"""Rings of several submitters before the simulator's pacer, and functions beside them."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from eclip.core.program import lower
from eclip.core.requests import (
    END,
    FOREVER_NS,
    HAS_EXPIRED,
    HAS_FAILED,
    OUTCOME,
    PROGRAM,
    SLOT,
    START,
    WAS_CANCELLED,
    WITH_RESULT,
    LoopGroup,
    Ring,
)
from eclip.server.link import Signal
from eclip.sim.device import SimDevice, SimSession
from simulations import CALIBRATIONS, flat_profile, pinned
from waiting import until

US, MS = 1_000, 1_000_000
ROWS = 4


@contextmanager
def served(groups: Sequence[LoopGroup]) -> Iterator[SimSession]:
    """Workers of two buckets: 100 and 250 µs."""
    workers = sum(len(group.workers) for group in groups)
    profiles = [
        flat_profile(f"m{worker}", [(50 + 75 * (worker % 2)) * US] * 2) for worker in range(workers)
    ]
    plan = pinned(profiles, [str(worker % 4) for worker in range(workers)])
    device = SimDevice(plan.topology, CALIBRATIONS[plan.topology.name])
    program = lower(plan, [profile.trace for profile in profiles])
    with Signal() as signal, device.open(program, profiles) as session:
        session.serve(groups=groups)
        session.wakeup_of_fronts = signal.descriptor  # type: ignore[attr-defined]
        yield session


def open_door(session: SimSession, groups: int, compute: object = None) -> tuple[list[Ring], int]:
    rings = [Ring(ROWS) for _ in range(groups)]
    wakeup = session.wakeup_of_fronts  # type: ignore[attr-defined]
    return rings, session.desk.doors.open(rings, wakeup, compute)  # type: ignore[arg-type]


GROUPS = [LoopGroup((0, 1), 1), LoopGroup((2, 3), 2), LoopGroup((4, 5), 2)]


@settings(max_examples=15)
@given(seed=st.integers(0, 1 << 32))
def test_two_fronts_and_three_replicas_lose_and_double_nothing(seed: int) -> None:
    random = np.random.default_rng(seed)
    with served(GROUPS) as session:
        doors = session.desk.doors
        fronts = [open_door(session, 3) for _ in range(2)]
        seen: list[list[list[int]]] = [[], [], []]  # rows that were answered, by group

        def collect(rings: Sequence[Ring]) -> None:
            for group, ring in enumerate(rings):
                while taken[id(ring)] < ring.answered:
                    seen[group].append([*ring.row(taken[id(ring)])])
                    taken[id(ring)] += 1

        taken = {id(ring): 0 for rings, _ in fronts for ring in rings}
        for _ in range(100):
            which, group = int(random.integers(2)), int(random.integers(3))
            rings, place = fronts[which]
            collect(rings)
            ring = rings[group]
            if ring.submitted - taken[id(ring)] < ROWS:
                late = time.monotonic_ns() + int(random.integers(-MS, 2 * MS))
                expires = late if random.integers(4) == 0 else FOREVER_NS
                ring.put(time.monotonic_ns(), expires, 0, int(random.integers(2)))
            if random.integers(5) == 0 and (first := ring.answered) < ring.submitted:
                ring.give_up(int(random.integers(first, ring.submitted)))
            doors.ring(group)
            if random.integers(6) == 0:
                time.sleep(random.exponential(0.0005))
            if random.integers(40) == 0:
                doors.shut(place)
                assert until(lambda place=place: doors.is_left(place), pause_s=0.001)  # type: ignore[misc]
                fronts[which] = open_door(session, 3)
                taken |= {id(ring): 0 for ring in fronts[which][0]}
        everything = [ring for rings, _ in fronts for ring in rings]
        assert until(lambda: not any(ring.open for ring in everything), pause_s=0.001)
        for rings, _ in fronts:
            collect(rings)
        assert all(taken[id(ring)] == ring.submitted for ring in everything)
        ran = 0
        for rows in seen:
            assert {row[OUTCOME] for row in rows} <= {WITH_RESULT, WAS_CANCELLED, HAS_EXPIRED}
            begun = sorted((row[START], row[END]) for row in rows if row[START] < row[END])
            for before, after in itertools.pairwise(begun):
                assert before[1] <= after[0]  # of a group one runs at a time
            for row in rows:
                if row[OUTCOME] == WITH_RESULT:
                    assert row[END] - row[START] >= (250 if row[PROGRAM] else 100) * US
                    ran += 1
        assert sum(session.served) >= ran
        assert session.desk.doors.accounts.busy_ns(0) > 0 or not ran


def test_an_answer_waits_for_its_function_and_those_behind_it_wait_too() -> None:
    may_end = threading.Event()
    with ThreadPoolExecutor(2) as pool, served(GROUPS[:1]) as session:

        def compute(group: int, row: Sequence[int]) -> Future[bool]:
            work = pool.submit(may_end.wait) if row[SLOT] == 1 else pool.submit(lambda: True)
            work.add_done_callback(lambda done: session.desk.doors.ring(group))
            return work

        (ring,), _ = open_door(session, 1, compute)
        for slot in (0, 1, 2):
            ring.put(time.monotonic_ns(), FOREVER_NS, slot)
        session.desk.doors.ring(0)
        assert until(lambda: ring.answered == 1 and session.served[0] == 3, pause_s=0.001)
        time.sleep(0.01)
        assert ring.answered == 1
        may_end.set()
        assert until(lambda: not ring.open, pause_s=0.001)
        held, behind = ring.row(1), ring.row(2)
        assert held[END] - held[START] > 10 * MS
        assert behind[OUTCOME] == WITH_RESULT


def test_a_function_that_fails_ends_its_row_and_no_other() -> None:
    with ThreadPoolExecutor(1) as pool, served(GROUPS[:1]) as session:

        def compute(group: int, row: Sequence[int]) -> Future[float]:
            work = pool.submit(lambda: 1 / row[SLOT])
            work.add_done_callback(lambda done: session.desk.doors.ring(group))
            return work

        (ring,), _ = open_door(session, 1, compute)
        for slot in (1, 0, 1):
            ring.put(time.monotonic_ns(), FOREVER_NS, slot)
        session.desk.doors.ring(0)
        assert until(lambda: not ring.open, pause_s=0.001)
    outcomes = [ring.row(number)[OUTCOME] for number in range(3)]
    assert outcomes == [WITH_RESULT, HAS_FAILED, WITH_RESULT]


def test_a_row_that_names_what_is_not_there_fails_alone() -> None:
    with served(GROUPS[:1]) as session:
        (ring,), _ = open_door(session, 1)
        for program in (2, 1, -1):
            ring.put(time.monotonic_ns(), FOREVER_NS, 0, program)
        session.desk.doors.ring(0)
        assert until(lambda: not ring.open, pause_s=0.001)
    outcomes = [ring.row(number)[OUTCOME] for number in range(3)]
    assert outcomes == [HAS_FAILED, WITH_RESULT, HAS_FAILED]


def test_a_submitter_that_was_sent_away_and_lives_on_disturbs_nobody() -> None:
    with served(GROUPS[:1]) as session:
        doors = session.desk.doors
        (old,), place = open_door(session, 1)
        old.put(time.monotonic_ns(), FOREVER_NS, 0)
        doors.shut(place)
        assert until(lambda: doors.is_left(place), pause_s=0.001)
        (new,), again = open_door(session, 1)
        assert again == place
        for number in range(10):
            old.put(time.monotonic_ns(), FOREVER_NS, 0, 1)
            new.put(time.monotonic_ns(), FOREVER_NS, 0)
            doors.ring(0)
            assert until(lambda number=number: new.answered == number + 1, pause_s=0.001)  # type: ignore[misc]
        assert old.answered <= 1
        assert [new.row(number)[OUTCOME] for number in range(6, 10)] == [WITH_RESULT] * 4
