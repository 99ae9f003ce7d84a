"""Accounts in the driving loop: requests are charged by the thread that ends them."""

from __future__ import annotations

import time

import numpy as np
import pytest

from account import Account, Ended
from eclip.core import credit
from eclip.core import rules as words
from eclip.core.credit import fate_of
from eclip.core.device import EXPIRED
from eclip.core.plan import P99_GAIN, Promise
from eclip.core.requests import ARRIVAL, END, VERDICT, YIELDS
from eclip.core.rules import (
    BACKGROUND,
    BUSY_SINCE,
    COUNTED,
    CREDIT,
    IDLE,
    LATE,
    LATEST,
    LOST,
    ONE_CREDIT,
    SERVICE,
    SPENT,
    STRICT,
    YIELD,
    Ints,
    open_account,
)
from standin_desk import StandinDesk, served
from standin_gpu import (
    StandinGpu,
    Worker,
    ended,
    make_board,
    make_worker,
    place_on,
    raise_busy,
    rules,
    serving,
    set_idle,
)
from standin_scene import Scene
from waiting import until

MS = 1_000_000
PROMISE = Promise(bound_ns=6 * MS, request_ns=2 * MS, some_ns=0, none_ns=0, gain=P99_GAIN)


def board_with_accounts(services: int, background: int = 0) -> Ints:
    board = make_board(*[SERVICE] * services, *[BACKGROUND] * background)
    for row in range(services):
        board[row, words.BOUND] = PROMISE.bound_ns
        open_account(board, row, PROMISE)
    return board


def service_on(gpu: StandinGpu, board: Ints, row: int, stretches: int = 2) -> Worker:
    gpu.behave(0, lazy=False)
    return make_worker(
        gpu,
        row,
        [[[(0, [2000 // stretches])]] * stretches],
        streams=[gpu.stream()],
        place=place_on(board, row),
        bound_ns=PROMISE.bound_ns,
    )


def in_bursts(count: int, seed: int) -> Ints:
    """Alone, and so many at once that the last cannot be in time; times from now."""
    rng = np.random.default_rng(seed)
    times: list[int] = []
    at = 0
    while len(times) < count:
        at += int(rng.integers(3, 12)) * MS
        times += [at] * int(rng.choice([1, 1, 1, 5]))
    return np.array(times, dtype=np.int64)


@pytest.mark.parametrize("stretches", [1, 2])
@pytest.mark.parametrize("rich", [False, True])
def test_verdicts_are_what_a_second_account_says(
    gpu: StandinGpu, stretches: int, rich: bool
) -> None:
    """Whatever the machine makes of the times."""
    board = board_with_accounts(1)
    if rich:
        credit.warm(board)
    worker = service_on(gpu, board, 0, stretches)
    runner = worker.runner(arrivals=in_bursts(60, stretches) + time.monotonic_ns())
    runner.start()
    ended(runner)
    rows = runner.rows()
    account = Account(PROMISE)
    if rich:
        account.credit += credit.MOST_CREDIT
    for row in rows.tolist():
        account.check(Ended(row[ARRIVAL], row[END], row[VERDICT]))
    assert account.late > 0
    assert board[0, COUNTED] == len(rows)
    assert board[0, LATE] == account.late
    assert board[0, CREDIT] == ONE_CREDIT * account.credit
    fates = [fate_of(verdict)[0] for verdict in rows[:, VERDICT].tolist()]
    assert board[0, LOST] == fates.count(credit.WAS_LOST)
    assert board[0, STRICT] in ((SPENT,) if account.credit <= 0 else (0, credit.AUDIT))
    assert board[0, BUSY_SINCE] == IDLE


def test_replicas_of_a_service_share_one_account(gpu: StandinGpu) -> None:
    """Threads that end requests at the same time lose no charge."""
    board = board_with_accounts(3)
    board[1:, words.ACCOUNT] = 0
    deep = -(10**6) * ONE_CREDIT
    board[0, CREDIT] = deep
    workers = [service_on(gpu, board, row, 1) for row in range(3)]
    now = time.monotonic_ns()
    runners = [
        worker.runner(arrivals=in_bursts(40, row) + now) for row, worker in enumerate(workers)
    ]
    for runner in runners:
        runner.start()
    ended(*runners)
    rows = np.concatenate([runner.rows() for runner in runners])
    late = int(np.count_nonzero(rows[:, END] - rows[:, ARRIVAL] > PROMISE.bound_ns))
    assert board[0, COUNTED] == len(rows)
    assert board[0, LATE] == late
    gained = (len(rows) - late) * round(P99_GAIN * ONE_CREDIT)
    assert board[0, CREDIT] == deep + gained - late * ONE_CREDIT
    assert board[0, words.LOCK] == 0
    assert not board[1:, COUNTED].any()


@pytest.mark.parametrize("how", ["strict", "a request is too late", "another replica is strict"])
def test_background_launches_nothing_beside_a_strict_service(gpu: StandinGpu, how: str) -> None:
    """Its rule would let it go on: the service has all the slack in the world."""
    scene = Scene(gpu, rules=rules((1, 0, YIELD)))
    board = scene.board
    open_account(board, 0, PROMISE)
    if how == "another replica is strict":
        board[0, words.ACCOUNT] = 1
        board[1, STRICT] = SPENT
    board[0, STRICT] = SPENT if how == "strict" else 0
    runner = scene.worker.runner()
    with serving(runner):
        assert scene.goes_on()
        if how == "a request is too late":
            board[0, LATEST] = time.monotonic_ns() - 1
        busy = raise_busy(board, 0, slack_ns=10**12)
        scene.still()
        assert len(scene.since(busy)) <= 1  # decided before
        board[0:2, STRICT], board[0, LATEST] = 0, words.NEVER
        assert scene.goes_on()
        set_idle(board, 0)
    assert runner.rows()[:, YIELDS].sum() == 1


def test_requests_that_expire_are_late_and_those_cancelled_are_not_counted(gpu: StandinGpu) -> None:
    board = board_with_accounts(1)
    worker = service_on(gpu, board, 0)
    with served([worker]) as desk:
        desk.submit(slot=0)
        desk.submit(slot=1, deadline_ns=time.monotonic_ns())
        desk.desk.cancel(desk.submit(slot=2))
        done = desk.wait_for(3)
        assert until(lambda: board[0, BUSY_SINCE] == IDLE)
    assert [one.error for one in done].count(EXPIRED) == 1
    late = [
        one.error == EXPIRED or one.end_ns - one.arrival_ns > PROMISE.bound_ns for one in done
    ]  # what was cancelled when it was too late counts, too
    assert board[0, LATE] == sum(late) >= 1
    in_time = zip(done, late, strict=True)
    assert board[0, COUNTED] == sum(too_late or one.error is None for one, too_late in in_time)


def test_a_request_behind_others_says_at_once_when_it_is_too_late(gpu: StandinGpu) -> None:
    """The service's loop does not run yet; background tells what it sees in the ring."""
    board = board_with_accounts(1, background=1)
    service = service_on(gpu, board, 0)
    _, bound_ns, request_ns = service.loop.service
    background = make_worker(
        gpu,
        1,
        [[[(0, [50])]] * 2],
        streams=[gpu.stream()],
        place=place_on(board, 1),
        rules=rules((1, 2, YIELD)),
    )
    desk = StandinDesk([service, background], background={1})
    for slot in range(3):
        desk.submit(slot=slot)
    desk.server.runners[1].start()
    ring = desk.desk.rings[0]
    arrivals = [ring.row(number)[ARRIVAL] for number in range(3)]
    latest = [
        max(arrival, arrival + bound_ns - behind * request_ns)
        for behind, arrival in enumerate(arrivals)
    ]
    assert until(lambda: board[0, LATEST] == min(latest[1:]), pause_s=0.0)
    assert until(lambda: board[0, BUSY_SINCE] == arrivals[0], pause_s=0.0)
    desk.close()
