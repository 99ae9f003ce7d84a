"""A service's account a second time, in fractions, from what core/credit.py says in words."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

from eclip.core.plan import Promise

NONE, SPENT, EARLY, AUDIT = range(4)
IN_TIME, PAID, LOST, STRICT = range(4)


@dataclass(frozen=True)
class Ended:
    arrival: int
    end: int
    verdict: int


@dataclass
class Account:
    """Fed with requests in the order of their ends."""

    promise: Promise
    credit: Fraction = Fraction(0)
    late: int = 0
    _last_end: int | None = None
    _began: int = SPENT  # the reason with which the period began
    _early: bool = field(default=False)

    def check(self, one: Ended) -> None:
        """The verdict fits what happened so far."""
        fate, reason = divmod(one.verdict - 1, 4)
        late = one.end - one.arrival > self.promise.bound_ns
        if self._last_end is None or one.arrival > self._last_end:
            self._begin(reason)
        self._last_end = one.end
        if reason == EARLY:
            assert self._began == NONE
            self._early = True
        else:
            assert reason == self._began
            assert not self._early, "a period was strict and became free"
            assert not (late and reason == NONE), "late in a free period"
        self.late += late
        if not late:
            assert fate == IN_TIME
            gain = Fraction(round(self.promise.gain * 10**6), 10**6)
            self.credit = min(self.credit + gain, Fraction(5))
            return
        self.credit -= 1
        if self.credit > 0:
            assert fate == PAID
        else:
            assert fate == (STRICT if self._began in (SPENT, AUDIT) else LOST)

    def _begin(self, reason: int) -> None:
        self._early = False
        self._began = NONE if reason == EARLY else reason
        if self.credit <= 0:
            assert reason == SPENT
        else:
            assert reason != SPENT
