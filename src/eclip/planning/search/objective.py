"""Objective: what a search maximises, and how good a plan is by that.

A score says what a run, simulated or real, gave. Its value is what the objective maximises, less a
penalty for every floor or bound that is missed. The penalty is so large that a plan which keeps all
floors and bounds beats every plan which does not.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from eclip.artefacts.plan import Plan
from eclip.errors import UsageError, unknown_name

KINDS = ("throughput", "energy", "latency")
_SLACK = 0.02  # how much longer than under plain streams a tail may be
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

    what: str  # fairness, throughput or p99
    worker: int  # whose p99; -1: the whole mix
    part: float  # how far below, as a part of the floor or bound
    words: str

    def sentence(self, names: Sequence[str]) -> str:
        return self.words if self.worker < 0 else f"{names[self.worker]}: {self.words}"


@dataclass(frozen=True)
class Objective:
    """``throughput``: weighted STP. ``energy``: efficiency, with no less STP than plain streams.
    Both with a fairness floor: ``fairness`` if it is given, otherwise what plain streams give less
    0.05, but at least 0.7 and at most 0.9.
    ``latency``: 99th percentiles as short as possible against those under plain streams, in the
    geometric mean; none longer than there, or than the bounds if there are any.

    One meaning everywhere: a search, a sweep and the final trials hold plans to the same floors.
    """

    kind: str = "throughput"
    weights: tuple[float, ...] = ()  # per worker; empty: all alike
    p99_ms: tuple[float, ...] = ()  # per worker; latency only
    fairness: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown_name("objective", self.kind, KINDS)
        if not all(0 <= weight < math.inf for weight in self.weights):
            raise UsageError(f"weights must be 0 or more and finite, not {_listed(self.weights)}")
        if self.weights and max(self.weights) == 0:
            raise UsageError("one of the weights must be more than 0")
        if self.weights and self.kind != "throughput":
            raise UsageError("weights go with the objective throughput")
        if self.fairness is not None and not 0 <= self.fairness <= 1:
            raise UsageError(f"the fairness floor must be 0 to 1, not {self.fairness:g}")
        if self.p99_ms and self.kind != "latency":
            raise UsageError("bounds on the p99 go with the objective latency")
        if not all(0 < bound < math.inf for bound in self.p99_ms):
            raise UsageError(
                f"p99 bounds must be more than 0 ms and finite, not {_listed(self.p99_ms)}"
            )

    def check(self, workers: int) -> None:
        for name, given in (("weights", self.weights), ("p99 bounds", self.p99_ms)):
            if given and len(given) != workers:
                raise UsageError(f"{len(given)} {name} given for a mix of {workers} workers")

    def value(self, score: Score, plain: Score) -> float:
        """The higher the better; ``plain`` is what plain streams give."""
        if self.kind == "latency":
            gains = _gains(score, plain)
            value = statistics.geometric_mean(gains) if min(gains) > 0 else 0.0
        elif self.kind == "energy":
            value = score.efficiency / plain.efficiency
        else:
            value = _weighted(score.ratios, self.weights) / _weighted(plain.ratios, self.weights)
        return value - _PENALTY * sum(miss.part for miss in self.shortfalls(score, plain))

    def shortfalls(self, score: Score, plain: Score) -> list[Shortfall]:
        """The floors and bounds that a score misses."""
        misses = []
        if self.kind == "latency":
            if not self.p99_ms:
                misses += [
                    Shortfall(
                        "p99", worker, 1 - _SLACK - gain, "p99 longer than under plain streams"
                    )
                    for worker, gain in enumerate(_gains(score, plain))
                    if gain < 1 - _SLACK
                ]
            for worker, (p99, bound) in enumerate(zip(score.p99_ms, self.p99_ms, strict=False)):
                if p99 > bound:
                    words = f"p99 {p99:.2f} ms, at most {bound:g} wanted"
                    misses.append(Shortfall("p99", worker, 1 - bound / p99, words))
            return misses  # rates are the load's, not the plan's
        floor = self.fairness_floor(plain)
        if score.fairness < floor:
            words = f"fairness {score.fairness:.4f}, at least {floor:.4f} wanted"
            misses.append(Shortfall("fairness", -1, floor - score.fairness, words))
        if self.kind == "energy" and score.stp < plain.stp:
            words = f"STP {score.stp:.4f}, at least plain streams' {plain.stp:.4f} wanted"
            misses.append(Shortfall("throughput", -1, 1 - score.stp / plain.stp, words))
        return misses

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


def _gains(score: Score, plain: Score) -> list[float]:
    """Per worker: p99 under plain streams over its p99 here; 0 if no request completed here."""
    return [
        1.0 if math.isinf(plain_ms) else plain_ms / p99_ms
        for p99_ms, plain_ms in zip(score.p99_ms, plain.p99_ms, strict=True)
    ]


def _weighted(ratios: Sequence[float], weights: Sequence[float]) -> float:
    if not weights:
        return sum(ratios)
    return float(np.dot(ratios, weights)) * len(weights) / sum(weights)


def _listed(values: Sequence[float]) -> str:
    """As a person writes them: ``1,2.5``."""
    return ",".join(f"{value:g}" for value in values)
