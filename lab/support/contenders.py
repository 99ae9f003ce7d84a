"""The ways in which lab/gpu/services.py lets background work run beside services.

Workers of a mix with a bound are services, the last worker is background. Every way is a plan of
the same mix; a plan with joints has its own loop, so its background is measured alone in it, too.
Ways in ``APART`` have a process for every worker. Those in ``BOUNDED`` are searched for
(bounded.py): the most background that keeps services within so many times their p99 alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from eclip.core.mix import Mix
from eclip.core.plan import Lane, Plan, Promise, Slack, Turns, unpartitioned
from eclip.core.profile import Profile
from eclip.core.topology import Mask, Topology
from eclip.planner.joints import JointRules, give_way, promise_of
from eclip.planner.policies import with_shares


@dataclass(frozen=True)
class Scene:
    """What plans are made for."""

    mix: Mix
    topology: Topology
    profiles: tuple[Profile, ...]
    grain_ns: int

    @property
    def promises(self) -> Mapping[int, Promise]:
        """Bounds are in ms, so nothing has to be known of a service alone."""
        return {
            index: promise_of(self.mix.workers[index], self.profiles[index], 0.0)
            for index in self.mix.services
        }

    @property
    def background(self) -> int:
        return len(self.mix.workers) - 1

    def part(self, share: float) -> Mask:
        """The far end of the device, as many units as lanes have that are nearest to the share."""
        wanted = share * self.topology.units
        size = min(self.topology.lane_sizes, key=lambda units: abs(units - wanted))
        return self.topology.take(size, range(len(self.topology.slice_units))[::-1])

    def giving_way(self, base: Plan, given: JointRules, policy: str) -> Plan:
        """Background with these rules. Several services yield to each other, least slack first."""
        rules = {self.background: given}
        if len(self.mix.services) > 1 and given.by_slack:
            rules |= {
                index: JointRules(grain_ns=self.grain_ns, depth=given.depth)
                for index in self.mix.services
            }
        made = give_way(base, self.profiles, self.promises, rules)
        return msgspec.structs.replace(made, policy=policy)


def streams(scene: Scene) -> Plan:
    plain = unpartitioned(scene.topology, scene.profiles, scene.mix)
    return give_way(plain, scene.profiles, scene.promises, {})


def priorities(scene: Scene) -> Plan:
    plain = streams(scene)
    lanes = [
        msgspec.structs.replace(lane, priority=int(lane.owner in scene.mix.services))
        for lane in plain.lanes
    ]
    return msgspec.structs.replace(plain, policy="priorities", lanes=tuple(lanes))


def _masks(share: float) -> Callable[[Scene], Plan]:
    """Background on this part of the device, services on the rest."""

    def make(scene: Scene) -> Plan:
        plain, part = streams(scene), scene.part(share)
        rest = scene.topology.full - part
        lanes = [
            Lane(lane.owner, part if lane.owner == scene.background else rest)
            for lane in plain.lanes
        ]
        return msgspec.structs.replace(plain, policy="masks", lanes=tuple(lanes))

    return make


def _segments(scene: Scene) -> Plan:
    """Priorities and our stretches, but nobody looks whether a service is busy."""
    rules = JointRules(yields=None, grain_ns=scene.grain_ns)
    return scene.giving_way(priorities(scene), rules, "segments")


def _yields(depth: int, *, first: bool = False, part: float = 1.0) -> Callable[[Scene], Plan]:
    """``part``: of the usual grain."""

    def make(scene: Scene) -> Plan:
        base = priorities(scene) if first else streams(scene)
        rules = JointRules(grain_ns=round(part * scene.grain_ns), depth=depth)
        return scene.giving_way(base, rules, "yield")

    return make


def _moves(share: float, depth: int = 2) -> Callable[[Scene], Plan]:
    def make(scene: Scene) -> Plan:
        grain_ns, lane = scene.grain_ns, scene.part(share)
        rules = JointRules(None, Slack.PLENTY, lane, grain_ns, depth)
        return scene.giving_way(streams(scene), rules, "move")

    return make


def _launches(kernels: int, depth: int) -> Callable[[Scene], Plan]:
    def make(scene: Scene) -> Plan:
        rules = JointRules(kernels=kernels, depth=depth)
        return scene.giving_way(streams(scene), rules, "launches")

    return make


def _in_turns(make: Callable[[Scene], Plan]) -> Callable[[Scene], Plan]:
    return lambda scene: msgspec.structs.replace(make(scene), sharing=Turns())


def _under_mps(
    make: Callable[[Scene], Plan], share: int = 100, *, below: bool = False
) -> Callable[[Scene], Plan]:
    """Services have all units, background this share in percent, and less priority if ``below``."""

    def plan(scene: Scene) -> Plan:
        last = scene.background
        return with_shares(
            make(scene), (*[100] * last, share), below_normal=(last,) if below else ()
        )

    return plan


WAYS: dict[str, Callable[[Scene], Plan]] = {
    "streams": streams,
    "priorities": priorities,
    "segments": _segments,
    "yield d1": _yields(1),
    "yield d2": _yields(2),
    "yield fine": _yields(2, part=0.5),
    "yield d2 first": _yields(2, first=True),  # with stream priorities besides
    "move half": _moves(0.5),
    "move quarter": _moves(0.25),
    "launches 16/8": _launches(8, 2),
    "launches 4/2": _launches(2, 2),
    "launches 1/1": _launches(1, 1),
    "masks 25": _masks(0.25),
    "masks 50": _masks(0.5),
    "masks 75": _masks(0.75),
}
APART: dict[str, Callable[[Scene], Plan]] = {
    "time-sliced": _in_turns(streams),
    **{f"MPS {share}": _under_mps(streams, share) for share in (25, 50, 75, 100)},
    "MPS priority": _under_mps(streams, below=True),
    "yield time-sliced": _in_turns(_yields(1)),
    "yield MPS": _under_mps(_yields(1)),
}
# By name: times the p99 alone, and how much of that the simulator may use up. On a device tails
# are not the simulator's, so there is a careful plan where there is something to lose.
BOUNDED: dict[str, tuple[float, float]] = {
    "bound 1.1": (1.1, 0.95),
    "bound 1.3": (1.3, 0.95),
    "bound 1.5": (1.5, 0.95),
    "bound 1.5 careful": (1.5, 0.8),
    "bound 2.5": (2.5, 0.95),
    "bound 2.5 careful": (2.5, 0.8),
}
AGAIN = "alone again"  # services alone a second time: how much two runs differ
OURS_APART = ("yield time-sliced", "yield MPS")
# What is claimed of these needs more requests than to tell a baseline: priorities are what p99s are
# held against.
CLAIMED = frozenset(
    (
        *("priorities", "yield d2", "bound 1.3", "bound 1.5", "bound 1.5 careful"),
        *("bound 2.5", "bound 2.5 careful", *OURS_APART),
    )
)
CORE = ("priorities", "yield d1", "yield d2", "move half")
BASELINES = (
    *("streams", "priorities", "segments", "launches 16/8", "launches 4/2", "launches 1/1"),
    *("masks 25", "masks 50", "masks 75"),
)
SWEPT_APART = ("time-sliced", "MPS 25", "MPS 50", "MPS 75", "MPS 100", "MPS priority")
KNOWN = (*WAYS, *BOUNDED, *APART)
