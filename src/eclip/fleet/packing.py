"""Packing: which instances stand together on which kind of GPU, found by local search.

The search takes a few bins apart, fills them anew in another random order, and keeps what is no
worse. It goes by estimates (``scores.py``), and from time to time asks the simulator about the bins
that changed: a bin that does not keep its bounds gives instances away until one does. What is
returned was simulated, bin by bin.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from eclip.errors import UsageError
from eclip.fleet.filling import LOOKED_AT, Filler
from eclip.fleet.shop import Bin, Held, Packing, Shop, sum_of
from eclip.progress import Progress

_TAKEN_APART = (2, 3, 4)  # bins at once
_REPAIRS = 12  # rounds of simulating what changed
_ROUNDS = 2  # of searching, then simulating


class Packer(Filler):
    """One local search."""

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
        items = self.shop.cut(sum_of([packing.left, *(one.held for one in old)]))
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
            chosen.add(int(min(sample, key=lambda index: self.worth(packing.bins[index]))))
        return sorted(chosen)

    def _spread(self, made: Packing, others: list[Bin]) -> list[tuple[Bin, Held]]:
        """Offer what is left to bins that were not taken apart, whole or in two. Returns those that
        took something, with what they held before."""
        touched: list[tuple[Bin, Held]] = []
        if not others:
            return touched
        for service, parts in self.shop.cut(made.left):
            sample = self.random.choice(len(others), min(LOOKED_AT, len(others)), False)
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
        return -sum(self.worth(one) ** 2 for one in bins)

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

    def _drop_broken(self, packing: Packing) -> Packing:
        kept = []
        for one in packing.bins:
            if self.shop.score(one).kept:
                kept.append(one)
                continue
            packing.left = sum_of([packing.left, one.held])
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
    best: tuple[tuple[float, float], Packing] | None = None
    for number in range(_ROUNDS):
        progress.phase("searching")
        share = (number + 1) / (_ROUNDS + 1)
        count = 10**9 if steps is None else -(-steps // _ROUNDS)
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
