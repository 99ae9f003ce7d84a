"""Requests submitted to driving loops on the stand-in driver: each is answered exactly once."""

from __future__ import annotations

import itertools
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eclip.core.device import CANCELLED, CLOSED, EXPIRED, Completion
from eclip.core.rules import BACKGROUND, BUSY_SINCE, DEADLINE, IDLE, LEFT, SERVICE, YIELD
from eclip.errors import DeviceError, FullError, UsageError
from standin_desk import StandinDesk, served
from standin_gpu import (
    LAUNCHED,
    WHO,
    Log,
    StandinGpu,
    Worker,
    make_board,
    make_worker,
    place_on,
    raise_busy,
    rules,
    set_idle,
)
from waiting import until

MS = 1_000_000
LONG_US = 20_000


def worker_of(
    gpu: StandinGpu, number: int = 0, stretches: int = 4, micros: int = 200, **given: object
) -> Worker:
    gpu.behave(0, lazy=False)
    return make_worker(
        gpu,
        number,
        [[[(0, [micros])]] * stretches],
        streams=[gpu.stream()],
        **given,  # type: ignore[arg-type]
    )


def errors(completions: list[Completion]) -> list[str | None]:
    return [done.error for done in completions]


# --- The promise --------------------------------------------------------------------------------


@settings(max_examples=40)
@given(seed=st.integers(0, 1 << 32))
def test_every_ticket_is_completed_exactly_once_and_in_order(gpu: StandinGpu, seed: int) -> None:
    """Random submits, cancels, deadlines, polls and pauses, with one worker that never rests."""
    random = np.random.default_rng(seed)
    board = make_board(SERVICE, BACKGROUND, BACKGROUND)
    log = gpu.watch()
    workers = [
        worker_of(
            gpu,
            row,
            stretches=int(random.integers(1, 5)),
            micros=int(random.choice([0, 50, 300])),
            place=place_on(board, row),
            depth=int(random.integers(1, 3)),
            rules=rules() if row == 0 else rules((1, 2, YIELD)),
            bound_ns=5 * MS if row == 0 else 0,
        )
        for row in range(3)
    ]
    tickets: list[list[int]] = [[] for _ in workers]
    full = 0
    with served(workers, slots=4, background={2}) as desk:
        for _ in range(120):
            worker, slot = int(random.integers(3)), int(random.integers(4))
            deadline = time.monotonic_ns() + int(random.integers(-MS, 3 * MS))
            try:
                given = desk.submit(worker, slot, deadline if random.integers(4) == 0 else None)
                tickets[worker].append(given)
            except FullError:
                full += 1
                desk.poll()
            if random.integers(4) == 0 and tickets[worker]:
                desk.desk.cancel(int(random.choice(tickets[worker])))
            if random.integers(6) == 0:
                time.sleep(random.exponential(0.001))
        if random.integers(2):
            desk.wait_for(sum(map(len, tickets)))
    desk.poll()  # what closing has answered
    for worker, given_out in enumerate(tickets):
        done = [one for one in desk.completions if one.worker == worker]
        assert [one.ticket for one in done] == given_out
        assert set(errors(done)) <= {None, CANCELLED, EXPIRED, CLOSED}
        for before, after in itertools.pairwise(done):
            assert before.end_ns <= after.end_ns
        assert all(one.arrival_ns <= one.start_ns <= one.end_ns for one in done)
        whole = [one for one in done if one.error is None]
        check_kernels(workers[worker], log, desk.desk.served[worker], worker == 2)
        if worker != 2:
            assert desk.desk.served[worker] == len(whole)
    assert np.all(board[:, BUSY_SINCE] == IDLE)


def check_kernels(worker: Worker, log: Log, whole: int, own: bool) -> None:
    """Each request from its first kernel on, as far as it came; so many of them to the end."""
    ran = (worker.ran(log)[:, WHO] % 1000).tolist()
    for before, after in itertools.pairwise(ran):
        assert after in (0, before + 1)
    assert ran.count(worker.kernels - 1) == whole or own


# --- Giving up ----------------------------------------------------------------------------------


def test_a_queued_request_that_is_cancelled_never_starts(gpu: StandinGpu) -> None:
    worker, log = worker_of(gpu, stretches=1, micros=LONG_US), gpu.watch()
    with served([worker]) as desk:
        tickets = [desk.submit(slot=slot) for slot in range(3)]
        desk.desk.cancel(tickets[1])
        done = desk.wait_for(3)
    assert errors(done) == [None, CANCELLED, None]
    assert done[1].start_ns == done[1].end_ns
    assert len(worker.ran(log)) == 2


def test_a_running_request_that_is_cancelled_stops_at_its_next_joint(gpu: StandinGpu) -> None:
    worker, log = worker_of(gpu, stretches=50, micros=5000, depth=2), gpu.watch()
    with served([worker]) as desk:
        ticket = desk.submit()
        assert until(lambda: len(worker.launches(log)) > 3, pause_s=0.001)
        desk.desk.cancel(ticket)
        launched = len(worker.launches(log))
        (done,) = desk.wait_for(1)
    assert done.error == CANCELLED
    assert len(worker.launches(log)) <= launched + 1  # one may have been decided about
    assert len(worker.ran(log)) == len(worker.launches(log))  # nothing is left in flight


def test_a_request_without_a_joint_left_ends_with_its_result(gpu: StandinGpu) -> None:
    worker, log = worker_of(gpu, stretches=1, micros=LONG_US), gpu.watch()
    with served([worker]) as desk:
        ticket = desk.submit(deadline_ns=time.monotonic_ns() + MS)
        # Or it was too late for its deadline on a busy machine.
        ring = desk.desk.rings[0]
        assert until(lambda: len(worker.launches(log)) > 0 or ring.answered > 0, pause_s=0.0005)
        desk.desk.cancel(ticket)
        assert errors(desk.wait_for(1)) in ([None], [EXPIRED])


def test_a_request_that_yields_can_be_given_up(gpu: StandinGpu) -> None:
    board = make_board(SERVICE, BACKGROUND)
    worker = worker_of(gpu, place=place_on(board, 1), rules=rules((1, 2, YIELD)))
    raise_busy(board, 0)
    with served([worker]) as desk:
        ticket = desk.submit()
        desk.submit(slot=1, deadline_ns=time.monotonic_ns() + 50 * MS)
        time.sleep(0.02)
        assert desk.desk.poll(0.0) == []
        desk.desk.cancel(ticket)
        assert errors(desk.wait_for(2)) == [CANCELLED, EXPIRED]
        set_idle(board, 0)


def test_a_request_past_its_deadline_is_not_run(gpu: StandinGpu) -> None:
    worker, log = worker_of(gpu, stretches=1, micros=LONG_US), gpu.watch()
    with served([worker]) as desk:
        desk.submit()
        desk.submit(slot=1, deadline_ns=time.monotonic_ns() + MS)
        done = desk.wait_for(2)
    assert errors(done) == [None, EXPIRED]
    assert len(worker.ran(log)) == 1


def test_a_request_whose_deadline_passes_stops_at_its_next_joint(gpu: StandinGpu) -> None:
    worker, log = worker_of(gpu, stretches=100, micros=5000), gpu.watch()
    with served([worker]) as desk:
        desk.submit(deadline_ns=time.monotonic_ns() + 50 * MS)
        assert errors(desk.wait_for(1)) == [EXPIRED]
    assert len(worker.ran(log)) < 100


# --- Full, closed, failed -----------------------------------------------------------------------


def test_a_slot_is_taken_until_its_completion_is_given_out(gpu: StandinGpu) -> None:
    with served([worker_of(gpu, micros=0)], slots=2) as desk:
        desk.submit()
        assert desk.desk.drain(None, 60.0)
        with pytest.raises(FullError, match="slot 0 of worker 0 is taken"):
            desk.submit()
        desk.submit(slot=1)
        desk.wait_for(2)
        desk.submit()
        desk.wait_for(3)
        for worker, slot in ((1, 0), (0, 2), (-1, 0), (0, -1)):
            with pytest.raises(UsageError, match="no slot"):
                desk.submit(worker, slot)
        with pytest.raises(UsageError, match="ticket"):
            desk.desk.cancel(3)


def test_closing_answers_what_is_open(gpu: StandinGpu) -> None:
    desk = StandinDesk([worker_of(gpu, stretches=1, micros=LONG_US)])
    desk.start()
    for slot in range(4):
        desk.submit(slot=slot)
    time.sleep(0.005)
    desk.close()
    done = desk.desk.poll(10.0)
    assert [one.slot for one in done] == [0, 1, 2, 3]
    assert errors(list(done))[-1] == CLOSED
    assert desk.desk.poll(10.0) == []
    with pytest.raises(DeviceError, match="closed"):
        desk.submit()
    desk.close()


def test_whoever_waits_is_woken_by_closing(gpu: StandinGpu) -> None:
    desk = StandinDesk([worker_of(gpu)])
    desk.start()
    found: list[object] = []
    waiting = threading.Thread(target=lambda: found.append(desk.desk.poll(300.0)))
    waiting.start()
    time.sleep(0.05)
    desk.close()
    waiting.join(60.0)
    assert found == [[]]


def test_a_launch_that_fails_ends_all_workers_and_answers_what_is_open(gpu: StandinGpu) -> None:
    fails, other = worker_of(gpu, 0, stretches=1), worker_of(gpu, 1, stretches=1, micros=LONG_US)
    with served([fails, other]) as desk:
        desk.submit(1, 0)
        desk.submit(1, 1)
        with gpu.capturing(0):  # waits fail
            desk.submit(0, 0)
            done = desk.wait_for(3)
        reasons = {one.worker: one.error for one in done}
        assert reasons[0] is not None
        assert "a launch failed" in reasons[0]
        with pytest.raises(DeviceError, match="has failed; open another one"):
            desk.submit(0, 1)


# --- The board, copies, rest --------------------------------------------------------------------


def test_background_gives_way_to_a_request_that_its_loop_has_not_seen(gpu: StandinGpu) -> None:
    """The service's loop does not run yet: background sees the request in the ring."""
    board, log = make_board(SERVICE, BACKGROUND), gpu.watch()
    service = worker_of(gpu, 0, place=place_on(board, 0), bound_ns=7_000 * MS)
    background = worker_of(gpu, 1, place=place_on(board, 1), rules=rules((1, 2, YIELD)))
    desk = StandinDesk([service, background], background={1})
    desk.server.runners[1].start()
    assert until(lambda: desk.desk.served[1] > 2)
    before = time.monotonic_ns()
    desk.submit()
    assert until(lambda: board[0, BUSY_SINCE] != IDLE)
    assert before <= board[0, BUSY_SINCE] <= time.monotonic_ns()
    assert board[0, DEADLINE] == board[0, BUSY_SINCE] + 7_000 * MS
    assert board[0, LEFT] == 4 * 200_000
    launched = len(background.launches(log))
    time.sleep(0.02)
    assert len(background.launches(log)) <= launched + 1  # one may have been decided about
    desk.server.runners[0].start()
    assert errors(desk.wait_for(1)) == [None]
    assert until(lambda: desk.desk.served[1] > launched)
    desk.close()


def test_a_slot_is_copied_before_the_first_and_after_the_last_stretch(gpu: StandinGpu) -> None:
    worker, log = worker_of(gpu, stretches=3), gpu.watch()
    names = 900 + np.arange(4).reshape(2, 2)
    made = [[gpu.executable([(int(name), 0)]) for name in pair] for pair in names]
    copies = np.array(made, dtype=np.uint64)
    with served([worker], slots=2, copies=[copies]) as desk:
        desk.submit(slot=1)
        desk.submit(slot=0)
        desk.wait_for(2)
    model = [list(worker.parts)] * 2
    wanted = [[copies[slot, 0], *model[0], copies[slot, 1]] for slot in (1, 0)]
    assert log.of(LAUNCHED)[:, WHO].tolist() == [int(one) for part in wanted for one in part]


def test_background_runs_until_something_is_submitted_to_it(gpu: StandinGpu) -> None:
    worker = worker_of(gpu, micros=50)
    with served([worker], background={0}) as desk:
        assert until(lambda: desk.desk.served[0] > 5)
        desk.submit()
        (done,) = desk.wait_for(1)
        assert done.error is None
        before = desk.desk.served[0]
        assert until(lambda: desk.desk.served[0] > before + 5)


def test_loops_without_requests_sleep(gpu: StandinGpu) -> None:
    workers = [worker_of(gpu, number) for number in range(4)]
    with served(workers) as desk:
        desk.submit()
        desk.wait_for(1)
        began = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - began < 0.2
        desk.submit()
        (_, done) = desk.wait_for(2)
    assert done.error is None


def test_nothing_is_left_behind_by_many_requests(gpu: StandinGpu) -> None:
    worker = worker_of(gpu, stretches=1, micros=0)

    def count() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    before = count()
    with served([worker], slots=16) as desk:
        serve_some(desk, 2_000)
        inside, memory = count(), resident_bytes()
        serve_some(desk, 10_000)
        assert count() == inside
        assert resident_bytes() - memory < 16 << 20  # the log of what was launched grows, too
    assert count() == before


def serve_some(desk: StandinDesk, requests: int) -> None:
    for _ in range(requests // 16):
        for slot in range(16):
            desk.submit(slot=slot)
        desk.wait_for(16)
        desk.completions.clear()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
