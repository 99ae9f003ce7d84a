"""Rings of several submitters before driving loops on the stand-in driver."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eclip.core.requests import (
    END,
    FOREVER_NS,
    HAS_EXPIRED,
    HAS_FAILED,
    MOST_DOORS,
    OUTCOME,
    PROGRAM,
    SLOT,
    START,
    WAS_CANCELLED,
    WITH_RESULT,
    LoopGroup,
    Ring,
)
from eclip.errors import DeviceError, UsageError
from eclip.server.link import Signal, allocate, map_rings, rings_bytes
from standin_desk import StandinDesk
from standin_gpu import BEGIN, WHO, StandinGpu, Worker, make_worker
from waiting import until

MS = 1_000_000
ROWS = 4  # of a ring
GROUPS = 3
BUCKETS = 2  # programs of a group


def workers_of(gpu: StandinGpu, groups: int, micros: int = 100, stretches: int = 2) -> list[Worker]:
    gpu.behave(0, lazy=False)
    return [
        make_worker(
            gpu,
            number,
            [[[(0, [micros * (1 + number % BUCKETS)])]] * stretches],
            streams=[gpu.stream()],
        )
        for number in range(BUCKETS * groups)
    ]


@dataclass
class Submitter:
    """Another process, as far as loops can tell: its rings are in memory of its own."""

    desk: StandinDesk
    groups: int
    place: int = -1
    rings: list[Ring] = field(default_factory=list)
    signal: Signal = field(default_factory=Signal)
    answered: list[list[list[int]]] = field(default_factory=list)  # rows, by group

    def sit_down(self) -> None:
        rows = [ROWS] * self.groups
        memory = allocate("eclip-test", rings_bytes(rows))
        self.rings = map_rings(os.dup(memory), rows)
        self.answered = [[] for _ in rows]
        theirs = map_rings(memory, rows)
        self.place = self.desk.desk.doors.open(theirs, self.signal.descriptor)

    def submit(self, group: int, program: int = 0, expires_ns: int = FOREVER_NS) -> bool:
        """False: its ring is full."""
        ring = self.rings[group]
        if ring.submitted - len(self.answered[group]) >= ROWS:
            return False
        slot = ring.submitted % ROWS
        ring.put(time.monotonic_ns(), expires_ns, slot, program)
        self.desk.server.ring(group)
        return True

    def collect(self) -> None:
        for ring, rows in zip(self.rings, self.answered, strict=True):
            while len(rows) < ring.answered:
                rows.append(list(ring.row(len(rows))))

    @property
    def idle(self) -> bool:
        ended = not any(ring.open for ring in self.rings)
        self.collect()  # second: of those that had ended, none is missed
        return ended

    def leave(self) -> None:
        doors = self.desk.desk.doors
        doors.shut(self.place)
        assert until(lambda: doors.is_left(self.place), pause_s=0.001)


@contextmanager
def served(
    gpu: StandinGpu, groups: int, submitters: int, **given: int
) -> Iterator[list[Submitter]]:
    workers = workers_of(gpu, groups, **given)
    of_groups = [
        LoopGroup(tuple(range(BUCKETS * one, BUCKETS * (one + 1))), one + 1)
        for one in range(groups)
    ]
    desk = StandinDesk(workers, groups=of_groups)
    made = [Submitter(desk, groups) for _ in range(submitters)]
    for one in made:
        one.sit_down()
    desk.start()
    try:
        yield made
    finally:
        desk.close()
        for one in made:
            one.signal.close()


@settings(max_examples=25)
@given(seed=st.integers(0, 1 << 32))
def test_two_fronts_and_three_replicas_lose_and_double_nothing(gpu: StandinGpu, seed: int) -> None:
    """Random submits, cancels, expiries, pauses, and sittings that end: every row is answered
    once, in order, by the program that it names; of a group one program runs at a time."""
    random = np.random.default_rng(seed)
    with served(gpu, GROUPS, 2) as fronts:
        for _ in range(120):
            front, group = fronts[int(random.integers(2))], int(random.integers(GROUPS))
            late = time.monotonic_ns() + int(random.integers(-MS, 2 * MS))
            front.collect()
            ring = front.rings[group]
            front.submit(
                group,
                int(random.integers(BUCKETS)),
                late if random.integers(4) == 0 else FOREVER_NS,
            )
            if random.integers(5) == 0 and (first := ring.answered) < ring.submitted:
                ring.give_up(int(random.integers(first, ring.submitted)))
            if random.integers(6) == 0:
                time.sleep(random.exponential(0.0005))
            if random.integers(40) == 0:
                front.leave()
                front.sit_down()
        assert until(lambda: fronts[0].idle and fronts[1].idle, pause_s=0.001)
        spans: list[list[tuple[int, int]]] = [[] for _ in range(GROUPS)]
        for front in fronts:
            for group, (ring, rows) in enumerate(zip(front.rings, front.answered, strict=True)):
                assert ring.answered == ring.submitted == len(rows)
                assert {row[OUTCOME] for row in rows} <= {WITH_RESULT, WAS_CANCELLED, HAS_EXPIRED}
                for before, after in itertools.pairwise(rows):
                    assert before[END] <= after[START]
                spans[group] += [(row[START], row[END]) for row in rows]
        for of_group in spans:
            for before_, after_ in itertools.pairwise(sorted(of_group)):
                assert before_[1] <= after_[0]
        served_ = fronts[0].desk.desk.served
        assert sum(served_) >= sum(
            row[OUTCOME] == WITH_RESULT
            for front in fronts
            for rows in front.answered
            for row in rows
        )


def test_a_row_is_run_by_the_program_that_it_names(gpu: StandinGpu) -> None:
    with served(gpu, 1, 1) as (front,):
        log = gpu.watch()
        for program in (1, 0, 1):
            front.submit(0, program)
        assert until(lambda: front.idle, pause_s=0.001)
    ran = log.of(2)
    who = ran[np.argsort(ran[:, BEGIN]), WHO] // 1_000
    assert who.tolist() == [1, 1, 0, 0, 1, 1]
    assert [row[PROGRAM] for row in front.answered[0]] == [1, 0, 1]


@pytest.mark.parametrize(
    ("word", "value"), [(PROGRAM, BUCKETS), (PROGRAM, -1), (SLOT, 99), (SLOT, -2)]
)
def test_a_row_that_names_what_is_not_there_fails_alone(
    gpu: StandinGpu, word: int, value: int
) -> None:
    with served(gpu, 1, 2) as (wrong, right):
        wrong.rings[0].row(0)[word] = value
        program, slot = (value, 0) if word == PROGRAM else (0, value)
        wrong.rings[0].put(time.monotonic_ns(), FOREVER_NS, slot, program)
        right.submit(0)
        assert until(lambda: wrong.idle and right.idle, pause_s=0.001)
    assert wrong.answered[0][0][OUTCOME] == HAS_FAILED
    assert right.answered[0][0][OUTCOME] == WITH_RESULT


def test_a_submitter_that_was_sent_away_and_lives_on_disturbs_nobody(gpu: StandinGpu) -> None:
    """It goes on writing and ringing; the next sitting at its place is served as if alone."""
    with served(gpu, 2, 1) as (gone,):
        gone.submit(0)
        assert until(lambda: gone.idle, pause_s=0.001)
        old, place = gone.rings, gone.place
        gone.leave()
        gone.sit_down()
        assert gone.place == place
        for _ in range(3 * ROWS):
            for ring in old:
                ring.put(time.monotonic_ns(), FOREVER_NS, 0, 1)
            gone.desk.server.ring(0)
            assert gone.submit(1)
            assert until(lambda: gone.idle, pause_s=0.001)
        assert [row[OUTCOME] for row in gone.answered[1]] == [WITH_RESULT] * (3 * ROWS)
        assert [ring.answered for ring in old] == [1, 0]


def test_what_runs_for_a_submitter_that_leaves_stops_at_its_next_joint(gpu: StandinGpu) -> None:
    with served(gpu, 1, 2, micros=5_000, stretches=100) as (leaving, other):
        log = gpu.watch()
        leaving.submit(0)
        leaving.submit(0)
        assert until(lambda: len(log.of(1)) > 2, pause_s=0.001)
        leaving.leave()
        assert len(log.of(1)) < 50
        other.submit(0, expires_ns=time.monotonic_ns() + 20 * MS)
        assert until(lambda: other.idle, pause_s=0.001)
    assert leaving.rings[0].answered == 0  # nobody is told
    assert other.answered[0][0][OUTCOME] == HAS_EXPIRED


def test_a_session_has_room_for_so_many_submitters(gpu: StandinGpu) -> None:
    with served(gpu, 1, MOST_DOORS - 1) as submitters:
        with pytest.raises(DeviceError, match="has room for"):
            Submitter(submitters[0].desk, 1).sit_down()
        submitters[5].leave()
        submitters[5].sit_down()
        submitters[5].submit(0)
        assert until(lambda: submitters[5].idle, pause_s=0.001)


def test_groups_have_every_worker_once(gpu: StandinGpu) -> None:
    workers = workers_of(gpu, 1)
    for groups in ([LoopGroup((0,), 1)], [LoopGroup((0, 1), 1), LoopGroup((1,), 2)]):
        with pytest.raises(UsageError, match="each worker belongs to one group"):
            StandinDesk(workers, groups=groups)
    with pytest.raises(UsageError, match="is a group by itself"):
        StandinDesk(workers, background={1}, groups=[LoopGroup((0, 1), 1)])
