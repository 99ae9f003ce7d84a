"""Background: a training loop of PyTorch that gives way to services between its steps.

The loop is in no other process's hands: it looks at the board (gpu/board.py) by itself, at the
joints that the program has between two steps. libeclip does this before every launch; under
``eclip exec`` its way is the only one.
"""

from __future__ import annotations

import ctypes
import os
import time
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar, overload

import numpy as np

from eclip.core.device import Closing
from eclip.core.rules import (
    BUSY_SINCE,
    IDLE,
    LAUNCHED,
    LONGEST_PAUSE,
    NAME,
    PID,
    SERVICE,
    TIER,
    YIELDED,
)
from eclip.devices import uuid_of
from eclip.errors import UsageError
from eclip.gpu.board import Board, board_path, open_board
from eclip.gpu.board_view import state_of
from eclip.pytorch.lanes import name_of

T = TypeVar("T")

_LOOK_S = 0.0001
_PATIENCE_NS = 10_000_000_000  # held for so long, a person is told
_KEPT = 16  # steps among which the shortest counts as undisturbed


class Background(Closing, Generic[T]):
    """Steps that give way to services on the board, and a row there while they run.

    Iterating gives the steps, and gives way before each. Without steps, call ``give_way`` before
    each step. An object belongs to one thread.
    """

    def __init__(self, steps: Iterable[T], floor: float, device: int | None, name: str) -> None:
        self._steps = steps
        self._floor = floor
        self._name = name
        self._passive = _under_libeclip()
        self._device, self._index = name_of(device)
        self._board: Board | None = None
        self._row = 0
        self._begun_ns = 0  # of the step under way; 0: there is none
        self._lengths: list[int] = []

    def __iter__(self) -> Iterator[T]:
        try:
            for step in self._steps:
                self.give_way()
                yield step
        finally:
            self.close()

    def give_way(self) -> None:
        """Return when no service on the board is busy.

        With a service on the board, the work on PyTorch's current stream is waited for first, so
        that nothing of this loop is on the GPU while it is held.
        """
        if self._passive:
            return
        import torch

        if self._board is None:
            self._board = open_board(board_path(uuid_of(self._device)))
            self._row = self._board.claim(None, self._name)
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return
        if self._services(self._board):
            self._finish(torch)
            self._hold(self._board)
        else:
            self._begun_ns = 0  # steps may be in flight: the next one's length says nothing
        row = self._board.words[self._row]
        row[LAUNCHED] += 1
        row[BUSY_SINCE] = _now_ns()

    def close(self) -> None:
        """Leave the board."""
        board, self._board = self._board, None
        if board is not None:
            board.words[self._row, BUSY_SINCE] = IDLE
            board.close()

    def _services(self, board: Board) -> list[int]:
        rows: list[int] = np.flatnonzero(board.words[:, TIER] == SERVICE).tolist()
        return rows

    def _finish(self, torch: Any) -> None:
        """Wait for the step under way, and remember how long it took."""
        if torch.cuda.is_initialized():
            torch.cuda.current_stream(self._index).synchronize()
        if self._begun_ns:
            self._lengths = [*self._lengths[1 - _KEPT :], _now_ns() - self._begun_ns]

    def _hold(self, board: Board) -> None:
        began = now = _now_ns()
        told = False
        row = board.words[self._row]
        row[BUSY_SINCE] = IDLE
        while (busy := self._busy(board, now)) is not None and now < self._due_ns():
            if not told and now - began > _PATIENCE_NS:
                told = True
                warnings.warn(
                    f"held for {_PATIENCE_NS // 10**9} s by {_title(board.words[busy])}, which is "
                    f"busy; with a floor, background goes on all the same",
                    stacklevel=3,
                )
            time.sleep(_LOOK_S)
            now = _now_ns()
        if now > began:
            row[YIELDED] += 1
            row[LONGEST_PAUSE] = max(row[LONGEST_PAUSE], now - began)
        self._begun_ns = now

    def _busy(self, board: Board, now: int) -> int | None:
        """The row of a busy service."""
        rows = self._services(board)
        return next((row for row in rows if state_of(board.words[row], now) == "busy"), None)

    def _due_ns(self) -> float:
        """When the floor is owed: a step takes this part of the time since the last one began."""
        if not self._floor or not self._lengths:
            return float("inf")
        return self._begun_ns + min(self._lengths) / self._floor


@overload
def background(
    *, floor: float = ..., device: int | None = ..., name: str = ...
) -> Background[None]: ...
@overload
def background(
    steps: Iterable[T], *, floor: float = ..., device: int | None = ..., name: str = ...
) -> Background[T]: ...
def background(
    steps: Iterable[Any] = (),
    *,
    floor: float = 0.0,
    device: int | None = None,
    name: str = "python",
) -> Background[Any]:
    """Mark a training loop as background: between two steps it waits while a service is busy.

    Services are programs under ``eclip exec --service``, and eclip's own sessions and servers with
    ECLIP_BOARD set, on the same GPU. A step that has begun is not held, so a request may wait for
    the rest of a step. ``floor`` is the least part of the steps' rate that the loop keeps beside
    services that are always busy. ``name`` is for ``eclip top``::

        for batch in eclip.background(loader, floor=0.1):
            train(batch)
    """
    if isinstance(floor, bool) or not isinstance(floor, int | float) or not 0 <= floor < 1:
        raise UsageError(f"a floor is a part of the rate alone, from 0 to less than 1, not {floor}")
    return Background(steps, float(floor), device, name)


def _under_libeclip() -> bool:
    """True if libeclip holds this process's launches already."""
    tier = os.environ.get("ECLIP_TIER")
    if tier is None or not hasattr(ctypes.CDLL(None), "eclip_request"):
        return False
    if tier == "service":
        raise UsageError("this process is a service (eclip exec --service), not background")
    return True


def _title(row: Any) -> str:
    name = row[NAME:].tobytes().rstrip(b"\0").decode(errors="replace")
    return f"the service {name or 'without a name'} (process {int(row[PID])})"


def _now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)
