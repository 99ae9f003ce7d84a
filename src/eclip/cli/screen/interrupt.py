"""SIGINT and SIGTERM while a command runs.

Both ask the command to end, with exit code 130 or 143. A signal that is ignored at the start (as
under ``nohup``) stays ignored.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME_S = 0.5  # `timeout` sends its signal to the command, and again to the group of the command
Handler = Callable[[int, FrameType | None], None]


class Interrupt(KeyboardInterrupt):
    """A signal that ends the command at once."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


class _Counted:
    """A handler that counts signals within SAME_S of each other once, also across blocks."""

    def __init__(self, handler: Handler, last_s: list[float], clock: Callable[[], float]) -> None:
        self._handler, self._clock = handler, clock
        self.last_s = last_s  # shared by nested blocks; empty: no signal yet

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = self._clock()
        if self.last_s and now - self.last_s[0] < SAME_S:
            return
        self.last_s[:] = [now]
        self._handler(number, frame)


def end_at_once(number: int, frame: FrameType | None) -> None:
    raise Interrupt(number)


@contextlib.contextmanager
def handled_by(handler: Handler, clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Handle both signals during the block; signals within half a second count once. Outside of the
    main thread nothing changes.
    """
    here = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in SIGNALS} if here else {}
    kept = {number: old for number, old in before.items() if old is not signal.SIG_IGN}
    outer = next((old for old in kept.values() if isinstance(old, _Counted)), None)
    counted = _Counted(handler, outer.last_s if outer else [], clock)
    for number in kept:
        signal.signal(number, counted)
    try:
        yield
    finally:
        for number, old in kept.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)


def exit_code(interrupt: KeyboardInterrupt) -> int:
    """The exit code, as a shell gives it. An interrupt without a signal was Ctrl-C."""
    return 128 + (interrupt.number if isinstance(interrupt, Interrupt) else signal.SIGINT)


def say(line: str) -> None:
    """A line to standard error from inside a handler, where buffered streams may be in use.

    On a terminal it replaces the line of a progress bar, which is drawn again below it.
    """
    with contextlib.suppress(OSError):
        clear = "\r\x1b[2K" if os.isatty(2) else ""
        os.write(2, f"{clear}{line}\n".encode())
