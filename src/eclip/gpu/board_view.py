"""Looking at boards: what the workers of all processes on a GPU are doing, for a person.

Nothing is locked, mapped or written, so looking disturbs no worker. Words are read while their
owners write them and need not agree with each other.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import numpy as np

from eclip.core.credit import REASONS
from eclip.core.rules import (
    ACCOUNT,
    BACKGROUND,
    BOUND,
    BUSY_SINCE,
    COUNTED,
    CREDIT,
    CROSSED,
    DEADLINE,
    GAIN,
    HEARTBEAT,
    HUNG_BOUNDS,
    IDLE,
    LATE,
    LAUNCHED,
    LEFT,
    LONGEST_PAUSE,
    MOVED,
    NAME,
    NOBODY,
    ONE_CREDIT,
    PID,
    PLAIN,
    SERVED,
    SERVICE,
    SLICES_HELD,
    SLICES_WANTED,
    STOPPED_NS,
    STRICT,
    TAIL,
    TIER,
    UNITS_HELD,
    UNITS_WANTED,
    WORDS,
    YIELDED,
    Ints,
)
from eclip.errors import ArtefactError, UsageError
from eclip.gpu.board import FIRST_ROW, SIZE, boards_here, check_board

_TIERS = {SERVICE: "service", BACKGROUND: "background", PLAIN: "plain"}


class SeenWorker(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a board at one moment. Counters are since the worker came."""

    name: str
    pid: int  # as the worker sees itself: in a container it means nothing outside
    tier: str  # service, background, or plain: neither
    state: str  # busy, idle, stopped (no heartbeat), hung (busy for ten bounds), or running (plain)
    bound_ms: float | None  # of a service; None also where it has none in time
    slack_ms: float | None  # of a busy service: what is left before its bound breaks
    p99_ms: float | None  # about; None: no request has ended
    credit: float | None  # of a service's account, as the following; None: it has none
    strict: str | None  # why background launches nothing beside it; "": it may
    late: int | None
    counted: int | None  # requests
    requests: int
    stretches: int
    yields: int
    moves: int
    barriers: int
    longest_pause_ms: float
    units_wanted: int  # SMs or CUs that the process is capped to; 0: no cap
    units_held: int  # where work of the process may run: while it moves, also where it was
    moving: bool  # a kernel still runs where the process was


class SeenBoard(msgspec.Struct, frozen=True, kw_only=True):
    board: str
    seen_ns: int  # of CLOCK_MONOTONIC
    workers: tuple[SeenWorker, ...]


def look(path: Path) -> SeenBoard:
    """All workers on the board in this file."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe has no writer
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        raise ArtefactError(f"cannot read the board {path}: {error.strerror}") from None
    try:
        check_board(descriptor, str(path))
        content = os.pread(descriptor, SIZE, 0)
    finally:
        os.close(descriptor)
    now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    rows = np.frombuffer(content[FIRST_ROW:], dtype=np.int64).reshape(-1, WORDS)
    return SeenBoard(
        board=str(path),
        seen_ns=now,
        workers=tuple(_worker(rows, row, now) for row in rows if row[TIER] != NOBODY),
    )


def look_around(path: Path | None = None) -> list[SeenBoard]:
    """The board in this file, or all boards of this user; at least one."""
    paths = boards_here() if path is None else [path]
    if not paths:
        raise UsageError(
            "there is no board, so nobody shares a GPU: start a program with eclip exec --service, "
            "--background or --sms, or anything of eclip with ECLIP_BOARD set; --board names the "
            "file of a board"
        )
    return [look(one) for one in paths]


def _worker(rows: Ints, row: Ints, now: int) -> SeenWorker:
    service = bool(row[TIER] == SERVICE)
    account = rows[int(row[ACCOUNT]) % len(rows)] if row[GAIN] else None
    state = state_of(row, now)
    slack_ns = int(row[DEADLINE] - row[LEFT] - now)
    return SeenWorker(
        name=row[NAME:].tobytes().rstrip(b"\0").decode(errors="replace"),
        pid=int(row[PID]),
        tier=_TIERS.get(int(row[TIER]), "unknown"),
        state=state,
        bound_ms=int(row[BOUND]) / 1e6 if service and row[BOUND] > 0 else None,
        slack_ms=slack_ns / 1e6 if service and state == "busy" else None,
        p99_ms=int(row[TAIL]) / 1e6 or None,
        credit=None if account is None else int(account[CREDIT]) / ONE_CREDIT,
        strict=None if account is None else ("", *REASONS)[int(account[STRICT]) & 3],
        late=None if account is None else int(account[LATE]),
        counted=None if account is None else int(account[COUNTED]),
        requests=int(row[SERVED]),
        stretches=int(row[LAUNCHED]),
        yields=int(row[YIELDED]),
        moves=int(row[MOVED]),
        barriers=int(row[CROSSED]),
        longest_pause_ms=int(row[LONGEST_PAUSE]) / 1e6,
        units_wanted=int(row[UNITS_WANTED]),
        units_held=int(row[UNITS_HELD]),
        moving=bool(row[SLICES_HELD] != row[SLICES_WANTED]),
    )


def state_of(row: Ints, now: int) -> str:
    """How a row's owner is: busy, idle, stopped or hung, as ``counts_as_busy`` decides."""
    if now - row[HEARTBEAT] > STOPPED_NS:
        return "stopped"
    if row[TIER] == PLAIN:
        return "running"
    if row[BUSY_SINCE] == IDLE:
        return "idle"
    hung = row[BOUND] > 0 and now - row[BUSY_SINCE] > HUNG_BOUNDS * row[BOUND]
    return "hung" if hung else "busy"
