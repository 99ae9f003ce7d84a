"""Packing: the instances that share a GPU, and its kind, found by local search.

The search takes a few bins apart, fills them anew in another random order, and keeps the result if
it is no worse. The search uses estimates (``scores.py``). From time to time the simulator checks
the bins that changed, and a bin that does not keep its bounds gives instances away. Between phases
of the search this check is done once, since the search will change many bins again. At the end
every bin is simulated. Large packings are searched in groups, on all cores, with fewer checks.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from eclip.errors import UsageError
from eclip.fleet.place.filling import LOOKED_AT, Filler
from eclip.fleet.place.problem import Bin, Held, Packing, PackingProblem, sum_of, together
from eclip.progress import Progress

_TAKEN_APART = (2, 3, 4)  # bins at once
_REPAIRS = 20  # rounds of simulating what changed
_PATIENT = 8  # rounds after which instances given away go into new bins only
_ROUNDS, _ROUNDS_IN_GROUPS = 4, 2  # of searching: the simulator is asked between and at the end
_GROUP = 100  # bins that are searched by themselves
_AT_ONCE = 20  # steps in a group before others are drawn


class Packer(Filler):
    """One local search."""

    def fill_up(self, packing: Packing) -> Packing:
        """The packing with new bins for the instances left."""
        more = self.open_bins(self.problem.cut(packing.left))
        return Packing(packing.bins + more.bins, more.left)

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
        others = [one for index, one in enumerate(packing.bins) if index not in chosen]
        free = dict(self.free)
        for one in old:
            self.free[one.kind] += 1
        items = self.problem.cut(sum_of([packing.left, *(one.held for one in old)]))
        most = None if self.problem.objective == "goodput" else len(old) - 1
        made = self.open_bins(items, most)
        made.bins = _keep_gpus(made.bins, old)
        touched: list[tuple[Bin, Held]] = []
        if made.left and self.problem.objective != "goodput":
            touched = self._spread(made, others)
            if made.left:
                more = self.open_bins(self.problem.cut(made.left))
                taken = {one.gpu for one in made.bins}
                homes = [one for one in old if one.gpu not in taken]
                made = Packing(made.bins + _keep_gpus(more.bins, homes), more.left)
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
        """Offer the instances left, whole or in halves, to bins that were not taken apart. Returns
        the bins that took some, with their former instances."""
        touched: list[tuple[Bin, Held]] = []
        if not others:
            return touched
        for service, parts in self.problem.cut(made.left):
            sample = self.random.choice(len(others), min(LOOKED_AT, len(others)), False)
            wanted = parts
            for one in [*made.bins, *(others[index] for index in sample)]:
                for size in dict.fromkeys((wanted, wanted // 2)):
                    if size and self.problem.fits(one, service, size):
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
        problem = self.problem
        if problem.objective == "goodput":
            new = sum(problem.value(one.held) for one in made.bins)
            return new >= sum(problem.value(one.held) for one in old) - 1e-9
        if (
            problem.size(problem.fleet.kinds[0], made.left)
            > problem.size(problem.fleet.kinds[0], left) + 1e-9
        ):
            return False
        gain = sum(map(problem.cost, old)) - sum(map(problem.cost, made.bins))
        if abs(gain) > 1e-9 or len(made.left) < len(left):
            return gain > 0 or len(made.left) < len(left)
        # Of equals, the more uneven: what holds little may go next.
        return self._evenness(made.bins) <= self._evenness(old) + 1e-12

    def _evenness(self, bins: Sequence[Bin]) -> float:
        return -sum(self.worth(one) ** 2 for one in bins)

    def repair(self, packing: Packing, progress: Progress, *, hurried: bool = False) -> bool:
        """Simulate what changed. Bins that miss a bound give instances away, and those go where
        there is room by estimate; in a hurry only into new bins, since what takes them must be
        simulated again. False: there is nothing to repair, and every bin was simulated."""
        problem = self.problem
        keys = [(one.kind, problem.members(one.held)) for one in packing.bins]
        scores = problem.scorer.score_all(keys, progress)
        broken = [one for one, score in zip(packing.bins, scores, strict=True) if not score.kept]
        for one in broken:
            self.give_away(one, packing.left)
        if broken:
            packing.bins = [one for one in packing.bins if one.held or self.close(one)]
            items = problem.cut(packing.left)
            more = self.open_bins(items if hurried else self.offer(items, packing.bins))
            packing.bins += more.bins
            packing.left = more.left
        return bool(broken)

    def verify(self, packing: Packing, progress: Progress, is_late: Callable[[], bool]) -> Packing:
        """The packing with every bin simulated and its bounds kept. Instances without room are in
        ``left``."""
        for number in range(_REPAIRS):
            if not self.repair(packing, progress, hurried=is_late() or number >= _PATIENT):
                return packing
        return self._drop_broken(packing)

    def _drop_broken(self, packing: Packing) -> Packing:
        kept = []
        for one in packing.bins:
            if self.problem.score(one).kept:
                kept.append(one)
                continue
            packing.left = sum_of([packing.left, one.held])
            self.close(one)
        return Packing(kept, packing.left)


def pack(
    problem: PackingProblem,
    free: dict[str, int],
    *,
    start: Packing | None = None,
    seconds: float,
    steps: int | None = None,
    seed: int = 0,
    progress: Progress,
) -> Packing:
    """The best packing found in ``seconds``, or with exactly ``steps`` steps of the search.

    Every GPU is filled once and simulated, so a large fleet may take longer than ``seconds``; then
    there is no search, and a shorter repair.
    """
    begun = time.monotonic()
    packer = Packer(problem, free, seed)

    def is_past(second: float) -> bool:
        return progress.stopped or (steps is None and time.monotonic() > begun + second)

    progress.phase("filling GPUs")
    packing = start.copy() if start is not None else Packing([], problem.instances())
    if packing.bins:
        packing.left = together(packer.offer(problem.cut(packing.left), packing.bins))
    packing = in_groups(packer, packing, Packer.fill_up)
    packing = packer.fill_up(packing)  # a group may have lacked GPUs that another had
    filled, free_beside = packing.copy(), dict(packer.free)
    rounds = _ROUNDS if _groups(packing) == 1 else _ROUNDS_IN_GROUPS
    count = 10**9 if steps is None else -(-steps // rounds)
    sure = []  # packings of which every bin was simulated and keeps its bounds
    took = 0.0
    for number in range(rounds):
        later = seconds * (rounds - number) / (rounds + 1)  # for other searches, and for verifying
        if number and is_past(seconds - later):
            break
        if number:
            progress.phase("simulating what changed")
            asked = time.monotonic()
            if not packer.repair(packing, progress):
                sure.append(packing.copy())
            took = time.monotonic() - asked
        until = seconds - max(took, later)
        progress.phase("searching")
        packing = improve_in_groups(packer, packing, count, functools.partial(is_past, until))
    progress.phase("simulating what changed")
    sure.append(packer.verify(packing, progress, lambda: is_past(seconds)))
    packing = min(sure, key=lambda one: _value(problem, one))
    if _value(problem, filled) < _value(problem, packing):
        # Repairs took back more than the search had gained. Its beginning was not simulated yet.
        beginner = Packer(problem, free_beside, seed)
        sure = [packing, beginner.verify(filled, progress, lambda: is_past(seconds))]
        packing = min(sure, key=lambda one: _value(problem, one))
    if packing.left and problem.objective != "goodput":
        names = [problem.fleet.services[service].name for service in packing.left]
        others = " and others" if len(names) > 3 else ""
        raise UsageError(
            f"the fleet's {problem.fleet.count} GPUs do not hold all services within their bounds: "
            f"no room for {', '.join(names[:3])}{others}; add GPUs, or take a smaller reserve "
            f"({problem.fleet.reserve:g} now) or the objective goodput"
        )
    return packing


def _value(problem: PackingProblem, packing: Packing) -> tuple[float, float]:
    """The less the better."""
    if problem.objective == "goodput":
        return (-sum(problem.value(one.held) for one in packing.bins), 0.0)
    return (problem.value(packing.left), sum(map(problem.cost, packing.bins)))


def improve_in_groups(
    packer: Packer, packing: Packing, steps: int, enough: Callable[[], bool]
) -> Packing:
    """So many steps of the search, with other groups every few steps."""
    while steps > 0 and packing.bins and not enough():
        count = min(steps, _AT_ONCE * _groups(packing))
        share = -(-count // _groups(packing))
        work = functools.partial(Packer.improve, steps=share, enough=enough)
        packing = in_groups(packer, packing, work)
        steps -= count
    return packing


def in_groups(
    packer: Packer, packing: Packing, work: Callable[[Packer, Packing], Packing]
) -> Packing:
    """Work on groups of bins by themselves, drawn at random, and put the results together.

    On all cores: most of a search is coarse simulations, which hold no GIL. How many groups there
    are depends on the packing alone, so that a seed gives the same packing everywhere.
    """
    count = _groups(packing)
    if count == 1:
        return work(packer, packing)
    drawn = packer.random.permutation(len(packing.bins)).tolist()
    services = list(packing.left)
    seeds = packer.random.integers(1 << 62, size=count).tolist()
    packers, parts = [], []
    for group, seed in enumerate(seeds):
        free = {kind: (gpus + group) // count for kind, gpus in packer.free.items()}
        packers.append(Packer(packer.problem, free, seed))
        left = {service: packing.left[service] for service in services[group::count]}
        parts.append(Packing([packing.bins[index] for index in drawn[group::count]], left))
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        done = list(threads.map(work, packers, parts))
    packer.free = {kind: sum(one.free[kind] for one in packers) for kind in packer.free}
    return Packing([one for part in done for one in part.bins], sum_of(part.left for part in done))


def _groups(packing: Packing) -> int:
    services_a_bin = 5
    return -(-(len(packing.bins) + len(packing.left) // services_a_bin) // _GROUP) or 1


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
