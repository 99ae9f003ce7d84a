"""Loops of several processes on one board: a service that is killed or stopped holds nobody."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import loop_owner
from eclip.core.requests import PAUSE_NS
from eclip.core.rules import BUSY_SINCE, FOREIGN_BIT, IDLE, TIER, YIELD
from eclip.gpu.board import Board, open_board
from eclip.gpu.worker_loop import Place
from native_build import Native
from standin_gpu import BEGIN, Log, StandinGpu, Worker, make_worker, rules, serving
from waiting import until

MS = 1_000_000
STILL_S = 0.3
ATTEMPTS = 3  # of which the best counts: the machine may be busy


class Owners:
    """Busy services, each in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], board: Board) -> None:
        self._process = process
        self._board = board
        self._pids: list[int] = []
        assert self._said() == "ready"

    def _said(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def begin(self, submitted: bool = False) -> int:
        """The pid of another one, when it is busy; its requests are its own, or submitted."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{loop_owner.SUBMITTED if submitted else ''}\n")
        self._process.stdin.flush()
        pid, row = map(int, self._said().split())
        self._pids.append(pid)
        assert until(lambda: bool(self._board.words[row, BUSY_SINCE] != IDLE), pause_s=0.001)
        return pid

    def kill_all(self) -> None:
        """Nobody has waited for those that are dead already: their pids are not another's."""
        while self._pids:
            os.kill(self._pids.pop(), signal.SIGKILL)


@pytest.fixture(scope="module")
def board_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("loops") / "board"


@pytest.fixture(scope="module")
def board(board_file: Path) -> Iterator[Board]:
    with contextlib.closing(open_board(board_file)) as opened:
        yield opened


@pytest.fixture(scope="module")
def nursery(native: Native, board: Board, board_file: Path) -> Iterator[Owners]:
    """For all tests here: compiling the loop takes seconds."""
    with subprocess.Popen(
        [sys.executable, loop_owner.__file__, str(native.standin), str(board_file)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        made = Owners(process, board)
        yield made
        made.kill_all()
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def owners(nursery: Owners) -> Iterator[Owners]:
    yield nursery
    nursery.kill_all()


class Background:
    """A worker of this process that yields to every service on the board."""

    def __init__(self, gpu: StandinGpu, board: Board) -> None:
        gpu.behave(0, lazy=False)
        self.row = row = board.claim()
        self.log: Log = gpu.watch()
        self.worker: Worker = make_worker(
            gpu,
            1,
            [[[(0, [300])]] * 4],
            streams=[gpu.stream()],
            place=Place(board.words, row, np.array([row])),
            rules=rules((1 << FOREIGN_BIT, 2, YIELD)),
            depth=2,
        )

    def launched(self) -> int:
        return len(self.worker.launches(self.log))

    def is_held(self) -> bool:
        """Nothing for a while; waited for, as it has to see that somebody is busy."""
        before = self.launched()
        time.sleep(STILL_S)
        return self.launched() == before

    def goes_on_after(self, at: int) -> int:
        """How long after this time it did."""

        def later() -> list[int]:
            times = self.worker.launches(self.log)[:, BEGIN]
            return list(times[times > at])

        assert until(lambda: len(later()) >= 5, pause_s=0.001)
        return later()[0] - at


@pytest.fixture
def background(gpu: StandinGpu, board: Board) -> Iterator[Background]:
    made = Background(gpu, board)
    yield made
    board.release(made.row)


@pytest.mark.parametrize("submitted", [False, True])
def test_a_service_that_is_killed_holds_nobody(
    gpu: StandinGpu, board: Board, background: Background, owners: Owners, submitted: bool
) -> None:
    delays = []
    runner = background.worker.runner()
    with serving(runner):
        for _ in range(ATTEMPTS):
            assert background.goes_on_after(0) > 0
            pid = owners.begin(submitted)
            assert until(background.is_held)
            killed = time.monotonic_ns()
            os.kill(pid, signal.SIGKILL)
            delays.append(background.goes_on_after(killed))
        # Whoever lives clears what the dead have left.
        assert until(lambda: bool(np.count_nonzero(board.words[:, TIER]) == 1))
    assert min(delays) < 200 * MS
    assert runner.rows()[:, PAUSE_NS].max() > STILL_S * 1e9 / 2
    assert gpu.times_compiled() == 1  # and not again for a board in mapped memory


@pytest.mark.parametrize("submitted", [False, True])
def test_a_service_that_is_stopped_holds_nobody_until_it_continues(
    background: Background, owners: Owners, submitted: bool
) -> None:
    pid = owners.begin(submitted)
    delays = []
    with serving(background.worker.runner()):
        for _ in range(ATTEMPTS):
            assert until(background.is_held)
            stopped = time.monotonic_ns()
            os.kill(pid, signal.SIGSTOP)
            delays.append(background.goes_on_after(stopped))
            assert not background.is_held()
            os.kill(pid, signal.SIGCONT)
    assert min(delays) < 200 * MS


def test_a_worker_is_held_while_one_of_two_services_lives(
    background: Background, owners: Owners
) -> None:
    first, second = owners.begin(), owners.begin()
    with serving(background.worker.runner()):
        assert until(background.is_held)
        os.kill(first, signal.SIGKILL)
        time.sleep(STILL_S)
        assert background.is_held()  # the second one is still busy
        killed = time.monotonic_ns()
        os.kill(second, signal.SIGKILL)
        assert background.goes_on_after(killed) > 0
