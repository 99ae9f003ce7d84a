"""Joints: where a worker may give way, chosen from its profile, and what it does there.

A stretch is what lies between two joints. It takes at most the plan's grain on the worker's own
lane, unless it is one long kernel. Long copies between host and device are cut into parts besides,
and need no joints. ``give_way`` adds joints, promises and the lanes that workers
move to to a plan of any policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np

from eclip.core.mix import LONGEST_BOUND_MS, MixWorker
from eclip.core.plan import FOREIGN, Joints, Lane, Plan, Promise, Rule, Slack
from eclip.core.profile import Profile
from eclip.core.rules import LEVELS
from eclip.core.topology import Mask, Topology
from eclip.errors import UsageError

GRAIN_NS = 150_000


@dataclass(frozen=True)
class JointRules:
    """How one worker gives way: where its joints are, and its rules there by slack.

    A level holds for less slack, too. With more slack than both levels the worker goes on.
    """

    yields: Slack | None = Slack.PLENTY  # the most slack at which it launches nothing; None: never
    moves: Slack | None = None  # ... at which it moves
    lane: Mask | None = None  # where it moves or, without joints, stays; None: all units
    grain_ns: int = GRAIN_NS
    depth: int = 2
    kernels: int | None = None  # a stretch is so many kernels, of any length
    kernels_for: int = 0  # units that its kernels are chosen for; 0: its own kernels
    joints: bool = True

    @property
    def by_slack(self) -> list[tuple[Slack, bool]]:
        """Its rules, the most urgent level first; True: it moves."""
        rules = [
            (slack, moves)
            for slack, moves in ((self.yields, False), (self.moves, True))
            if self.joints and slack is not None
        ]
        return sorted(rules, key=lambda rule: LEVELS[rule[0]])


def far_mask(topology: Topology, units: int) -> Mask:
    """A lane of so many units, from the far end of the device."""
    return topology.take(units, range(len(topology.slice_units) - 1, -1, -1))


def cut_by_time(profile: Profile, units: int, grain_ns: int) -> tuple[int, ...]:
    """Joints such that no piece takes longer than the grain, unless it is a single kernel with the
    copies that go with it."""
    steps = profile.steps
    pieces = steps.pieces(range(len(profile.trace.kernels)))  # as if every kernel were a joint
    took = np.add.reduceat(profile.step_ns_at(units), pieces)
    at = []
    filled = 0.0
    for kernel, apart, took_ns in zip(
        steps.kernel[pieces].tolist(), steps.apart[pieces].tolist(), took.tolist(), strict=True
    ):
        if apart:
            filled = 0.0
            continue
        if filled > 0 and filled + took_ns > grain_ns:
            at.append(kernel)
            filled = 0.0
        filled += took_ns
    return tuple(at)


def stretch_times_ns(profile: Profile, at: Sequence[int]) -> tuple[int, ...]:
    """What each stretch takes on the whole device."""
    took = profile.step_ns_at(profile.sizes[-1])
    cuts = [0, *profile.steps.firsts(at).tolist(), len(took)]
    return tuple(round(float(took[start:end].sum())) for start, end in pairwise(cuts))


def longest_piece_ns(profile: Profile, at: Sequence[int]) -> int:
    """The longest stretch on the whole device, or what is left of it around the parts of copies."""
    took = profile.step_ns_at(profile.sizes[-1])
    return round(float(np.add.reduceat(took, profile.steps.pieces(at)).max()))


def promise_of(
    worker: MixWorker, profile: Profile, p99_alone_ns: float, *, some_ns: int = 0, none_ns: int = 0
) -> Promise:
    """A service's promise in times. Limits of slack matter only to rules that ask for them."""
    if worker.bound is None:
        raise UsageError(f"{worker.name} has no bound, so it is no service")
    if worker.bound.ms is not None:
        bound_ns = worker.bound.ms * 1e6
    else:
        assert worker.bound.times_alone is not None
        bound_ns = worker.bound.times_alone * p99_alone_ns
    if bound_ns > 1e6 * LONGEST_BOUND_MS:
        raise UsageError(f"{worker.name}'s bound of {worker.bound} is longer than a day")
    return Promise(
        bound_ns=max(round(bound_ns), 1),
        request_ns=profile.request_ns[-1],
        some_ns=some_ns,
        none_ns=none_ns,
    )


def give_way(
    plan: Plan,
    profiles: Sequence[Profile],
    promises: Mapping[int, Promise],
    rules: Mapping[int, JointRules],
) -> Plan:
    """The plan with these services' promises, and workers that give way to them, by index."""
    rules = {index: one for index, one in rules.items() if one.joints}
    lanes = list(plan.lanes)
    workers = list(plan.workers)
    floors = plan.mix.floors
    # What a worker without joints has done is known only at the end of its request.
    with_floors = [index for index, floor in enumerate(floors) if floor and index in rules]
    for index, (worker, floor) in enumerate(zip(plan.workers, floors, strict=True)):
        joints = None
        if index in rules:
            joints = _joints(
                plan, index, profiles[index], promises, rules[index], with_floors, lanes
            )
        workers[index] = msgspec.structs.replace(
            worker, joints=joints, promise=promises.get(index), floor=floor
        )
    return msgspec.structs.replace(plan, workers=tuple(workers), lanes=tuple(lanes))


def _joints(
    plan: Plan,
    index: int,
    profile: Profile,
    promises: Mapping[int, Promise],
    given: JointRules,
    with_floors: Sequence[int],
    lanes: list[Lane],
) -> Joints:
    units = min(plan.units(group.lane) for group in plan.main.assignments[index].groups)
    if given.kernels is None:
        at = cut_by_time(profile, units, given.grain_ns)
    else:
        at = tuple(range(given.kernels, len(profile.trace.kernels), given.kernels))
    to = (FOREIGN, *(service for service in sorted(promises) if service != index))
    floors_first: tuple[int, ...] = ()
    if index not in promises and given.by_slack:
        floors_first = tuple(other for other in with_floors if other != index)
    rules = []
    for slack, moves in given.by_slack:
        lane = None
        if moves:
            wanted = Lane(index, given.lane or plan.topology.full)
            if wanted not in lanes:
                lanes.append(wanted)
            lane = lanes.index(wanted)
        rules.append(Rule(to=to, slack=slack, lane=lane))
    return Joints(
        at=at,
        depth=given.depth,
        rules=tuple(rules),
        stretch_ns=stretch_times_ns(profile, at),
        piece_ns=longest_piece_ns(profile, at) if profile.steps.apart.any() else None,
        floors_first=floors_first,
    )
