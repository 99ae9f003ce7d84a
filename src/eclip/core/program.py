"""Program: a plan lowered for execution. Barriers are decided here and nowhere else.

For every kernel a route holds its lane and the lane it must wait on. ``wait_on`` is NO_WAIT where
the predecessor is on the same lane, whose own order suffices, and at the head of a request, which
the worker's user stream orders. Graph builders, the simulator's core and dispatch tables read
these arrays.

A worker with joints has a conduct: its stretches, the lanes it may move to, and its rules. Where it
moves, the barrier is set while running, from where the last stretch went.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from eclip.core.plan import Assignment, Plan
from eclip.core.rules import NO_RULES, Rules, rules_of
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
class Conduct:
    """What one worker does at its joints. Choice 0 is its route; choice i is ``moves[i - 1]``."""

    begins: LaneColumn  # where every stretch begins; the first at 0
    done_ns: LaneColumn  # how far a request alone is at the end of every stretch
    moves: tuple[int, ...]  # lanes
    rules: Rules
    depth: int

    def stretches(self, kernels: int) -> list[range]:
        return [range(start, end) for start, end in pairwise([*self.begins.tolist(), kernels])]


@dataclass(frozen=True)
class Program:
    plan: Plan
    routes: tuple[tuple[Route, ...], ...]  # per variant of the plan, per active worker
    conducts: tuple[Conduct, ...]  # per worker

    def moves_of(self, worker: int) -> list[Route]:
        """Where a worker's reactions may take it, in the order of its choices."""
        kernels = self.plan.workers[worker].kernels
        return [on_one_lane(worker, kernels, lane) for lane in self.conducts[worker].moves]

    def all_routes(self) -> Iterator[Route]:
        """Every way that some kernel may take."""
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
    return Program(plan, routes, tuple(_conduct(plan, index) for index in plan.everyone))


def _conduct(plan: Plan, index: int) -> Conduct:
    joints = plan.workers[index].joints
    if joints is None:
        request_ns = sum(group.predicted_ns for group in plan.main.assignments[index].groups)
        return Conduct(
            begins=np.zeros(1, dtype=np.int64),
            done_ns=np.array([request_ns], dtype=np.int64),
            moves=(),
            rules=NO_RULES,
            depth=1,
        )
    lanes = [reaction.lane for reaction in joints.reactions if reaction.lane is not None]
    moves = tuple(dict.fromkeys(lanes))
    return Conduct(
        begins=np.array([0, *joints.at], dtype=np.int64),
        done_ns=np.cumsum(joints.stretch_ns, dtype=np.int64),
        moves=moves,
        rules=rules_of(joints, moves),
        depth=joints.depth,
    )


def on_one_lane(worker: int, kernels: int, lane: int) -> Route:
    """All kernels of a worker there, as a reaction may ask for."""
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
