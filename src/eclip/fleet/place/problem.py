"""Packing problem: a fleet with its scores, and the bins that a packing is made of.

A service's rate is cut into equal *parts*; an instance serves some of them. A *bin* is one GPU: its
kind, and how many parts of which services it holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from eclip.errors import UsageError, unknown_name
from eclip.fleet.place.scores import CLEARLY, Member, Members, Scorer, SetScore, may_fit, rounded_up
from eclip.fleet.place.spec import Fleet, GpuId, Service

OBJECTIVES = ("fewest", "goodput", "energy")
PARTS = 4
_SURE = 0.8  # p99 over bound of a service alone, by estimate: need not be simulated
_MOST_OFF = 1.5  # times an estimate: one set in twenty is further off
_MOST_INSTANCES = 10_000  # of one service
_SMALL_FLEET = 12  # services

Held = dict[int, int]  # service → parts


@dataclass
class Bin:
    """A GPU in the making. ``gpu``: the one it is already; None: any free one of its kind."""

    kind: str
    held: Held = field(default_factory=dict)
    gpu: GpuId | None = None

    def copy(self) -> Bin:
        return Bin(self.kind, dict(self.held), self.gpu)


@dataclass
class Packing:
    bins: list[Bin]
    left: Held  # parts that stand nowhere

    def copy(self) -> Packing:
        return Packing([one.copy() for one in self.bins], dict(self.left))


class PackingProblem:
    """A fleet with its scores: sizes, values and predictions for bins.

    All sets are judged with the fleet's reserve: ``member`` is the one place that adds it.
    ``estimated``: the simulator is never asked in between; a day has too many sets for that.
    """

    def __init__(
        self,
        fleet: Fleet,
        scorer: Scorer,
        objective: str,
        parts: int = PARTS,
        estimated: bool = False,
    ) -> None:
        if objective not in OBJECTIVES:
            raise unknown_name("objective", objective, OBJECTIVES)
        self.fleet = fleet
        self.scorer = scorer
        self.objective = objective
        self.estimated = estimated
        for kind in fleet.kinds:
            scorer.measure_pairs(kind, {service.model for service in fleet.services})
        self.least = [least_instances(service, scorer, fleet) for service in fleet.services]
        if objective == "goodput":  # rates that the fleet cannot hold are refused
            self.least = [min(least, fleet.count) for least in self.least]
        self.parts = [parts * least for least in self.least]
        self._members: dict[tuple[int, int], Member] = {}
        self.sizes = {
            kind: np.array(
                [
                    service.rate_rps * scorer.kinds[kind].request_ns(service.model) / 1e9
                    for service in fleet.services
                ]
            )
            for kind in fleet.kinds
        }
        self.tightness = np.array(
            [
                scorer.kinds[fleet.kinds[0]].request_ns(service.model) / service.bound_ms
                for service in fleet.services
            ]
        )

    def members(self, held: Held) -> Members:
        return tuple(sorted(self.member(*item) for item in held.items()))

    def offered(self, held: Held) -> Members:
        """The same at the rates that come, without the reserve."""
        return tuple(sorted(self.offered_member(*item) for item in held.items()))

    def offered_member(self, service: int, parts: int) -> Member:
        return _member_of(self.fleet.services[service], parts / self.parts[service])

    def member(self, service: int, parts: int) -> Member:
        key = (service, parts)
        if key not in self._members:
            share = parts / self.parts[service]
            self._members[key] = _member_of(self.fleet.services[service], share, self.fleet.reserve)
        return self._members[key]

    def predict(self, kind: str, held: Held, off: float = 1.0) -> float:
        """p99 over bound: the simulator's, where the set was simulated, or an estimate times
        ``off``. In a small fleet the simulator is asked where the estimate is not clear: few sets
        are in question."""
        members = self.members(held)
        known = self.scorer.scores.get((kind, members))
        if known is not None:
            return known.worst
        estimate = off * self.scorer.estimate(kind, members)
        small = len(self.fleet.services) <= _SMALL_FLEET and not self.estimated
        if small and 1 < estimate <= CLEARLY:
            return self.scorer.score(kind, members).worst
        return estimate

    def is_known(self, kind: str, held: Held) -> bool:
        """Whether the set was simulated."""
        return (kind, self.members(held)) in self.scorer.scores

    def off(self, one: Bin) -> float:
        """How much worse a bin was simulated than estimated: much of that holds for its parts."""
        key = (one.kind, self.members(one.held))
        known = self.scorer.scores.get(key)
        estimate = self.scorer.estimate(*key)
        if known is None or not 0 < estimate < math.inf:
            return 1.0
        return min(max(known.worst / estimate, 1.0), _MOST_OFF)

    def fits(self, one: Bin, service: int, parts: int) -> bool:
        """Whether a bin may take parts of a service that it does not hold yet."""
        if service in one.held:
            return False
        return self.predict(one.kind, {**one.held, service: parts}) <= 1

    def score(self, one: Bin) -> SetScore:
        return self.scorer.score(one.kind, self.members(one.held))

    def size(self, kind: str, held: Held) -> float:
        """Time that requests would take one after another, as a part of all time."""
        sizes = self.sizes[kind]
        return float(
            sum(sizes[service] * parts / self.parts[service] for service, parts in held.items())
        )

    def value(self, held: Held) -> float:
        """Weighted requests/s."""
        services = self.fleet.services
        return sum(
            services[service].weight * services[service].rate_rps * parts / self.parts[service]
            for service, parts in held.items()
        )

    def cost(self, one: Bin) -> float:
        """The cost of a bin: 1 for a GPU, or its watts for the objective energy."""
        if self.objective != "energy":
            return 1.0
        watts = self.scorer.kinds[one.kind].calibration.power.idle_w
        for service, parts in one.held.items():
            asked = self.fleet.services[service]
            rate = asked.rate_rps * parts / self.parts[service]
            watts += rate * self.scorer.joules(one.kind, asked.model)
        return watts

    def instances(self) -> Held:
        """All parts of all services."""
        return dict(enumerate(self.parts))

    def cut(self, left: Held) -> list[tuple[int, int]]:
        """Parts left over as instances: as few as the services need, alike in size."""
        items = []
        for service, parts in left.items():
            count = math.ceil(parts * self.least[service] / self.parts[service])
            items += [(service, (parts + step) // count) for step in range(count)]
        return items


def _member_of(service: Service, share: float, reserve: float = 0.0) -> Member:
    rate_rps = rounded_up(service.rate_rps * share * (1 + reserve))
    return Member(service.model, rate_rps, service.bound_ms)


def least_instances(service: Service, scorer: Scorer, fleet: Fleet) -> int:
    """The fewest instances that keep the bound, each with a GPU of the best kind to itself."""
    kinds = fleet.kinds
    fastest = min(scorer.kinds[kind].request_ns(service.model) for kind in kinds)
    if fastest > service.bound_ms * 1e6:
        best = min(kinds, key=lambda kind: scorer.kinds[kind].request_ns(service.model))
        raise UsageError(
            f"service {service.name!r} cannot keep a bound of {service.bound_ms:g} ms: one request "
            f"takes {fastest / 1e6:.2f} ms with a {best} to itself"
        )
    count = max(service.instances, math.ceil(service.rate_rps * fastest / 1e9))
    while count <= _MOST_INSTANCES:
        member = _member_of(service, 1 / count, fleet.reserve)
        for kind in kinds:
            if not may_fit(scorer.kinds[kind], (member,)):
                continue
            worst = scorer.estimate(kind, (member,))
            if worst <= _SURE or (worst <= 1 and scorer.score(kind, (member,)).kept):
                return count
        if service.rate_rps / count < 1e-3 * service.bound_ms:  # its queue is always empty
            break
        count = max(count + 1, round(1.1 * count))
    raise UsageError(
        f"service {service.name!r} cannot keep a bound of {service.bound_ms:g} ms at any number of "
        f"instances, nor fit; ask for a longer bound or a smaller batch"
    )


def together(items: Iterable[tuple[int, int]]) -> Held:
    held: Held = {}
    for service, parts in items:
        held[service] = held.get(service, 0) + parts
    return held


def sum_of(parts: Iterable[Held]) -> Held:
    return together(item for held in parts for item in held.items())
