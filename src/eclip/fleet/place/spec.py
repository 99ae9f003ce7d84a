"""Fleet: the services and GPUs of a fleet, as in its file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import msgspec

from eclip.core.model_key import ModelKey
from eclip.errors import UsageError

MOST_GPUS = 100_000
# A set is simulated for a few hundred requests of each service. They do not show how near the GPU
# is to its limit: in some minutes a tenth more requests come than in others.
RESERVE = 0.1


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """Requests at a rate, with a bound on their p99."""

    name: str
    model: ModelKey
    rate_rps: float
    bound_ms: float
    weight: float = 1.0  # value of a request within its bound
    instances: int = 1  # at least; on different machines if there are two


class GpuGroup(msgspec.Struct, frozen=True, kw_only=True):
    """``count`` GPUs of one kind in one machine."""

    machine: str
    kind: str
    count: int = 1


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    services: tuple[Service, ...]
    gpus: tuple[GpuGroup, ...]
    reserve: float = RESERVE  # services are placed for (1 + reserve) times their rates

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(group.kind for group in self.gpus))

    @property
    def count(self) -> int:
        """The number of GPUs."""
        return sum(group.count for group in self.gpus)


class GpuId(msgspec.Struct, frozen=True, order=True):
    """One GPU of the fleet."""

    machine: str
    kind: str
    index: int

    def __str__(self) -> str:
        return f"{self.machine}/{self.kind}/{self.index}"


def gpu_ids(fleet: Fleet) -> list[GpuId]:
    return [
        GpuId(group.machine, group.kind, index)
        for group in fleet.gpus
        for index in range(group.count)
    ]


def check_fleet(fleet: Fleet) -> Fleet:
    """The fleet, unless something in it means nothing."""
    if not fleet.services:
        raise UsageError("the fleet has no services; add a [[service]]")
    if not fleet.gpus:
        raise UsageError("the fleet has no GPUs; add a [[gpus]]")
    if not all(service.name for service in fleet.services):
        raise UsageError("a service has no name; give it one")
    if not all(group.machine for group in fleet.gpus):
        raise UsageError("the machine of some GPUs has no name; give it one")
    _check_unique("service", (service.name for service in fleet.services))
    _check_unique("GPUs of", (f"{group.machine}/{group.kind}" for group in fleet.gpus))
    for group in fleet.gpus:
        if group.count < 1:
            raise UsageError(f"machine {group.machine!r}: a count of GPUs starts at 1")
    for service in fleet.services:
        for what, value in (("rate", service.rate_rps), ("weight", service.weight)):
            if not 0 < value < math.inf:
                raise UsageError(f"service {service.name!r}: a {what} is a number above 0")
        if service.instances < 1:
            raise UsageError(f"service {service.name!r}: instances start at 1")
        if service.instances > fleet.count:
            raise UsageError(
                f"service {service.name!r} wants {service.instances} instances, each on a GPU of "
                f"its own, and the fleet has {fleet.count}"
            )
    if not 0 <= fleet.reserve <= 1:
        raise UsageError(
            f"a reserve is a part of the rates, 0 to 1 (0.1: a tenth), not {fleet.reserve:g}"
        )
    if fleet.count > MOST_GPUS:
        raise UsageError(f"a fleet has at most {MOST_GPUS} GPUs, not {fleet.count}")
    return fleet


def _check_unique(what: str, names: Iterable[str]) -> None:
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise UsageError(f"two entries are of {what} {twice[0]!r}; give each its own name")
