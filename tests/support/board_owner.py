"""A process that owns a row of a board and does there what it is told, one word a line.

``Owner`` is the test's end; ``main`` is the process. It answers every word with one line.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from eclip.core import rules
from eclip.core.plan import Promise
from eclip.cuda.processes.mps import python_path
from eclip.errors import EclipError
from eclip.gpu import board as boards
from waiting import PATIENCE_S, state_of, until

PROMISE = Promise(bound_ns=3_600_000_000_000, request_ns=1_000_000, some_ns=3_000, none_ns=2_000)
_PROGRAM = "import sys; from board_owner import main; main(sys.argv[1])"


class Owner:
    def __init__(self, path: Path, *, through: Sequence[str] = ()) -> None:
        """``through``: a command that runs the process, such as ``unshare``."""
        here = str(Path(__file__).parent)
        self._process = subprocess.Popen(
            [*through, sys.executable, "-c", _PROGRAM, str(path)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join((here, python_path()))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._read() == "ready"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, *words: str) -> str:
        """Its answer to the last of these words."""
        for word in words:
            self.begin(word)
            answer = self.answer()
        return answer

    def begin(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        answer = self._read()
        assert answer, "the process is gone"
        return answer

    def claim(self) -> int:
        return int(self.tell("claim"))

    def kill(self) -> None:
        self._process.kill()
        self.wait()

    def wait(self) -> int:
        return self._process.wait(PATIENCE_S)

    def stop(self) -> None:
        """Until it is really stopped: signals take a moment to arrive."""
        self._process.send_signal(signal.SIGSTOP)
        assert until(lambda: state_of(self.pid) == "T")

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


class _Owning:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.board = boards.open_board(path)
        self.row = -1

    def claim(self) -> object:
        self.row = self.board.claim(PROMISE)
        return self.row

    def claim_and_die(self) -> object:
        vars(boards)["enter"] = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        return self.claim()

    def busy(self) -> object:
        self.board.words[self.row, rules.BUSY_SINCE] = time.monotonic_ns()
        return "busy"

    def release(self) -> object:
        self.board.release(self.row)
        return "released"

    def reopen(self) -> object:
        self.board.close()
        self.board = boards.open_board(self.path)
        return "open"

    def fork(self) -> object:
        """A child that does all it can to spoil its parent's row, and ends."""
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                self.board.words[:] = -1
                self.board.release(self.row)
                self.board.close()
                self.board.sweep()
                status = 0
            finally:
                os._exit(status)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def fork_one_that_stays(self) -> object:
        """It ends with the test: its standard input is the pipe that the test holds."""
        pid = os.fork()
        if pid == 0:
            sys.stdin.read()
            os._exit(0)
        return pid

    def quarrel(self) -> object:
        """Claim and release many times; marks that exist already show a second owner."""
        seen = set()
        for _ in range(60):
            try:
                row = self.board.claim(PROMISE)
            except EclipError:  # full: the others have it
                continue
            mark = self.path.with_name(f"row-{row}")
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL))  # raises, and so ends the process
            seen.add(row)
            time.sleep(0.0002)
            mark.unlink()
            self.board.release(row)
        return len(seen)


def main(path: str) -> None:
    owning = _Owning(Path(path))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        answer = getattr(owning, line.strip())()
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()
