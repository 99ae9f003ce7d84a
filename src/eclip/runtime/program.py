"""Program: a plan lowered for execution. Barriers are decided here and nowhere else.

For every kernel a route holds its lane and the lane it must wait on. ``wait_on`` is NO_WAIT where
the predecessor is on the same lane, whose own order suffices, and at the head of a request, which
the worker's user stream orders. Graph builders, the simulator's core and dispatch tables read
these arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from eclip.artefacts.plan import Assignment, Plan
from eclip.artefacts.trace import Trace
from eclip.errors import MismatchError

NO_WAIT = -1
LaneColumn = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Route:
    """One worker's way through the lanes in one variant."""

    worker: int
    lane: LaneColumn
    wait_on: LaneColumn

    @property
    def barriers(self) -> int:
        return int(np.count_nonzero(self.wait_on != NO_WAIT))

    def segments(self) -> list[range]:
        """The kernels between two barriers, in order: each segment is on one lane."""
        cuts = [0, *np.flatnonzero(self.wait_on != NO_WAIT).tolist(), len(self.lane)]
        return [range(start, end) for start, end in pairwise(cuts)]


@dataclass(frozen=True)
class Program:
    plan: Plan
    routes: tuple[tuple[Route, ...], ...]  # per variant of the plan, per active worker


def lower(plan: Plan, traces: Sequence[Trace]) -> Program:
    """The program of a plan for these traces, one per worker; other traces are refused."""
    if len(traces) != len(plan.workers):
        raise MismatchError(f"the plan has {len(plan.workers)} workers, {len(traces)} traces given")
    for worker, trace in zip(plan.workers, traces, strict=True):
        expected = (worker.model, worker.kernels, plan.fingerprint.traces.get(str(worker.model)))
        if (trace.model, len(trace.kernels), trace.digest) != expected:
            raise MismatchError(
                f"the plan for worker {worker.name} was made for other kernels than those of "
                f"{trace.model}; plan again from this profile"
            )
    return Program(plan, routes_of(plan))


def routes_of(plan: Plan) -> tuple[tuple[Route, ...], ...]:
    """Per variant, per active worker: for plans that were made from these traces a moment ago."""
    return tuple(tuple(_route(part) for part in variant.assignments) for variant in plan.variants)


def _route(part: Assignment) -> Route:
    lane = np.repeat(
        np.array([group.lane for group in part.groups], dtype=np.int64),
        [group.kernels for group in part.groups],
    )
    wait_on = np.full_like(lane, NO_WAIT)
    switched = np.flatnonzero(lane[1:] != lane[:-1]) + 1
    wait_on[switched] = lane[switched - 1]
    return Route(worker=part.worker, lane=lane, wait_on=wait_on)
