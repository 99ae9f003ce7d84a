"""The ways in which bench/gpu/services.py lets background work run beside services.

Workers of a mix with a bound are services, the last worker is background. Every way is a plan of
the same mix; a plan with joints has its own loop, so its background is measured alone in it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from eclip.artefacts.mix import Mix
from eclip.artefacts.plan import Lane, Plan, Promise, Slack, unpartitioned
from eclip.artefacts.profile import Profile
from eclip.artefacts.topology import Mask, Topology
from eclip.planning.joints import Manner, give_way, promise_of


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

    def giving_way(self, base: Plan, manner: Manner, policy: str) -> Plan:
        """Background in this manner. Several services yield to each other, least slack first."""
        manners = {self.background: manner}
        if len(self.mix.services) > 1 and manner.ways:
            manners |= {
                index: Manner(grain_ns=self.grain_ns, depth=manner.depth)
                for index in self.mix.services
            }
        made = give_way(base, self.profiles, self.promises, manners)
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


def masks(scene: Scene) -> Plan:
    """Background on half of the device, services on the other."""
    plain = streams(scene)
    half = scene.part(0.5)
    lanes = [
        Lane(lane.owner, half if lane.owner == scene.background else scene.topology.full - half)
        for lane in plain.lanes
    ]
    return msgspec.structs.replace(plain, policy="masks", lanes=tuple(lanes))


def _segments(scene: Scene) -> Plan:
    """Priorities and our stretches, but nobody looks whether a service is busy."""
    manner = Manner(ways=(), grain_ns=scene.grain_ns)
    return scene.giving_way(priorities(scene), manner, "segments")


def _yields(depth: int, *, first: bool = False) -> Callable[[Scene], Plan]:
    def make(scene: Scene) -> Plan:
        base = priorities(scene) if first else streams(scene)
        return scene.giving_way(base, Manner(grain_ns=scene.grain_ns, depth=depth), "yield")

    return make


def _moves(share: float, depth: int = 2) -> Callable[[Scene], Plan]:
    def make(scene: Scene) -> Plan:
        ways = ((Slack.PLENTY, scene.part(share)),)
        manner = Manner(ways=ways, grain_ns=scene.grain_ns, depth=depth)
        return scene.giving_way(streams(scene), manner, "move")

    return make


def _launches(kernels: int, depth: int) -> Callable[[Scene], Plan]:
    def make(scene: Scene) -> Plan:
        manner = Manner(kernels=kernels, depth=depth)
        return scene.giving_way(streams(scene), manner, "launches")

    return make


WAYS: dict[str, Callable[[Scene], Plan]] = {
    "streams": streams,
    "priorities": priorities,
    "segments": _segments,
    "yield d1": _yields(1),
    "yield d2": _yields(2),
    "yield d2 first": _yields(2, first=True),  # with stream priorities besides
    "move half": _moves(0.5),
    "move quarter": _moves(0.25),
    "launches 16/8": _launches(8, 2),
    "launches 4/2": _launches(2, 2),
    "launches 1/1": _launches(1, 1),
    "masks": masks,
}
CORE = ("priorities", "yield d1", "yield d2", "move half")
