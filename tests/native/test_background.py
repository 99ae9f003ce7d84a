"""``eclip.background``: a loop gives way between its steps to services on the board of its GPU."""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import eclip
from eclip.core.plan import Promise
from eclip.core.rules import BUSY_SINCE, HEARTBEAT, IDLE, PID, STOPPED_NS
from eclip.cuda import uuid
from eclip.errors import DeviceError, UsageError
from eclip.gpu import board as boards
from eclip.gpu.board import Board, open_board
from eclip.gpu.board_view import SeenWorker, look
from eclip.pytorch import background as module
from native_build import Native
from small_torch import Cuda, small_torch
from two_programs import BUSY_MS, Service
from waiting import until

MS = 1_000_000
PROMISE = Promise(bound_ns=10**12, request_ns=1, some_ns=0, none_ns=0)


@pytest.fixture
def torch(
    native: Native, board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cuda]:
    """PyTorch's streams on the stand-in, on the board of the test."""
    monkeypatch.setattr(uuid, "LIBRARY", str(native.standin))
    monkeypatch.setenv(boards.VARIABLE, str(tmp_path / "board"))
    made = small_torch(cuda="13.0", initialised=True)
    monkeypatch.setitem(sys.modules, "torch", made)
    yield made.cuda


class Clock:
    """Time that passes only while the loop sleeps, and when a step takes some."""

    def __init__(self) -> None:
        self.now_ns = 10**15

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)

    def clock_gettime_ns(self, _: int) -> int:
        return self.now_ns

    CLOCK_MONOTONIC = 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def busy_row(board: Board, clock: Clock, name: str = "bert") -> int:
    """A service that is busy from now on, and alive for ever."""
    row = board.claim(PROMISE, name, beats=False)
    board.words[row, [HEARTBEAT, BUSY_SINCE]] = clock.now_ns + 10**15, clock.now_ns
    return row


def ours(tmp_path: Path) -> list[SeenWorker]:
    return [worker for worker in look(tmp_path / "board").workers if worker.tier == "background"]


def test_without_services_steps_go_on_and_nothing_is_waited_for(
    torch: Cuda, tmp_path: Path
) -> None:
    seen = []
    for step in eclip.background(range(5), name="train"):
        seen.append(step)
        (worker,) = ours(tmp_path)
        assert (worker.name, worker.stretches, worker.yields) == ("train", step + 1, 0)
    assert seen == [0, 1, 2, 3, 4]
    assert torch.waited == []
    assert ours(tmp_path) == []


def test_a_busy_service_holds_the_loop_and_an_idle_one_lets_it_go(
    torch: Cuda, service: Service, tmp_path: Path
) -> None:
    steps: list[int] = []
    over = threading.Event()

    def train() -> None:
        for step in eclip.background(itertools.count()):
            steps.append(step)
            over.wait(0.0005)
            if over.is_set():
                break

    thread = threading.Thread(target=train)
    thread.start()
    try:
        for _ in range(3):
            reached = len(steps)
            assert until(lambda: len(steps) > reached + 2)  # noqa: B023
            service.raise_busy()
            assert until(lambda: [worker.state for worker in ours(tmp_path)] == ["idle"])
            held = len(steps)
            over.wait(0.02)
            assert len(steps) == held
            service.clear_busy()
    finally:
        service.clear_busy()
        over.set()
        thread.join(BUSY_MS / 1000)
    assert not thread.is_alive()
    assert torch.waited  # with a service there, each step ends before the next begins


def test_a_service_that_has_died_or_hangs_holds_nothing(
    torch: Cuda, board: Board, clock: Clock
) -> None:
    row = busy_row(board, clock)
    board.words[row, HEARTBEAT] = clock.now_ns - STOPPED_NS - 1
    before = clock.now_ns
    assert list(eclip.background(range(3))) == [0, 1, 2]
    board.words[row, HEARTBEAT] = clock.now_ns + 10**15
    board.words[row, BUSY_SINCE] = clock.now_ns - 11 * PROMISE.bound_ns
    assert list(eclip.background(range(3))) == [0, 1, 2]
    assert clock.now_ns == before


def test_a_hold_ends_with_the_request(torch: Cuda, board: Board, clock: Clock) -> None:
    row = busy_row(board, clock)
    begun = clock.now_ns
    sleep = clock.sleep

    def until_idle(seconds: float) -> None:
        sleep(seconds)
        if clock.now_ns - begun >= 3 * MS:
            board.words[row, BUSY_SINCE] = IDLE

    clock.sleep = until_idle  # type: ignore[method-assign]
    with eclip.background() as work:
        work.give_way()
        assert 3 * MS <= clock.now_ns - begun < 4 * MS
        work.give_way()
        assert clock.now_ns - begun < 4 * MS


def test_with_a_floor_steps_keep_this_part_of_their_rate(
    torch: Cuda, board: Board, clock: Clock
) -> None:
    row = busy_row(board, clock)
    board.words[row, BUSY_SINCE] = IDLE
    begins = []
    for step in eclip.background(range(12), floor=0.2):
        begins.append(clock.now_ns)
        clock.now_ns += 10 * MS
        if step == 1:
            board.words[row, BUSY_SINCE] = clock.now_ns
    gaps = [later - before for before, later in itertools.pairwise(begins)]
    assert gaps[0] == 10 * MS
    assert all(50 * MS <= gap <= 51 * MS for gap in gaps[1:])


def test_without_a_floor_a_long_hold_is_told_once(torch: Cuda, board: Board, clock: Clock) -> None:
    row = busy_row(board, clock)
    sleep, begun = clock.sleep, clock.now_ns

    def until_idle(seconds: float) -> None:
        sleep(max(seconds, 0.5))
        if clock.now_ns - begun >= 60 * 10**9:
            board.words[row, BUSY_SINCE] = IDLE

    clock.sleep = until_idle  # type: ignore[method-assign]
    with eclip.background() as work, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        work.give_way()
    assert [str(one.message) for one in told] == [
        f"held for 10 s by the service bert (process {board.words[row][PID]}), which is "
        f"busy; with a floor, background goes on all the same"
    ]


def test_nothing_is_held_inside_a_capture(torch: Cuda, board: Board, clock: Clock) -> None:
    busy_row(board, clock)
    torch.capturing = True
    before = clock.now_ns
    with eclip.background() as work:
        work.give_way()
    assert clock.now_ns == before and torch.waited == []


def test_a_loop_that_breaks_or_fails_leaves_the_board(torch: Cuda, tmp_path: Path) -> None:
    for _ in eclip.background(range(5)):
        break
    assert ours(tmp_path) == []

    def fail() -> None:
        for _ in eclip.background(range(5)):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert until(lambda: ours(tmp_path) == [])


def test_under_libeclip_its_own_way_counts(
    torch: Cuda, board: Board, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy_row(board, clock)
    monkeypatch.setenv("ECLIP_TIER", "background")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: type("", (), {"eclip_request": None}))
    for _ in eclip.background(range(2)):
        assert ours(tmp_path) == []
    monkeypatch.setenv("ECLIP_TIER", "service")
    with pytest.raises(UsageError, match="this process is a service"):
        eclip.background()


def test_what_is_wrong_is_said(torch: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    for floor in (1, -0.1, float("nan"), "0.2", True):
        with pytest.raises(UsageError, match="a floor is a part of the rate alone"):
            eclip.background(range(2), floor=floor)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "torch", small_torch())
    with pytest.raises(DeviceError, match="built for CPUs only"):
        eclip.background(range(2))


def test_two_loops_share_the_board(torch: Cuda, tmp_path: Path) -> None:
    with eclip.background(name="a") as one, eclip.background(name="b") as other:
        one.give_way()
        other.give_way()
        assert [worker.name for worker in ours(tmp_path)] == ["a", "b"]
    with open_board(tmp_path / "board") as again:
        assert again.claim(None, "c") == 0
