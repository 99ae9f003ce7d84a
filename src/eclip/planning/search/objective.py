"""Objective: what a search is after, and how good a plan is by it.

A score says what a run, simulated or real, gave. The value of a score is what the objective wants
as much as possible of, less a penalty for every floor or bound that is missed: a plan that keeps
all of them beats every plan that does not.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eclip.errors import UsageError, unknown_name

KINDS = ("throughput", "energy", "latency")
_SLACK = 0.02  # how much longer than under plain streams a tail may be
# How far above a floor something must be that is known from short runs. Sums of rates come out the
# same within 0.5% (docs/results.md), the least of them over the largest less so.
_STP_MARGIN = 0.005
_FAIRNESS_MARGIN = 0.02
_PENALTY = 100.0  # for missing a floor altogether, in units of the largest value there is


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


@dataclass(frozen=True)
class Objective:
    """``throughput``: weighted STP. ``energy``: efficiency, with no less STP than plain streams.
    Both with a fairness floor: what plain streams give less 0.05, but at most 0.9 and at least
    ``least_fairness``.
    ``latency``: 99th percentiles as short as possible against those under plain streams, in the
    geometric mean; none longer than there, or than the bounds if there are any.
    """

    kind: str = "throughput"
    weights: tuple[float, ...] = ()  # per worker; empty: all alike
    p99_ms: tuple[float, ...] = ()  # per worker; latency only
    least_fairness: float = 0.7
    rough: bool = False  # scores are of short runs: floors get a margin

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown_name("objective", self.kind, KINDS)
        if self.weights and not (_all_finite(self.weights) and min(self.weights) >= 0):
            raise UsageError(f"weights must be 0 or more and finite, not {_list(self.weights)}")
        if self.weights and max(self.weights) == 0:
            raise UsageError("one of the weights must be more than 0")
        if not 0 <= self.least_fairness <= 1:
            raise UsageError(f"the fairness floor must be 0 to 1, not {self.least_fairness:g}")
        if self.p99_ms and self.kind != "latency":
            raise UsageError("bounds on the p99 go with the objective latency")
        if self.p99_ms and not (_all_finite(self.p99_ms) and min(self.p99_ms) > 0):
            raise UsageError(
                f"p99 bounds must be more than 0 ms and finite, not {_list(self.p99_ms)}"
            )

    def check(self, workers: int) -> None:
        for name, given in (("weights", self.weights), ("p99 bounds", self.p99_ms)):
            if given and len(given) != workers:
                raise UsageError(f"{len(given)} {name} given for a mix of {workers} workers")

    def value(self, score: Score, plain: Score) -> float:
        """The higher the better; ``plain`` is what plain streams give."""
        floor = self.fairness_floor(plain) + (_FAIRNESS_MARGIN if self.rough else 0.0)
        missed = max(0.0, floor - score.fairness)
        if self.kind == "latency":
            missed = 0.0  # rates are the load's, not the plan's
            gains = [_gain(*pair) for pair in zip(score.p99_ms, plain.p99_ms, strict=True)]
            if not self.p99_ms:
                missed = sum(max(0.0, 1 - _SLACK - gain) for gain in gains)
            wanted = statistics.geometric_mean(gains) if min(gains) > 0 else 0.0
        elif self.kind == "energy":
            least = 1 + (_STP_MARGIN if self.rough else 0.0)
            missed += max(0.0, least - score.stp / plain.stp)
            wanted = score.efficiency / plain.efficiency
        else:
            wanted = _weighted(score.ratios, self.weights) / _weighted(plain.ratios, self.weights)
        for p99, bound in zip(score.p99_ms, self.p99_ms, strict=False):
            missed += max(0.0, 1 - bound / p99)
        return wanted - _PENALTY * missed

    def fairness_floor(self, plain: Score) -> float:
        return max(self.least_fairness, min(plain.fairness - 0.05, 0.9))


THROUGHPUT = Objective()


def _all_finite(values: Sequence[float]) -> bool:
    return all(map(math.isfinite, values))


def _list(values: Sequence[float]) -> str:
    return ",".join(f"{value:g}" for value in values)


def _gain(p99_ms: float, plain_ms: float) -> float:
    """How much shorter a tail is than under plain streams; none completed is the longest."""
    if math.isinf(plain_ms):
        return 1.0
    return plain_ms / p99_ms


def _weighted(ratios: Sequence[float], weights: Sequence[float]) -> float:
    if not weights:
        return sum(ratios)
    return float(np.dot(ratios, weights)) * len(weights) / sum(weights)
