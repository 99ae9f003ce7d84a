"""Placement rules of others on our profiles: how many GPUs each one takes.

Each has the p99 of its own share of a GPU from our simulation in place of its latency model, so
that its bounds hold as ours do, with the same reserve: a service fits a partition if its lone queue
there keeps the bound when requests take a tenth longer, which is what neighbours cost (8-37% on an
H200's disjoint lanes).

- ``first-fit``: services by load, each to the first GPU below a cap. The highest cap at which every
  GPU keeps its bounds in simulation, under our plans.
- ``gpulet``: at most two partitions a GPU, of 20 to 100%; services share a partition in turns.
- ``iGniter``: every service has its own smallest partition in steps of a slice; the GPU on which
  all shares grow least takes it.
- ``ParvaGPU``: segments of 1, 2, 3, 4 or 7 sevenths, one service each, largest first; what a
  segment cannot serve goes to another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from eclip.core.model_key import ModelKey
from eclip.fleet.place.coarse import run_coarsely
from eclip.fleet.place.shop import Bin, Shop
from eclip.progress import Progress

_BESIDE = 1.1
_GPULETS = (0.2, 0.4, 0.5, 0.6, 0.8, 1.0)
_SEVENTHS = (1 / 7, 2 / 7, 3 / 7, 4 / 7, 1.0)
_CAPS = tuple(np.round(np.arange(1.2, 0.09, -0.05), 2).tolist())
_REQUESTS = 400


class Alone:
    """Times and tails of services on parts of one kind of GPU."""

    def __init__(self, shop: Shop, kind: str) -> None:
        self.shop = shop
        self.kind = shop.scorer.kinds[kind]
        self._kept: dict[tuple[int, float, float], bool] = {}
        self._request_ns: dict[tuple[ModelKey, int], float] = {}

    def request_ns(self, service: int, share: float) -> float:
        model = self.shop.fleet.services[service].model
        units = max(1, round(share * self.kind.topology.units))
        if (model, units) not in self._request_ns:
            profile = self.kind.profiles[model]
            took_ns = float((profile.busy_at(units) + profile.gap_at(units)).sum())
            self._request_ns[model, units] = took_ns
        return self._request_ns[model, units]

    def keeps(self, service: int, share: float, rate: float) -> bool:
        key = (service, share, round(rate, 6))
        if key not in self._kept:
            self._kept[key] = self._ask(service, share, rate)
        return self._kept[key]

    def _ask(self, service: int, share: float, rate: float) -> bool:
        took_ns = _BESIDE * self.request_ns(service, share)
        bound_ns = 1e6 * self.shop.fleet.services[service].bound_ms
        if took_ns > bound_ns or took_ns * rate >= 1e9:
            return False
        return keeps_in_turns([(took_ns, bound_ns, rate)])


def keeps_in_turns(queues: Sequence[tuple[float, float, float]]) -> bool:
    """Whether services keep their bounds in one partition that serves one request at a time."""
    random = np.random.default_rng(0)
    seconds = _REQUESTS / min(rate for _, _, rate in queues)
    seconds = min(seconds, 8000 / sum(rate for _, _, rate in queues))
    arrivals = [
        np.sort(random.uniform(0, 1e9 * seconds, max(1, random.poisson(rate * seconds))))
        for _, _, rate in queues
    ]
    first = np.cumsum([0, *map(len, arrivals)])
    request_ns = np.array([took for took, _, _ in queues])
    bound_ns = np.array([bound for _, bound, _ in queues])
    count = len(queues)
    beside = np.ones((count, count)) - np.eye(count)  # two at once take twice as long
    took = run_coarsely(
        np.concatenate(arrivals),
        first,
        request_ns,
        bound_ns,
        np.zeros(count),
        beside,
        True,
        1.01 * bound_ns,
    )
    return all(
        np.percentile(took[start:end], 99, method="higher") <= bound
        for start, end, bound in zip(first[:-1], first[1:], bound_ns, strict=True)
    )


def _instances(shop: Shop) -> list[tuple[int, int]]:
    return shop.cut(shop.instances())


def _rate(shop: Shop, service: int, parts: float) -> float:
    """With the reserve, as our sets are judged."""
    share = parts / shop.parts[service]
    return shop.fleet.services[service].rate_rps * share * (1 + shop.fleet.reserve)


def first_fit(shop: Shop, kind: str, progress: Progress | None = None) -> tuple[int, float]:
    """GPUs, and the cap."""
    sizes = shop.sizes[kind] / np.array(shop.parts)
    items = sorted(_instances(shop), key=lambda item: -sizes[item[0]] * item[1])
    for cap in _CAPS:
        bins: list[Bin] = []
        rooms: list[float] = []
        for service, parts in items:
            size = float(sizes[service]) * parts
            for index, one in enumerate(bins):
                if rooms[index] >= size and service not in one.held:
                    break
            else:
                bins.append(Bin(kind))
                rooms.append(cap)
                index = len(bins) - 1
            bins[index].held[service] = parts
            rooms[index] -= size
        if all(_keeps(shop, one) for one in bins):
            return len(bins), cap
    return len(items), 0.0


def _keeps(shop: Shop, one: Bin) -> bool:
    if len(one.held) == 1:
        return True  # that it keeps its bound alone is given
    if shop.predict(one.kind, one.held) > 1.1:
        return False
    return shop.score(one).kept


def gpulet(shop: Shop, kind: str) -> int:
    alone = Alone(shop, kind)
    wanted = []
    for service, parts in _instances(shop):
        rate = _rate(shop, service, parts)
        share = next((size for size in _GPULETS if alone.keeps(service, size, rate)), 1.0)
        wanted.append((share, service, rate))
    gpus: list[list[tuple[float, list[tuple[int, float]]]]] = []  # partitions: share, services
    for share, service, rate in sorted(wanted, reverse=True):
        if not (
            _join_gpulet(alone, gpus, service, rate) or _open_gpulet(gpus, share, service, rate)
        ):
            gpus.append([(share, [(service, rate)])])
    return len(gpus)


def _join_gpulet(
    alone: Alone,
    gpus: list[list[tuple[float, list[tuple[int, float]]]]],
    service: int,
    rate: float,
) -> bool:
    """Take turns in a partition that exists, the fullest first."""
    tried = 0
    for gpu in reversed(gpus):
        for size, inside in gpu:
            if any(other == service for other, _ in inside):
                continue
            together = [*inside, (service, rate)]
            queues = [
                (
                    _BESIDE * alone.request_ns(other, size),
                    1e6 * alone.shop.fleet.services[other].bound_ms,
                    other_rate,
                )
                for other, other_rate in together
            ]
            if sum(took * its for took, _, its in queues) > 0.95e9:
                continue
            tried += 1
            if keeps_in_turns(queues):
                inside.append((service, rate))
                return True
            if tried >= 12:
                return False
    return False


def _open_gpulet(
    gpus: list[list[tuple[float, list[tuple[int, float]]]]], share: float, service: int, rate: float
) -> bool:
    """Split the GPU whose rest fits best."""
    fitting = [
        (1 - gpu[0][0] - share, index)
        for index, gpu in enumerate(gpus)
        if len(gpu) == 1 and gpu[0][0] + share <= 1 + 1e-9
        and all(other != service for other, _ in gpu[0][1])
    ]  # fmt: skip
    if not fitting:
        return False
    gpus[min(fitting)[1]].append((share, [(service, rate)]))
    return True


def igniter(shop: Shop, kind: str) -> int:
    alone = Alone(shop, kind)
    slices = len(shop.scorer.kinds[kind].topology.slice_units)
    sizes = [count / slices for count in range(1, slices + 1)]
    wanted = []
    for service, parts in _instances(shop):
        rate = _rate(shop, service, parts)
        share = next((size for size in sizes if alone.keeps(service, size, rate)), 1.0)
        wanted.append((share, service))
    gpus: list[list[tuple[float, int]]] = []
    for share, service in sorted(wanted, reverse=True):
        # Every neighbour makes every share grow; all shares grow alike here, so the GPU with the
        # fewest neighbours among those with room grows least.
        fitting = [
            (len(gpu), index)
            for index, gpu in enumerate(gpus)
            if sum(size for size, _ in gpu) + share <= 1 + 1e-9
            and all(other != service for _, other in gpu)
        ]
        if fitting:
            gpus[min(fitting)[1]].append((share, service))
        else:
            gpus.append([(share, service)])
    return len(gpus)


def parvagpu(shop: Shop, kind: str) -> int:
    alone = Alone(shop, kind)
    segments: list[int] = []  # in sevenths
    for service, parts in _instances(shop):
        rate = _rate(shop, service, parts)
        best = [size for size in _SEVENTHS if alone.keeps(service, size, rate)]
        if best:
            segments.append(round(7 * best[0]))
            continue
        count = math.ceil(rate * alone.request_ns(service, 1.0) / 1e9) + 1
        segments += [7] * count
    free: list[int] = []
    for size in sorted(segments, reverse=True):
        for index, room in enumerate(free):
            if room >= size:
                free[index] -= size
                break
        else:
            free.append(7 - size)
    return len(free)
