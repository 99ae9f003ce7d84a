"""Progress: reports of long work, and requests to stop it early.

A stop request is no error. The work reads ``stopped`` between two steps, ends early and returns its
results so far; the caller reads ``stopped`` to know that they are not complete. Any thread, and a
signal handler, may request a stop.
"""

from __future__ import annotations

import threading


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
