"""Replanning: decides whether a running fleet is placed again.

The reasons are GPUs that are gone or back, rates that have drifted, and a failed plan, which is
tried again after a while. This module does not use Ray.
"""

from __future__ import annotations

from collections.abc import Callable

from eclip.errors import EclipError
from eclip.fleet.place.spec import Fleet, GpuId, gpu_ids
from eclip.fleet.planning import Planned

AGAIN_AFTER_S = 10.0  # between a failed plan and the next attempt


class Replanning:
    """``fleet``: the GPUs present at the last placement, or attempt."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._again_s: float | None = None

    def gone(self, there: Fleet) -> set[GpuId]:
        return set(gpu_ids(self.fleet)) - set(gpu_ids(there))

    def reason(self, there: Fleet, *, drifted: bool, now_s: float) -> str:
        """The reason to place again now; empty: none."""
        gone, back = self.gone(there), set(gpu_ids(there)) - set(gpu_ids(self.fleet))
        if gone or back:
            names = ", ".join(sorted(map(str, gone or back)))
            return f"{names} {'gone' if gone else 'back'}"
        if drifted:
            return "rates have drifted"
        if self._again_s is not None and now_s > self._again_s:
            return "the last attempt failed"
        return ""

    def plan(self, fleet: Fleet, make: Callable[[Fleet], Planned], now_s: float) -> Planned:
        """A plan for the GPUs present. A refusal by ``make`` is a reason to try again later."""
        self.fleet, self._again_s = fleet, None
        try:
            return make(fleet)
        except EclipError:
            self._again_s = now_s + AGAIN_AFTER_S
            raise
