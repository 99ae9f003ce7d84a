"""Watching lengths at run time, and choosing anew when their distribution has drifted.

The request path only appends a number. Judging, choosing and adopting a new choice happen in a
separate thread, or in the caller of ``poll``. Two signs count as drift: an overflow rate that the
plan makes implausible, and a distance between the distributions that chance does not explain
(Kolmogorov and Smirnov's).
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from eclip.core.lengths import Lengths, lengths_of
from eclip.errors import UsageError
from eclip.varout.estimate import Choice, Decide

_CHANCE = 1e-6  # of a false alarm at one look; there are many looks
_FEWEST = 64  # requests before anything is judged
_WINDOW = 1024


@dataclass(frozen=True)
class Drift:
    why: str
    lengths: Lengths  # of the window


class Watch:
    """The lengths of the last requests beside those that the plan was made for."""

    def __init__(self, planned: Lengths, capacity: int, window: int = _WINDOW) -> None:
        if window < _FEWEST:
            raise UsageError(f"a window needs at least {_FEWEST} requests, not {window}")
        self.planned = planned
        self.capacity = capacity
        self._seen: deque[int] = deque(maxlen=window)

    def observe(self, length: int) -> None:
        """In the request path: constant time, no lock."""
        self._seen.append(length)

    def judge(self) -> Drift | None:
        seen = list(self._seen)
        if len(seen) < _FEWEST:
            return None
        lengths = lengths_of(seen, f"the last {len(seen)} requests")
        expected = self.planned.overflow(self.capacity)
        actual = lengths.overflow(self.capacity)
        # Bernstein's bound holds for every share, the smallest too.
        bound = -math.log(_CHANCE / 2)
        spread = math.sqrt(2 * expected * (1 - expected) * bound / len(seen))
        if abs(actual - expected) > spread + 2 * bound / (3 * len(seen)):
            return Drift(
                f"{actual:.1%} of the last {len(seen)} requests overflowed {self.capacity}, "
                f"planned were {expected:.1%}",
                lengths,
            )
        distance = _distance(self.planned, lengths)
        pooled = 1 / len(seen) + 1 / self.planned.samples
        if distance > math.sqrt(bound * pooled / 2):
            return Drift(
                f"lengths are distributed differently from the plan's (distance {distance:.2f})",
                lengths,
            )
        return None


def _distance(one: Lengths, other: Lengths) -> float:
    """The largest difference between two distribution functions."""
    points = np.union1d(one.values, other.values)

    def shares(lengths: Lengths) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        reached = np.append(0.0, np.cumsum(lengths.weights))
        return reached[np.searchsorted(lengths.values, points, side="right")]

    return float(np.abs(shares(one) - shares(other)).max())


class Replanner:
    """Looks at a watch now and then; a drift gives a new choice and, if it differs, ``adopt``."""

    def __init__(self, watch: Watch, decide: Decide, adopt: Callable[[Choice, str], None]) -> None:
        self.watch = watch
        self.failure: Exception | None = None
        self._decide = decide
        self._adopt = adopt
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def poll(self) -> Choice | None:
        """Judge once; the new choice if one was adopted."""
        drift = self.watch.judge()
        if drift is None:
            return None
        choice = self._decide(drift.lengths)
        changed = choice.capacity != self.watch.capacity
        if changed:
            self._adopt(choice, drift.why)
        # What was seen is the plan's distribution now, even where the same capacity serves it best.
        self.watch.planned = drift.lengths
        self.watch.capacity = choice.capacity
        return choice if changed else None

    def start(self, period_s: float = 1.0) -> None:
        if self._thread is not None:
            raise UsageError("this replanner is running already")

        def work() -> None:
            while not self._stop.wait(period_s):
                try:
                    self.poll()
                except Exception as error:
                    self.failure = error  # raised by close(); serving goes on as planned
                    return

        self._thread = threading.Thread(target=work, name="varout-replanner", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self.failure is not None:
            raise self.failure
