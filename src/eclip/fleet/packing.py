"""Packing: which instances stand together on which kind of GPU, found by local search.

A service's rate is cut into equal *parts*; an instance serves some of them. A *bin* is one GPU: its
kind, and how many parts of which services it holds. The search takes a few bins apart, fills them
anew in another random order, and keeps what is no worse. It goes by estimates (``scores.py``), and
from time to time asks the simulator about the bins that changed: a bin that does not keep its
bounds gives instances away until one does. What is returned was simulated, bin by bin.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from eclip.errors import UsageError, unknown_name
from eclip.fleet.scores import Member, Members, Scorer, SetScore, may_fit, rounded_up
from eclip.fleet.spec import Fleet, GpuId, Service
from eclip.progress import Progress

OBJECTIVES = ("fewest", "goodput", "energy")
PARTS = 4
_MISSES = 10  # instances in a row that find no room: then a bin counts as full
_TAKEN_APART = (2, 3, 4)  # bins at once
_LOOKED_AT = 8  # other bins that an instance left over is offered to
_REPAIRS = 12  # rounds of simulating what changed
_SURE = 0.8  # p99 over bound of a service alone, by estimate: need not be simulated
_MOST_INSTANCES = 10_000  # of one service

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


class Shop:
    """A fleet with its scores: sizes, values and predictions for bins."""

    def __init__(self, fleet: Fleet, scorer: Scorer, objective: str, parts: int = PARTS) -> None:
        if objective not in OBJECTIVES:
            raise unknown_name("objective", objective, OBJECTIVES)
        self.fleet = fleet
        self.scorer = scorer
        self.objective = objective
        self.least = [least_instances(service, scorer, fleet.kinds) for service in fleet.services]
        if objective == "goodput":  # what is more than the fleet can hold is refused, not required
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

    def member(self, service: int, parts: int) -> Member:
        key = (service, parts)
        if key not in self._members:
            asked = self.fleet.services[service]
            rate = rounded_up(asked.rate_rps * parts / self.parts[service])
            self._members[key] = Member(asked.model, rate, asked.bound_ms)
        return self._members[key]

    def predict(self, kind: str, held: Held) -> float:
        """p99 over bound: the simulator's, where the set was simulated, or an estimate."""
        members = self.members(held)
        known = self.scorer.scores.get((kind, members))
        return self.scorer.estimate(kind, members) if known is None else known.worst

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
        """What a bin costs: a GPU, or for the objective energy its watts."""
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


def least_instances(service: Service, scorer: Scorer, kinds: Sequence[str]) -> int:
    """The fewest instances that keep the bound, each with a GPU of the best kind to itself."""
    fastest = min(scorer.kinds[kind].request_ns(service.model) for kind in kinds)
    if fastest > service.bound_ms * 1e6:
        best = min(kinds, key=lambda kind: scorer.kinds[kind].request_ns(service.model))
        raise UsageError(
            f"service {service.name!r} cannot keep a bound of {service.bound_ms:g} ms: one request "
            f"takes {fastest / 1e6:.2f} ms with a {best} to itself"
        )
    count = max(service.instances, math.ceil(service.rate_rps * fastest / 1e9))
    while count <= _MOST_INSTANCES:
        member = Member(service.model, rounded_up(service.rate_rps / count), service.bound_ms)
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


class Packer:
    """One local search, seeded. ``free``: GPUs of every kind that may still be opened."""

    def __init__(self, shop: Shop, free: dict[str, int], seed: int | Sequence[int]) -> None:
        self.shop = shop
        self.free = dict(free)
        self.random = np.random.default_rng(seed)

    # --- Filling ---

    def order(self, items: Iterable[tuple[int, int]], kind: str) -> list[tuple[int, int]]:
        """Large and hard ones first, by and large; for goodput, what gives most for its time."""
        shop, items = self.shop, list(items)
        services = np.array([service for service, _ in items], dtype=np.int64)
        parts = np.array([part for _, part in items], dtype=np.float64)
        size = shop.sizes[kind][services] * parts / np.array(shop.parts)[services]
        if shop.objective == "goodput":
            value = [shop.value({service: part}) for service, part in items]
            key = np.array(value) / size * self.random.uniform(0.5, 1.0, len(items))
        else:
            blend = self.random.choice([0.0, 0.0, 0.5, 1.0])
            key = size * (shop.tightness[services] ** blend)
            key *= self.random.uniform(self.random.choice([0.3, 0.9]), 1.0, len(items))
        return [items[index] for index in np.argsort(-key, kind="stable")]

    def fill(self, one: Bin, items: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Put into the bin what fits, in this order; returns what does not."""
        left, misses = [], 0
        for position, (service, parts) in enumerate(items):
            if misses >= _MISSES:
                left += items[position:]
                break
            fitting = self._fitting_parts(one, service, parts)
            if fitting:
                one.held[service] = fitting
                misses = 0
            else:
                misses += 1
            if fitting < parts:
                left.append((service, parts - fitting))
        return left

    def _fitting_parts(self, one: Bin, service: int, parts: int) -> int:
        """All or nothing; for goodput also some."""
        shop = self.shop
        if service in one.held:
            return 0
        if shop.fits(one, service, parts):
            return parts
        if shop.objective == "goodput":
            for fewer in range(parts - 1, 0, -1):
                if shop.fits(one, service, fewer):
                    return fewer
        return 0

    def open_bins(self, items: list[tuple[int, int]], most: int | None = None) -> Packing:
        """Fill new bins one after another, each of the kind that takes most for its cost."""
        bins: list[Bin] = []
        while items and len(bins) != most:
            kinds = [kind for kind, count in self.free.items() if count > 0]
            trials = []
            for kind in kinds:
                one = Bin(kind)
                left = self.fill(one, self.order(items, kind))
                if one.held:
                    trials.append((self._worth(one), one, left))
            if not trials:
                break
            _, one, items = max(trials, key=lambda trial: trial[0])
            self.free[one.kind] -= 1
            bins.append(one)
        return Packing(bins, _together(items))

    def _worth(self, one: Bin) -> float:
        """What a bin holds for its cost, by one yardstick for all kinds."""
        shop = self.shop
        if shop.objective == "goodput":
            return shop.value(one.held)
        return shop.size(shop.fleet.kinds[0], one.held) / shop.cost(one)

    # --- Searching ---

    def improve(self, packing: Packing, steps: int, enough: Callable[[], bool]) -> Packing:
        for _ in range(steps):
            if enough() or not packing.bins:
                break
            packing = self._step(packing)
        return packing

    def _step(self, packing: Packing) -> Packing:
        """Take a few bins apart and fill them anew; the result if it is no worse."""
        chosen = self._choose(packing)
        old = [packing.bins[index] for index in chosen]
        others = [one for index, one in enumerate(packing.bins) if index not in set(chosen)]
        free = dict(self.free)
        for one in old:
            self.free[one.kind] += 1
        items = self.shop.cut(_sum([packing.left, *(one.held for one in old)]))
        most = None if self.shop.objective == "goodput" else len(old) - 1
        made = self.open_bins(items, most)
        made.bins = _keep_gpus(made.bins, old)
        touched: list[tuple[Bin, Held]] = []
        if made.left and self.shop.objective != "goodput":
            touched = self._spread(made, others)
            if made.left:
                more = self.open_bins(self.shop.cut(made.left))
                made = Packing(made.bins + _keep_gpus(more.bins, old[len(made.bins) :]), more.left)
        if self._better(made, old, packing.left):
            return Packing(others + made.bins, made.left)
        for one, before in touched:
            one.held = before
        self.free = free
        return packing

    def _choose(self, packing: Packing) -> list[int]:
        count = min(int(self.random.choice(_TAKEN_APART)), len(packing.bins))
        chosen = set(self.random.choice(len(packing.bins), count, replace=False).tolist())
        if self.random.random() < 0.6:  # a bin with little in it may be done without
            sample = self.random.choice(len(packing.bins), min(12, len(packing.bins)), False)
            chosen.pop()
            chosen.add(int(min(sample, key=lambda index: self._worth(packing.bins[index]))))
        return sorted(chosen)

    def _spread(self, made: Packing, others: list[Bin]) -> list[tuple[Bin, Held]]:
        """Offer what is left to bins that were not taken apart, whole or in two. Returns those that
        took something, with what they held before."""
        touched: list[tuple[Bin, Held]] = []
        if not others:
            return touched
        for service, parts in self.shop.cut(made.left):
            sample = self.random.choice(len(others), min(_LOOKED_AT, len(others)), False)
            wanted = parts
            for one in [*made.bins, *(others[index] for index in sample)]:
                for size in dict.fromkeys((wanted, wanted // 2)):
                    if size and self.shop.fits(one, service, size):
                        if not any(one is seen for seen, _ in touched):
                            touched.append((one, dict(one.held)))
                        one.held[service] = size
                        wanted -= size
                        break
                if not wanted:
                    break
            made.left[service] -= parts - wanted
            if not made.left[service]:
                del made.left[service]
            if wanted:
                break  # it needs a bin anyway
        return touched

    def _better(self, made: Packing, old: list[Bin], left: Held) -> bool:
        shop = self.shop
        if shop.objective == "goodput":
            new = sum(shop.value(one.held) for one in made.bins)
            return new >= sum(shop.value(one.held) for one in old) - 1e-9
        if shop.size(shop.fleet.kinds[0], made.left) > shop.size(shop.fleet.kinds[0], left) + 1e-9:
            return False
        gain = sum(map(shop.cost, old)) - sum(map(shop.cost, made.bins))
        if abs(gain) > 1e-9 or len(made.left) < len(left):
            return gain > 0 or len(made.left) < len(left)
        # Of equals, the more uneven: what holds little may go next.
        return self._evenness(made.bins) <= self._evenness(old) + 1e-12

    def _evenness(self, bins: Sequence[Bin]) -> float:
        return -sum(self._worth(one) ** 2 for one in bins)

    def shrink(self, packing: Packing, failures: int = 6) -> Packing:
        """Give back GPUs whose instances find room on others, until some in a row do not."""
        bins = sorted(packing.bins, key=self._worth)
        failed = 0
        while failed < failures and len(bins) > 1:
            one, others = bins[failed], bins[:failed] + bins[failed + 1 :]
            before = [(other, dict(other.held)) for other in others]
            if self.offer(list(one.held.items()), others):
                for other, held in before:
                    other.held = held
                failed += 1
            else:
                self.close(one)
                bins = others
        return Packing(bins, packing.left)

    # --- Asking the simulator ---

    def verify(self, packing: Packing, progress: Progress) -> Packing:
        """The packing with every bin simulated and its bounds kept; what finds no room is left."""
        shop = self.shop
        for _ in range(_REPAIRS):
            keys = [(one.kind, shop.members(one.held)) for one in packing.bins]
            scores = shop.scorer.score_all(keys, progress)
            broken = [
                one for one, score in zip(packing.bins, scores, strict=True) if not score.kept
            ]
            if not broken:
                break
            for one in broken:
                self.give_away(one, packing.left)
            packing.bins = [one for one in packing.bins if one.held or self.close(one)]
            items = shop.cut(packing.left)
            items = self.offer(items, packing.bins)
            more = self.open_bins(items)
            packing = Packing(packing.bins + more.bins, more.left)
        else:
            packing = self._drop_broken(packing)
        return packing

    def give_away(self, one: Bin, left: Held) -> None:
        """Take out the smallest instances until the rest is expected to keep its bounds."""
        sizes = self.shop.sizes[one.kind]
        while one.held and self.shop.predict(one.kind, one.held) > 1:
            trials = {
                service: self.shop.predict(one.kind, _without(one.held, service))
                for service in one.held
                if len(one.held) > 1
            }
            enough = [service for service, worst in trials.items() if worst <= 1]
            candidates = enough or list(trials) or list(one.held)
            service = min(candidates, key=lambda held: sizes[held] * one.held[held])
            parts = one.held.pop(service)
            left[service] = left.get(service, 0) + parts

    def offer(self, items: list[tuple[int, int]], bins: Sequence[Bin]) -> list[tuple[int, int]]:
        left = []
        for service, parts in items:
            sample = self.random.choice(len(bins), min(3 * _LOOKED_AT, len(bins)), False)
            for index in sample:
                if self.shop.fits(bins[index], service, parts):
                    bins[index].held[service] = parts
                    break
            else:
                left.append((service, parts))
        return left

    def close(self, one: Bin) -> bool:
        self.free[one.kind] += 1
        return False

    def _drop_broken(self, packing: Packing) -> Packing:
        kept = []
        for one in packing.bins:
            if self.shop.score(one).kept:
                kept.append(one)
                continue
            packing.left = _sum([packing.left, one.held])
            self.close(one)
        return Packing(kept, packing.left)


def pack(
    shop: Shop,
    free: dict[str, int],
    *,
    start: Packing | None = None,
    seconds: float,
    steps: int | None = None,
    seed: int = 0,
    progress: Progress,
) -> Packing:
    """The best packing found in the time, or with exactly so many steps of the search."""
    deadline = time.monotonic() + seconds
    packer = Packer(shop, free, seed)

    def enough_by(share: float) -> Callable[[], bool]:
        until = deadline - (1 - share) * seconds
        return lambda: progress.stopped or (steps is None and time.monotonic() > until)

    progress.phase("filling GPUs")
    packing = start.copy() if start is not None else Packing([], shop.instances())
    items = packer.offer(shop.cut(packing.left), packing.bins) if packing.bins else None
    more = packer.open_bins(shop.cut(packing.left) if items is None else items)
    packing = Packing(packing.bins + more.bins, more.left)
    rounds = 4
    best: tuple[tuple[float, float], Packing] | None = None
    for number in range(rounds):
        progress.phase("searching")
        share = (number + 1) / (rounds + 1)
        count = 10**9 if steps is None else -(-steps // rounds)
        packing = packer.improve(packing, count, enough_by(share))
        progress.phase("simulating what changed")
        packing = packer.verify(packing, progress)
        value = _value(shop, packing)
        if best is None or value < best[0]:
            best = (value, packing.copy())
        if enough_by(1.0)():
            break
    assert best is not None
    if best[1].left and shop.objective != "goodput":
        names = [shop.fleet.services[service].name for service in best[1].left]
        raise UsageError(
            f"the fleet's {shop.fleet.count} GPUs do not hold all services within their bounds: no "
            f"room for {', '.join(names[:3])}{' and others' if len(names) > 3 else ''}; add GPUs, "
            f"or take the objective goodput"
        )
    return best[1]


def _value(shop: Shop, packing: Packing) -> tuple[float, float]:
    """The less the better."""
    if shop.objective == "goodput":
        return (-sum(shop.value(one.held) for one in packing.bins), 0.0)
    return (shop.value(packing.left), sum(map(shop.cost, packing.bins)))


def _keep_gpus(made: list[Bin], old: Sequence[Bin]) -> list[Bin]:
    """Bins made anew take over the GPUs of those taken apart, where the most stays as it was."""
    homes = [one for one in old if one.gpu is not None]
    for one in made:
        alike = [home for home in homes if home.kind == one.kind]
        if not alike:
            continue
        nearest = max(alike, key=lambda home: len(home.held.keys() & one.held.keys()))
        one.gpu = nearest.gpu
        homes.remove(nearest)
    return made


def _without(held: Held, service: int) -> Held:
    return {other: parts for other, parts in held.items() if other != service}


def _together(items: Iterable[tuple[int, int]]) -> Held:
    held: Held = {}
    for service, parts in items:
        held[service] = held.get(service, 0) + parts
    return held


def _sum(parts: Iterable[Held]) -> Held:
    return _together(item for held in parts for item in held.items())
