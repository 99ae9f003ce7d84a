"""What two programs that share a board are tested with: a service that is busy when it is told to,
and looks at who goes on."""

from __future__ import annotations

import threading
import time

import numpy as np

from eclip.core.plan import Promise
from eclip.core.rules import (
    BUSY_SINCE,
    IDLE,
    LAUNCHED,
    TAIL,
    TIER,
)
from eclip.gpu.board import Board
from unmodified import Running
from waiting import until

LONG = Promise(bound_ns=10**12, request_ns=1, some_ns=0, none_ns=0)
STEADY = "while True: launch(1000)"  # a stretch each
GOING_ON = 5  # launches that show that a program does
# What takes 200 ms at most may take so long on a machine that runs ten other things. Who waits for
# somebody that has gone waits for ever.
BUSY_MS = 10_000


def now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


class Service:
    """A service of the test's own, which is busy when it is told to."""

    def __init__(self, board: Board) -> None:
        self.row = board.words[board.claim(LONG, "a test")]
        self._launches = False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._live)
        self._thread.start()

    def raise_busy(self, launches: bool = True) -> int:
        self._launches = launches
        # Long requests, as far as others can see: this thread may not run for a while.
        self.row[TAIL] = 50_000_000 if launches else 0
        self.row[LAUNCHED] += 1
        self.row[BUSY_SINCE] = now_ns()
        return now_ns()

    def clear_busy(self) -> None:
        self._launches = False
        self.row[BUSY_SINCE] = IDLE

    def close(self) -> None:
        self._end.set()
        self._thread.join()

    def _live(self) -> None:
        while not self._end.wait(0.0005):
            if self._launches:
                self.row[LAUNCHED] += 1


def rows_of(board: Board, tier: int) -> list[int]:
    board.sweep()  # those that nobody holds a lock on
    found: list[int] = np.flatnonzero(board.words[:, TIER] == tier).tolist()
    return found


def goes_on(program: Running, more: int = GOING_ON) -> bool:
    before = program.launched
    return until(lambda: program.launched >= before + more, 0.002)
