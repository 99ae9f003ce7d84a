"""Progress: reports of long work, and requests to stop it early.

A stop request is no error. The work reads ``stopped`` between two steps, ends early and returns its
results so far; the caller reads ``stopped`` to know that they are not complete. Any thread, and a
signal handler, may request a stop.

``shown`` gives the functions of ``import eclip`` a progress: on a terminal and in a notebook a line
that is written anew, elsewhere nothing. IPython is imported only where a notebook has it already.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

_EVERY_S = 0.2  # between two writings of a line
_WIDTH = 79


class Progress:
    """A progress that shows nothing; a subclass overrides ``phase``, ``part`` and ``warn``."""

    def __init__(self, parent: Progress | None = None) -> None:
        """``parent``: a stop request to it also stops this work."""
        self._stop = threading.Event()
        self._parent = parent

    def phase(self, name: str) -> None:
        """A new phase of the work begins; its share done is 0."""

    def part(self, share: float) -> None:
        """``share`` of the phase is done, 0 to 1."""

    def warn(self, message: str) -> None:
        """Show a warning to the user; the work goes on."""

    def stop(self) -> None:
        """Ask the work to end early and to return its results so far."""
        self._stop.set()

    @property
    def stopped(self) -> bool:
        return self._stop.is_set() or (self._parent is not None and self._parent.stopped)


class ProgressLine(Progress):
    """A progress that writes one line anew: the work, its phase, the part done, the time."""

    def __init__(
        self, what: str, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``write`` replaces the line; an empty one removes it."""
        super().__init__()
        self._what, self._write, self._clock = what, write, clock
        self._began = self._wrote = clock()
        self._phase = ""

    def phase(self, name: str) -> None:
        self._phase = f": {name}"
        self._show(0.0)

    def part(self, share: float) -> None:
        if self._clock() - self._wrote >= _EVERY_S:
            self._show(share)

    def warn(self, message: str) -> None:
        self._write("")
        sys.stderr.write(f"warning: {message}\n")

    def close(self) -> None:
        self._write("")

    def _show(self, share: float) -> None:
        self._wrote = self._clock()
        done = f", {min(share, 1.0):.0%}" if share > 0 else ""
        self._write(f"{self._what}{self._phase}{done}, {self._wrote - self._began:.0f} s")


@contextlib.contextmanager
def shown(given: Progress | None, what: str) -> Iterator[Progress]:
    """The given progress; without one a line for a person who can see it, or a silent progress."""
    write = None if given is not None else _notebook_line() or _terminal_line()
    if write is None:
        yield given or Progress()
        return
    line = ProgressLine(what, write)
    try:
        yield line
    finally:
        line.close()


def _terminal_line() -> Callable[[str], None] | None:
    if sys.stderr is None or not sys.stderr.isatty():
        return None

    def write(text: str) -> None:
        sys.stderr.write(f"\r\x1b[2K{text[:_WIDTH]}")
        sys.stderr.flush()

    return write


def _notebook_line() -> Callable[[str], None] | None:
    """In a notebook, which has imported IPython's kernel."""
    if "ipykernel" not in sys.modules:
        return None
    from IPython.display import display  # type: ignore[import-not-found,unused-ignore]

    shown: list[Any] = []

    def write(text: str) -> None:
        content = {"text/plain": text}
        if shown:
            shown[0].update(content, raw=True)
        elif text:
            shown.append(display(content, raw=True, display_id=True))

    return write
