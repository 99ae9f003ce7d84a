"""Progress: where long work says how far it is, and where it is asked to end early.

A stop request is no error. Whoever does the work looks at ``stopped`` between two steps, ends early
and returns what it has; the caller knows by ``stopped`` that this is not all. Any thread, and a
signal handler, may ask for a stop.
"""

from __future__ import annotations

import threading


class Progress:
    """A progress that shows nothing; a subclass overrides ``phase``, ``part`` and ``warn``."""

    def __init__(self, parent: Progress | None = None) -> None:
        """A stop request to ``parent`` counts here, too."""
        self._stop = threading.Event()
        self._parent = parent

    def phase(self, name: str) -> None:
        """Another part of the work begins; the share done starts again at 0."""

    def part(self, share: float) -> None:
        """This share of the phase is done, 0 to 1."""

    def warn(self, message: str) -> None:
        """Something a person should know, which does not end the work."""

    def stop(self) -> None:
        """Ask the work to end early and to return what it has."""
        self._stop.set()

    @property
    def stopped(self) -> bool:
        return self._stop.is_set() or (self._parent is not None and self._parent.stopped)
