"""Objective: what a search maximises, and how good a plan is by that.

A score says what a run, simulated or real, gave. Its value is what the objective maximises, less a
penalty for every floor or bound that is missed. The penalty is so large that a plan which keeps all
floors and bounds beats every plan which does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np

from eclip.core.display import told_apart
from eclip.core.mix import Background, Mix
from eclip.core.plan import Plan, Promise
from eclip.errors import UsageError, unknown_name
from eclip.planner.tiers import check_services

KINDS = ("throughput", "energy", "slo")
_TIE = 1e-3  # what tails count where background gets the same
_PENALTY = 100.0  # for missing a floor altogether, in units of the largest value there is
# The fairness floor unless one is given: what plain streams give less a little, in these limits.
_FAIRNESS_LESS = 0.05
_FAIRNESS_LIMITS = (0.7, 0.9)


@dataclass(frozen=True)
class Score:
    """What one run of a plan gave."""

    ratios: tuple[float, ...]  # per worker: rate in the mix over rate alone
    power_w: float
    p99_ms: tuple[float, ...]  # per worker; infinite if no request completed

    @property
    def stp(self) -> float:
        return sum(self.ratios)

    @property
    def fairness(self) -> float:
        return min(self.ratios) / max(self.ratios) if max(self.ratios) > 0 else 0.0

    @property
    def efficiency(self) -> float:
        """STP · seconds per kilojoule."""
        return 1000 * self.stp / self.power_w if self.power_w > 0 else 0.0


class Shortfall(NamedTuple):
    """A floor or bound that a score misses."""

    what: str  # fairness, throughput, p99 or floor
    worker: int  # whose; -1: the whole mix's
    part: float  # how far below, as a part of the floor or bound
    words: str

    def sentence(self, names: Sequence[str]) -> str:
        return self.words if self.worker < 0 else f"{names[self.worker]}: {self.words}"


@dataclass(frozen=True)
class Objective:
    """``throughput``: weighted STP. ``energy``: efficiency, with no less STP than plain streams.
    Both with a fairness floor: ``fairness`` if it is given, otherwise what plain streams give less
    0.05, but at least 0.7 and at most 0.9.
    ``slo``: the most background work, weighted, with every service's bound and every floor kept.
    They are the mix's own; ``for_mix`` fills them in.

    One meaning everywhere: a search, a sweep and the final trials hold plans to the same floors.
    """

    kind: str = "throughput"
    weights: tuple[float, ...] = ()  # per worker; empty: all alike
    fairness: float | None = None
    bounds_ms: tuple[float | None, ...] = ()  # slo, per worker: on the p99; None: background
    floors: tuple[float, ...] = ()  # slo, per worker: least part of the rate alone

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown_name("objective", self.kind, KINDS)
        if not all(0 <= weight < math.inf for weight in self.weights):
            raise UsageError(f"weights must be 0 or more and finite, not {_listed(self.weights)}")
        if self.weights and max(self.weights) == 0 and self.kind != "slo":
            raise UsageError("one of the weights must be more than 0")
        if self.weights and self.kind == "energy":
            raise UsageError("weights go with the objective throughput")
        if self.weights and self.kind == "slo" and not self.bounds_ms:
            raise UsageError("for slo, weights stand in the mix: vgg19:32@background/weight=2")
        if self.fairness is not None and not 0 <= self.fairness <= 1:
            raise UsageError(f"the fairness floor must be 0 to 1, not {self.fairness:g}")
        if self.fairness is not None and self.kind == "slo":
            raise UsageError("for slo, floors stand in the mix: vgg19:32@background/floor=0.2")

    def for_mix(self, mix: Mix, promises: Mapping[int, Promise]) -> Objective:
        """With the mix's bounds, floors and weights, where they count. Where requests arrive by
        themselves, rates are the load's and no plan's, so that fairness is not asked of them."""
        if self.kind != "slo":
            unasked = mix.has_rates and self.fairness is None
            return replace(self, fairness=0.0) if unasked else self
        check_services(mix, "the objective slo")
        background = [
            None if index in promises else (worker.background or Background())
            for index, worker in enumerate(mix.workers)
        ]
        return Objective(
            "slo",
            weights=tuple(0.0 if one is None else one.weight for one in background),
            bounds_ms=tuple(
                promises[index].bound_ns / 1e6 if index in promises else None
                for index in range(len(mix.workers))
            ),
            floors=mix.floors,
        )

    def check(self, workers: int) -> None:
        if self.weights and len(self.weights) != workers:
            raise UsageError(f"{len(self.weights)} weights given for a mix of {workers} workers")
        if self.kind == "slo" and len(self.bounds_ms) != workers:
            raise UsageError("the objective slo needs the bounds of a mix with services")

    def value(self, score: Score, plain: Score) -> float:
        """The higher the better; ``plain`` is what plain streams give."""
        if self.kind == "slo":
            value = self.background(score) - _TIE * min(self.worst_tail(score), 1 / _TIE)
        elif self.kind == "energy":
            value = score.efficiency / plain.efficiency
        else:
            value = _weighted(score.ratios, self.weights) / _weighted(plain.ratios, self.weights)
        return value - _PENALTY * sum(miss.part for miss in self.shortfalls(score, plain))

    def background(self, score: Score) -> float:
        """slo: the weighted mean of what workers without a bound get of their rates alone."""
        total = sum(self.weights)
        return float(np.dot(score.ratios, self.weights)) / total if total else 0.0

    def worst_tail(self, score: Score) -> float:
        """slo: the largest p99 of a service, over its bound; infinite if it answered nothing."""
        pairs = zip(score.p99_ms, self.bounds_ms, strict=True)
        return max((p99 / bound for p99, bound in pairs if bound is not None), default=0.0)

    def shortfalls(self, score: Score, plain: Score) -> list[Shortfall]:
        """The floors and bounds that a score misses."""
        if self.kind == "slo":
            return [*self._late(score), *self._starved(score)]
        misses = []
        floor = self.fairness_floor(plain)
        if score.fairness < floor:
            words = f"fairness {score.fairness:.4f}, at least {floor:.4f} wanted"
            misses.append(Shortfall("fairness", -1, floor - score.fairness, words))
        if self.kind == "energy" and score.stp < plain.stp:
            words = f"STP {score.stp:.4f}, at least plain streams' {plain.stp:.4f} wanted"
            misses.append(Shortfall("throughput", -1, 1 - score.stp / plain.stp, words))
        return misses

    def _late(self, score: Score) -> Iterator[Shortfall]:
        for worker, (p99, bound) in enumerate(zip(score.p99_ms, self.bounds_ms, strict=True)):
            if bound is not None and p99 > bound:
                tail, most = told_apart(p99, bound)
                words = f"p99 {tail} ms, at most {most} wanted"
                yield Shortfall("p99", worker, 1 - bound / p99, words)

    def _starved(self, score: Score) -> Iterator[Shortfall]:
        for worker, (ratio, floor) in enumerate(zip(score.ratios, self.floors, strict=True)):
            if ratio < floor:
                words = f"{ratio:.1%} of its rate alone, at least {floor:.1%} wanted"
                yield Shortfall("floor", worker, 1 - ratio / floor, words)

    def fairness_floor(self, plain: Score) -> float:
        if self.fairness is not None:
            return self.fairness
        least, most = _FAIRNESS_LIMITS
        return max(least, min(plain.fairness - _FAIRNESS_LESS, most))


THROUGHPUT = Objective()


class Evaluator(Protocol):
    """Says what plans give, with all workers active or only some."""

    def __call__(
        self, plans: Sequence[Plan], active: tuple[int, ...] | None = None
    ) -> list[Score]: ...

    def doubts(self) -> Iterator[Evaluator]:
        """For a shortlist: with other arrivals, the first on the same device, others elsewhere."""
        ...


def _weighted(ratios: Sequence[float], weights: Sequence[float]) -> float:
    if not weights:
        return sum(ratios)
    return float(np.dot(ratios, weights)) * len(weights) / sum(weights)


def _listed(values: Sequence[float]) -> str:
    """As a person writes them: ``1,2.5``."""
    return ",".join(f"{value:g}" for value in values)
