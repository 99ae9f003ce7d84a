"""Changes the cap of a running process: asks its owner on the board, and waits until it is done."""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from eclip.core.rules import (
    ASKED,
    CHANGES,
    HEARTBEAT,
    LEAVE_NS,
    MOVE_NS,
    NAME,
    NOBODY,
    PID,
    SLICES_HELD,
    SLICES_WANTED,
    STOPPED_NS,
    TIER,
    UNITS_HELD,
    UNITS_WANTED,
    Ints,
)
from eclip.cuda.processes.mps import PIPES, SHARE
from eclip.errors import DeviceError, UsageError
from eclip.gpu.board import Board, boards_here, open_board

_PATIENCE_S = 5.0
_LOOK_S = 0.001
_COUNT_BITS = 32
_PIPES_HERE = Path("/tmp/nvidia-mps")


class CapChange(msgspec.Struct, frozen=True, kw_only=True):
    """A process's change from some units to others, as far as it has come."""

    pid: int
    name: str
    before: int
    held: int
    wanted: int
    done: bool  # nothing of the process runs outside what it holds, and it holds what it wants
    move_ms: float  # until launches went to the new units
    leave_ms: float  # until the last kernel on the old ones had ended; 0: none were left

    @property
    def line(self) -> str:
        name = f"process {self.pid} ({self.name})" if self.name else f"process {self.pid}"
        if self.done:
            left = f", and the last kernel outside ended after {self.leave_ms:.1f} ms"
            return (
                f"{name}: {self.before} → {self.held} SMs; launches went there after "
                f"{self.move_ms:.1f} ms{left if self.leave_ms else ''}"
            )
        return (
            f"{name} was asked for {self.wanted} SMs and holds {self.held}: a kernel still runs "
            f"on those it leaves, or others hold those it waits for; the change goes on by itself, "
            f"and `eclip top` shows it"
        )


def change_cap(pid: int, sms: int, patience_s: float = _PATIENCE_S) -> list[CapChange]:
    """Ask the capped processes with this pid, or below it, for another number of SMs each."""
    boards = [open_board(path) for path in boards_here() if path.exists()]
    try:
        rows = [row for board in boards for row in _rows_of(board, pid)]
        if not rows:
            raise UsageError(_why_not(pid))
        return [_change(row, sms, patience_s) for row in rows]
    finally:
        for board in boards:
            board.close()


def sharing_here() -> str:
    """What a cap means on this machine now: with a server of MPS, or without."""
    pipes = Path(os.environ.get(PIPES) or _PIPES_HERE)
    if not pipes.exists():
        return (
            "no MPS server is running: processes take turns on the whole GPU, so a cap holds "
            "within this process's turns; a GPU fault ends the process that makes it, no other"
        )
    told = (
        "an MPS server seems to run: capped processes run beside each other on SMs of their own; "
        "a GPU fault in one ends all clients of the server"
    )
    if os.environ.get(SHARE):
        told += f"; unset {SHARE}, which takes SMs away that a cap counts with"
    return told


def _rows_of(board: Board, pid: int) -> Iterator[Ints]:
    for row in board.words:
        if row[TIER] == NOBODY or row[UNITS_WANTED] == 0:
            continue
        if pid in _ancestors(int(row[PID])):
            yield row


def _ancestors(pid: int) -> Iterator[int]:
    """The process itself, its parent, and so on; the first process of all is nobody's."""
    yield pid
    while pid > 1:
        try:
            status = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return
        pid = int(status.rpartition(")")[2].split()[1])
        if pid > 1:
            yield pid


def _why_not(pid: int) -> str:
    try:
        owner = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return f"there is no process {pid}"
    if owner != os.geteuid():
        return f"process {pid} is of another user ({_user(owner)}), who alone may change its cap"
    return (
        f"process {pid} has no cap: only a program that was started by `eclip exec --sms N -- …` "
        f"and has launched something has"
    )


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _change(row: Ints, sms: int, patience_s: float) -> CapChange:
    pid, before, changes = int(row[PID]), int(row[UNITS_HELD]), int(row[CHANGES])
    if time.clock_gettime_ns(time.CLOCK_MONOTONIC) - row[HEARTBEAT] > STOPPED_NS:
        raise DeviceError(
            f"process {pid} is stopped: continue it (kill -CONT {pid}), then ask again"
        )
    count = (int(row[ASKED]) + 1) & ((1 << _COUNT_BITS) - 1)
    row[ASKED] = sms << _COUNT_BITS | count

    def gone() -> bool:
        return int(row[PID]) != pid or row[TIER] == NOBODY

    def done() -> bool:
        settled = row[SLICES_HELD] == row[SLICES_WANTED] and row[UNITS_HELD] == row[UNITS_WANTED]
        return bool(settled and row[CHANGES] != changes)

    _wait(lambda: gone() or done(), patience_s)
    if gone():
        raise DeviceError(f"process {pid} ended while its cap was changed")
    return CapChange(
        pid=pid,
        name=row[NAME:].tobytes().rstrip(b"\0").decode(errors="replace"),
        before=before,
        held=int(row[UNITS_HELD]),
        wanted=int(row[UNITS_WANTED]),
        done=done(),
        move_ms=int(row[MOVE_NS]) / 1e6,
        leave_ms=int(row[LEAVE_NS]) / 1e6,
    )


def _wait(ended: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not ended() and time.monotonic() < until:
        time.sleep(_LOOK_S)
