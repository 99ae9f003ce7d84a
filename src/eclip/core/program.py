"""Program: a plan lowered for execution. Barriers are decided here and nowhere else.

For every kernel a route holds its lane and the lane it must wait on. ``wait_on`` is NO_WAIT where
the predecessor is on the same lane, whose own order suffices, and at the head of a request, which
begins only when the worker's last request has ended. Graph builders and the simulator's core read
these arrays; libeclip's table takes the lanes only.

Where a worker moves at a joint, the barrier is set while running, from where the last stretch went.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from eclip.core.plan import Assignment, Plan
from eclip.core.rules import Rules, rules_of
from eclip.core.trace import Trace
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

    def segments(self, within: range | None = None) -> list[range]:
        """The kernels between two barriers, in order: each segment is on one lane."""
        within = within or range(len(self.lane))
        barriers = np.flatnonzero(self.wait_on != NO_WAIT).tolist()
        inside = [cut for cut in barriers if within.start < cut < within.stop]
        return [range(*ends) for ends in pairwise([within.start, *inside, within.stop])]


@dataclass(frozen=True)
class Program:
    plan: Plan
    routes: tuple[tuple[Route, ...], ...]  # per variant of the plan, per active worker
    rules: tuple[Rules, ...]  # per worker

    def moves_of(self, worker: int) -> list[Route]:
        """Where a worker's rules may take it, in the order of its choices."""
        kernels = self.plan.workers[worker].kernels
        return [on_one_lane(worker, kernels, lane) for lane in self.rules[worker].moves]

    def all_routes(self) -> Iterator[Route]:
        """Every route that some kernel may take."""
        for routes in self.routes:
            yield from routes
        for worker in self.plan.everyone:
            yield from self.moves_of(worker)


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
    return program_of(plan)


def program_of(plan: Plan) -> Program:
    """For a plan that was made from its workers' traces a moment ago."""
    routes = tuple(tuple(_route(part) for part in variant.assignments) for variant in plan.variants)
    return Program(plan, routes, tuple(rules_of(plan, index) for index in plan.everyone))


def on_one_lane(worker: int, kernels: int, lane: int) -> Route:
    """All kernels of a worker there, as a rule may ask for."""
    return Route(
        worker=worker,
        lane=np.full(kernels, lane, dtype=np.int64),
        wait_on=np.full(kernels, NO_WAIT, dtype=np.int64),
    )


def _route(part: Assignment) -> Route:
    lane = np.repeat(
        np.array([group.lane for group in part.groups], dtype=np.int64),
        [group.kernels for group in part.groups],
    )
    wait_on = np.full_like(lane, NO_WAIT)
    switched = np.flatnonzero(lane[1:] != lane[:-1]) + 1
    wait_on[switched] = lane[switched - 1]
    return Route(worker=part.worker, lane=lane, wait_on=wait_on)
