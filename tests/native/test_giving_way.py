"""The driving loop beside busy services, on the stand-in driver: yields, floors, and how it ends.

What must not happen is read off the log of launches. What must happen is waited for, with patience;
where a time is promised, the best of several attempts counts, since the machine may be busy.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from eclip.core.requests import (
    ARRIVAL,
    BARRIERS,
    MOVES,
    PAUSE_NS,
    START,
    YIELDS,
)
from eclip.core.requests import END as ENDED
from eclip.core.rules import (
    BACKGROUND,
    BANKED_NS,
    BOUND,
    BUSY_SINCE,
    DEADLINE,
    IDLE,
    LEFT,
    NONE,
    OWED,
    SERVICE,
    SOME,
    TIER,
    YIELD,
    Ints,
)
from eclip.errors import DeviceError
from standin_gpu import (
    BEGIN,
    WHERE,
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
from standin_scene import STILL_S, YIELDS_TO_FIRST, Scene
from waiting import until

MS = 1_000_000
SECOND = 1000 * MS
YIELDS_TO_OWED = rules((1, OWED, YIELD))


@pytest.mark.parametrize("depth", [1, 2])
def test_a_worker_that_yields_launches_nothing_and_resumes_soon(
    gpu: StandinGpu, depth: int
) -> None:
    scene = Scene(gpu, depth=depth)
    runner = scene.worker.runner()
    delays, pauses = [], []
    with serving(runner):
        for _ in range(5):
            assert scene.goes_on()
            busy = raise_busy(scene.board, 0)
            since = scene.board[0, BUSY_SINCE]
            time.sleep(STILL_S)
            assert len(scene.since(busy)) <= 1  # decided before
            idle = set_idle(scene.board, 0)
            assert scene.goes_on()
            delays.append(int(scene.since(idle)[0, BEGIN]) - idle)
            pauses.append(idle - int(since))
    rows = runner.rows()
    assert min(delays) < 5 * MS
    assert rows[:, YIELDS].sum() == 5
    assert rows[:, [MOVES, BARRIERS]].sum() == 0
    longest = np.sort(rows[:, PAUSE_NS])[-5:]
    # It began to yield at its next joint, and ended when it was looked at.
    assert longest[-1] <= max(pauses) + max(delays)
    assert longest[0] > (STILL_S * 1e9) / 2
    assert np.count_nonzero(rows[:, PAUSE_NS]) <= 5


def test_a_worker_moves_while_a_service_is_busy_and_comes_back(gpu: StandinGpu) -> None:
    scene = Scene(gpu, rules=rules((1, 2, 1)), depth=2)
    home, away = scene.streams
    runner = scene.worker.runner()
    with serving(runner):
        assert scene.goes_on()
        assert set(scene.since(0)[:, WHERE]) == {home}
        busy = raise_busy(scene.board, 0)
        assert scene.goes_on(20)
        idle = set_idle(scene.board, 0)
        moved = scene.since(busy)
        moved = moved[moved[:, BEGIN] < idle]
        assert np.count_nonzero(moved[:, WHERE] == home) <= 1  # decided before
        assert scene.goes_on(20)
    lanes = scene.since(0)[:, WHERE]
    assert np.count_nonzero(scene.since(idle)[:, WHERE] == away) <= 1
    rows = runner.rows()
    assert rows[:, MOVES].sum() == np.count_nonzero(lanes == away) > 10
    # There and back, within a request or between two of them, where no barrier is needed.
    assert rows[:, BARRIERS].sum() <= np.count_nonzero(lanes[1:] != lanes[:-1]) == 2
    assert rows[:, [YIELDS, PAUSE_NS]].sum() == 0


@pytest.mark.parametrize(
    ("level", "slack_ns", "yields"),
    [(0, -MS, True), (0, 300 * SECOND, False), (1, 300 * SECOND, True), (1, 900 * SECOND, False),
     (2, 900 * SECOND, True)],
)  # fmt: skip
def test_a_worker_yields_by_how_much_slack_is_left(
    gpu: StandinGpu, level: int, slack_ns: int, yields: bool
) -> None:
    scene = Scene(gpu, rules=rules((1, level, YIELD)))
    scene.board[0, [SOME, NONE]] = 600 * SECOND, 100 * SECOND
    raise_busy(scene.board, 0, slack_ns)
    with serving(scene.worker.runner()):
        if yields:
            time.sleep(STILL_S)
            assert scene.launched() == 0
        else:
            assert scene.goes_on(20)


def test_slack_that_runs_out_is_seen_while_launching(gpu: StandinGpu) -> None:
    scene = Scene(gpu, rules=rules((1, 0, YIELD)))
    raise_busy(scene.board, 0, slack_ns=SECOND)
    with serving(scene.worker.runner()):
        assert scene.goes_on()
        time.sleep(1 + STILL_S)
        assert len(scene.since(int(scene.board[0, DEADLINE]))) <= 1  # decided before


def test_a_service_busy_for_ten_times_its_bound_holds_nobody(gpu: StandinGpu) -> None:
    scene = Scene(gpu)
    scene.board[0, BOUND] = 30 * MS
    raise_busy(scene.board, 0)
    with serving(scene.worker.runner()):
        assert scene.goes_on()
    assert scene.since(0)[0, BEGIN] > scene.board[0, BUSY_SINCE] + 300 * MS


@pytest.mark.parametrize("tier", [BACKGROUND, 0])
def test_only_services_are_given_way_to(gpu: StandinGpu, tier: int) -> None:
    scene = Scene(gpu)
    scene.board[0, TIER] = tier
    raise_busy(scene.board, 0)
    with serving(scene.worker.runner()):
        assert scene.goes_on(20)


# --- Floors -----------------------------------------------------------------------------------


def test_background_that_is_owed_its_floor_is_yielded_to_while_it_has_work(
    gpu: StandinGpu,
) -> None:
    scene = Scene(gpu, rules=YIELDS_TO_OWED)
    scene.board[0, TIER] = BACKGROUND
    with serving(scene.worker.runner()):
        raise_busy(scene.board, 0, slack_ns=900 * SECOND)
        assert scene.goes_on()
        owed = raise_busy(scene.board, 0, slack_ns=-1)
        time.sleep(STILL_S)
        assert len(scene.since(owed)) <= 1  # decided before
        scene.board[0, DEADLINE] += 900 * SECOND  # it was paid
        assert scene.goes_on()
        scene.board[0, DEADLINE] -= 900 * SECOND
        scene.still()
        set_idle(scene.board, 0)
        assert scene.goes_on()


def test_a_worker_says_until_when_its_floor_is_paid(gpu: StandinGpu) -> None:
    scene = Scene(gpu, floor=0.05)  # so little is worked in advance on busy cores, too
    due = scene.board[1]

    def paid_ns() -> int:
        return int(due[DEADLINE]) - time.monotonic_ns()

    with serving(scene.worker.runner()):
        assert until(lambda: paid_ns() > BANKED_NS / 2)
        raise_busy(scene.board, 0)
        assert until(lambda: paid_ns() < BANKED_NS / 4)
        assert paid_ns() <= BANKED_NS


@pytest.mark.parametrize("beside", [SERVICE, BACKGROUND])
@pytest.mark.parametrize("depth", [1, 2])
def test_beside_somebody_who_is_always_in_need_a_worker_gets_its_floor(
    gpu: StandinGpu, depth: int, beside: int
) -> None:
    given = YIELDS_TO_FIRST if beside == SERVICE else YIELDS_TO_OWED
    scene = Scene(gpu, floor=0.3, micros=2000, depth=depth, rules=given)
    scene.board[0, TIER] = beside
    raise_busy(scene.board, 0)
    shares: list[float] = []

    def a_second_has_its_floor() -> bool:  # on a busy machine the loop itself may not get on
        began, before = time.monotonic_ns(), scene.launched()
        time.sleep(1)
        shares.append((scene.launched() - before) * 2 * MS / (time.monotonic_ns() - began))
        return shares[-1] >= 0.27

    with serving(scene.worker.runner()):
        assert until(a_second_has_its_floor, patience_s=15)
    assert np.mean(shares) <= 0.36


def test_without_a_floor_it_gets_nothing(gpu: StandinGpu) -> None:
    scene = Scene(gpu)
    raise_busy(scene.board, 0)
    with serving(scene.worker.runner()):
        time.sleep(1)
        assert scene.launched() == 0


def test_work_done_before_is_no_excuse_for_long(gpu: StandinGpu) -> None:
    """A second at full speed is banked for a tenth of a second at most."""
    scene = Scene(gpu, floor=0.3, micros=20_000)
    with serving(scene.worker.runner()):
        assert until(lambda: scene.launched() >= 50)
        busy = raise_busy(scene.board, 0)
        assert until(lambda: len(scene.since(busy)) >= 3)
        later = scene.since(busy)[:, BEGIN] - busy
    assert later[2] < SECOND


def test_a_floor_owes_nothing_for_time_without_requests(gpu: StandinGpu) -> None:
    """A worker that idled for a second begins with a floor like any other, not with a debt."""
    scene = Scene(gpu, floor=0.3, stretches=200, micros=1000)
    runner = scene.worker.runner(arrivals=np.array([time.monotonic_ns() + SECOND]))
    with serving(runner):
        busy = raise_busy(scene.board, 0)
        assert until(lambda: scene.launched() >= 40)
        taken = scene.since(0)[:40, BEGIN]
    assert taken[0] >= busy + SECOND / 2
    assert taken[-1] - taken[0] > 80 * MS  # at full speed it would be 40


# --- Services among themselves ----------------------------------------------------------------


def open_service(
    gpu: StandinGpu, board: Ints, row: int, micros: int, stretches: int, bound_ns: int
) -> Worker:
    others = sum(1 << other for other in range(len(board)) if other != row)
    board[row, BOUND] = bound_ns
    return make_worker(
        gpu,
        row,
        [[[(0, [micros])]] * stretches],
        streams=[gpu.stream()],
        place=place_on(board, row),
        rules=rules((others, 2, YIELD)),
        bound_ns=bound_ns,
    )


def test_of_two_services_the_one_with_less_slack_goes_first(gpu: StandinGpu) -> None:
    """A long request with a loose bound, and two urgent ones while it runs."""
    board = make_board(SERVICE, SERVICE)
    log = gpu.watch()
    loose = open_service(gpu, board, 0, micros=1000, stretches=400, bound_ns=1000 * SECOND)
    tight = open_service(gpu, board, 1, micros=1000, stretches=30, bound_ns=100 * SECOND)
    now = time.monotonic_ns()
    patient = loose.runner(arrivals=np.array([now]))
    urgent = tight.runner(arrivals=np.array([now + 60 * MS, now + 200 * MS]))
    patient.start()
    urgent.start()
    ended(patient, urgent)
    assert urgent.rows()[:, YIELDS].tolist() == [0, 0]
    assert patient.rows()[0, YIELDS] in (1, 2)  # 1: the machine let the first take very long
    launches = loose.launches(log)[:, BEGIN]
    for row in urgent.rows():
        inside = (launches > row[START]) & (launches < row[ENDED])
        assert np.count_nonzero(inside) <= 1  # decided before
    assert patient.rows()[0, PAUSE_NS] >= 30 * MS


def test_a_request_of_a_service_is_overtaken_at_most_twice(gpu: StandinGpu) -> None:
    scene = Scene(gpu, tier=SERVICE, stretches=2000, micros=1000, bound_ns=1000 * SECOND)
    runner = scene.worker.runner(arrivals=np.array([time.monotonic_ns()]))
    with serving(runner):
        for _ in range(2):
            assert scene.goes_on()
            raise_busy(scene.board, 0)
            scene.still()
            set_idle(scene.board, 0)
        assert scene.goes_on()
        raise_busy(scene.board, 0)
        assert scene.goes_on(20)
    assert runner.rows()[0, YIELDS] == 2


def test_two_overloaded_services_are_both_served_to_the_end(gpu: StandinGpu) -> None:
    board = make_board(SERVICE, SERVICE)
    gpu.watch()
    workers = [
        open_service(gpu, board, row, micros=50, stretches=5, bound_ns=bound)
        for row, bound in enumerate((MS, 3 * MS))
    ]
    now = time.monotonic_ns()
    arrivals = now + np.arange(300) * MS // 10  # ten times what they can serve
    runners = [worker.runner(arrivals=arrivals) for worker in workers]
    for runner in runners:
        runner.start()
    ended(*runners)
    for runner in runners:
        rows = runner.rows()
        assert len(rows) == 300
        assert rows[:, YIELDS].max() <= 2
    assert sum(int(runner.rows()[:, YIELDS].sum()) for runner in runners) > 0
    assert np.all(board[:, BUSY_SINCE] == IDLE)


@pytest.mark.parametrize("closed", [False, True])
def test_a_service_says_on_the_board_how_urgent_it_is(gpu: StandinGpu, closed: bool) -> None:
    board = make_board(SERVICE)
    gpu.watch()
    bound = 100 * SECOND
    service = open_service(gpu, board, 0, micros=100_000, stretches=3, bound_ns=bound)
    now = time.monotonic_ns()
    # The last of three at once is the most urgent one: two others come before it.
    given = {"most_requests": 1} if closed else {"arrivals": np.full(3, now)}
    runner = service.runner(**given)
    seen = set()
    runner.start()
    while runner.is_alive():
        if board[0, BUSY_SINCE] != IDLE:
            seen.add(int(board[0, LEFT]) // (100 * MS))
            deadline = int(board[0, DEADLINE])
        time.sleep(0.001)
    first = int(runner.rows()[0, ARRIVAL])
    assert deadline == first + bound
    # In hundreds of milliseconds: less with every stretch that ends.
    assert seen == set(range(1, 4 if closed else 10))


# --- How a loop ends --------------------------------------------------------------------------


def test_stop_flag_ends_a_held_worker(gpu: StandinGpu) -> None:
    scene = Scene(gpu)
    raise_busy(scene.board, 0)
    stop = np.zeros(1, dtype=np.int64)
    runner = scene.worker.runner(stop)
    runner.start()
    scene.still()
    assert runner.is_alive()
    stop[0] = 1
    ended(runner)
    assert len(runner.rows()) == 1  # the one it had begun, to its end
    assert len(scene.worker.ran(scene.log)) == scene.worker.kernels
    assert scene.board[1, BUSY_SINCE] == IDLE


def test_the_end_of_a_run_ends_a_held_worker(gpu: StandinGpu) -> None:
    scene = Scene(gpu)
    raise_busy(scene.board, 0)
    stop_at = time.monotonic_ns() + 300 * MS
    runner = scene.worker.runner(stop_at_ns=stop_at)
    runner.start()
    ended(runner)
    assert len(runner.rows()) == 1
    assert scene.since(0)[0, BEGIN] >= stop_at


def test_stop_flag_ends_a_worker_that_waits_for_an_arrival(gpu: StandinGpu) -> None:
    scene = Scene(gpu)
    stop = np.zeros(1, dtype=np.int64)
    runner = scene.worker.runner(stop, arrivals=np.array([time.monotonic_ns() + 1000 * SECOND]))
    runner.start()
    time.sleep(0.1)
    stop[0] = 1
    ended(runner)
    assert len(runner.rows()) == 0


def fails_to_launch(gpu: StandinGpu, scene: Scene, run: Callable[[], None]) -> None:
    with gpu.captured(scene.streams[0], mode=2):
        run()


def fails_to_wait(gpu: StandinGpu, scene: Scene, run: Callable[[], None]) -> None:
    with gpu.capturing(mode=0):
        run()


@pytest.mark.parametrize("fail", [fails_to_launch, fails_to_wait])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_bad_status_ends_the_loop_and_the_worker_counts_as_idle(
    gpu: StandinGpu, depth: int, fail: Callable[[StandinGpu, Scene, Callable[[], None]], None]
) -> None:
    scene = Scene(gpu, depth=depth)
    stop = np.zeros(1, dtype=np.int64)
    runner = scene.worker.runner(stop)
    runner.start()
    assert scene.goes_on()
    assert scene.board[1, BUSY_SINCE] != IDLE
    fail(gpu, scene, lambda: ended(runner))
    with pytest.raises(DeviceError, match="a launch failed: status 90"):
        runner.rows()
    assert scene.board[1, BUSY_SINCE] == IDLE
    assert stop[0] == 1  # and so end the others of its session


# --- Compiled code ----------------------------------------------------------------------------


def test_a_loop_holds_no_gil(gpu: StandinGpu) -> None:
    """Python goes on beside a worker that is held: if it did not, this thread would come back when
    all is over."""
    scene = Scene(gpu)
    raise_busy(scene.board, 0)
    stop_at = time.monotonic_ns() + SECOND
    runner = scene.worker.runner(stop_at_ns=stop_at)
    runner.start()
    time.sleep(0.1)
    counted = 0
    while time.monotonic_ns() < stop_at:
        counted += 1
    ended(runner)
    assert counted > 100


def test_what_others_write_is_seen_after_a_long_wait(gpu: StandinGpu) -> None:
    """Compiled code may keep what it has read: in a wait for a flag that would be for ever."""
    scene = Scene(gpu)
    raise_busy(scene.board, 0)
    runner = scene.worker.runner()
    with serving(runner):
        time.sleep(2)
        assert scene.launched() == 0
        set_idle(scene.board, 0)
        assert scene.goes_on()
