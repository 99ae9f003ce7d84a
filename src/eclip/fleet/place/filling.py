"""Filling: bins take instances, give them away, and are opened and closed.

Everything here goes by predictions: the simulator's score where a set was simulated, an estimate
elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from eclip.fleet.place.problem import Bin, Held, Packing, PackingProblem, together

_MISSES = 10  # instances in a row that find no room: then a bin counts as full
LOOKED_AT = 8  # bins that an instance left over is offered to


class Filler:
    """Fills bins in a random order, seeded. ``free``: GPUs of every kind that may be opened."""

    def __init__(
        self, problem: PackingProblem, free: dict[str, int], seed: int | Sequence[int]
    ) -> None:
        self.problem = problem
        self.free = dict(free)
        self.random = np.random.default_rng(seed)

    def order(self, items: Iterable[tuple[int, int]], kind: str) -> list[tuple[int, int]]:
        """Large and hard ones first, by and large; for goodput, what gives most for its time."""
        problem, items = self.problem, list(items)
        services = np.array([service for service, _ in items], dtype=np.int64)
        parts = np.array([part for _, part in items], dtype=np.float64)
        size = problem.sizes[kind][services] * parts / np.array(problem.parts)[services]
        if problem.objective == "goodput":
            value = [problem.value({service: part}) for service, part in items]
            key = np.array(value) / size
            key *= self.random.uniform(self.random.choice([0.1, 0.5]), 1.0, len(items))
        else:
            blend = self.random.choice([0.0, 0.0, 0.5, 1.0])
            key = size * (problem.tightness[services] ** blend)
            key *= self.random.uniform(self.random.choice([0.3, 0.9]), 1.0, len(items))
        return [items[index] for index in np.argsort(-key, kind="stable")]

    def fill(self, one: Bin, items: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Put items that fit into the bin, in this order; returns the others."""
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
        problem = self.problem
        if service in one.held:
            return 0
        if problem.fits(one, service, parts):
            return parts
        if problem.objective == "goodput":
            for fewer in range(parts - 1, 0, -1):
                if problem.fits(one, service, fewer):
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
                    trials.append((self.worth(one), one, left))
            if not trials:
                break
            _, one, items = max(trials, key=lambda trial: trial[0])
            self.free[one.kind] -= 1
            bins.append(one)
        return Packing(bins, together(items))

    def worth(self, one: Bin) -> float:
        """The content of a bin relative to its cost, comparable between kinds of GPUs."""
        problem = self.problem
        if problem.objective == "goodput":
            return problem.value(one.held)
        return problem.size(problem.fleet.kinds[0], one.held) / problem.cost(one)

    def offer(self, items: list[tuple[int, int]], bins: Sequence[Bin]) -> list[tuple[int, int]]:
        left = []
        for service, parts in items:
            sample = self.random.choice(len(bins), min(3 * LOOKED_AT, len(bins)), False)
            for index in sample:
                if self.problem.fits(bins[index], service, parts):
                    bins[index].held[service] = parts
                    break
            else:
                left.append((service, parts))
        return left

    def give_away(self, one: Bin, left: Held) -> None:
        """Take out the smallest instances until the rest is expected to keep its bounds. The
        estimate is corrected by its error for the full bin. Sets known to keep their bounds are
        preferred, since they need no simulation."""
        problem = self.problem
        if not one.held:
            return
        sizes, off = problem.sizes[one.kind], problem.off(one)
        while one.held and problem.predict(one.kind, one.held, off) > 1:
            rests = {
                service: _without(one.held, service) for service in one.held if len(one.held) > 1
            }
            enough = [
                service
                for service, rest in rests.items()
                if problem.predict(one.kind, rest, off) <= 1
            ]
            known = [service for service in enough if problem.is_known(one.kind, rests[service])]
            candidates = known or enough or list(rests) or list(one.held)
            service = min(candidates, key=lambda held: sizes[held] * one.held[held])
            parts = one.held.pop(service)
            left[service] = left.get(service, 0) + parts

    def close(self, one: Bin) -> bool:
        self.free[one.kind] += 1
        return False

    def shrink(self, packing: Packing, failures: int = 6) -> Packing:
        """Give back GPUs whose instances find room on others, until some in a row do not."""
        bins = sorted(packing.bins, key=self.worth)
        failed = 0
        while failed < min(failures, len(bins)) and len(bins) > 1:
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


def _without(held: Held, service: int) -> Held:
    return {other: parts for other, parts in held.items() if other != service}
