"""Correction: a simulation less the error it has been seen to make on plans that were tried.

The logarithms of measured over simulated rates, and of power, are Gaussian processes over plans;
99th percentiles are left as simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from eclip.core.plan import Plan
from eclip.planner.search.candidates import Evaluate
from eclip.planner.search.objective import Score

Floats = npt.NDArray[np.float64]

# The error of the simulation on two plans is alike as far as the plans are. That these constants
# serve is seen by predicting every run of docs/runs from the others (docs/results/simulator.md).
_SPREAD = 0.08  # of the error over all plans, as a part of the rate
_RATE_NOISE = 0.008  # of a trial
EARLIER_NOISE = 0.03  # of another day's, which may have been faster or slower as a whole
_POWER_NOISE = 0.06  # the counter of a GPU's energy moves but a few times in one
_REACH = 4.0  # distance at which errors have little in common
_PRIORITY = 2.0  # how far a level of priority is
_KERNELS = 16.0  # ... kernels for no unit are from those for all
_OPTIMISM = 0.4  # standard deviations that rates not yet known are taken to be better


class Corrected:
    """What a simulation says of plans, less the error it has been seen to make."""

    def __init__(self, simulate: Evaluate) -> None:
        self._simulate = simulate
        # Where, errors of rates and of power, and how noisy the rates are.
        self._seen: list[tuple[Floats, Floats, Floats, float]] = []
        self._rates: _Process | None = None
        self._power: _Process | None = None

    def learn(
        self, plans: Sequence[Plan], scores: Sequence[Score], noise: float = _RATE_NOISE
    ) -> None:
        """Of plans that were tried; one that the device refused says nothing."""
        ran = [(plan, score) for plan, score in zip(plans, scores, strict=True) if _ran(score)]
        simulated = self._simulate([plan for plan, _ in ran])
        self._seen += [
            (
                _where(plan),
                np.log(np.divide(score.ratios, said.ratios)),
                np.log([score.power_w / said.power_w]),
                noise,
            )
            for (plan, score), said in zip(ran, simulated, strict=True)
            if _ran(said)
        ]
        if self._seen:
            where, rates, power, noises = (np.array(part) for part in zip(*self._seen, strict=True))
            self._rates = _Process(where, rates, noises)
            self._power = _Process(where, power, np.full(len(power), _POWER_NOISE))

    def __call__(self, plans: Sequence[Plan]) -> list[Score]:
        """What can be hoped for: rates are taken to be better where little was tried, so that it
        is."""
        return self._correct(plans, _OPTIMISM)

    def expected(self, plans: Sequence[Plan]) -> list[Score]:
        """Of a plan that was tried, this is less noisy than what its own trial gave."""
        return self._correct(plans, 0.0)

    def _correct(self, plans: Sequence[Plan], optimism: float) -> list[Score]:
        said = self._simulate(plans)
        if not said or self._rates is None or self._power is None:
            return said
        where = np.array([_where(plan) for plan in plans])
        rates, unknown = self._rates.predict(where)
        power, _ = self._power.predict(where)
        factors = np.exp(rates + optimism * unknown[:, None])
        return [
            replace(
                score,
                ratios=tuple((np.array(score.ratios) * factor).tolist()),
                power_w=score.power_w * float(np.exp(watts[0])),
            )
            for score, factor, watts in zip(said, factors, power, strict=True)
        ]


class _Process:
    """A Gaussian process through noisy values at known places, several values at each."""

    def __init__(self, where: Floats, values: Floats, noise: Floats) -> None:
        self._where = where
        self._mean: Floats = values.mean(axis=0)
        likeness = _likeness(where, where) + np.diag(noise**2)
        self._inverse = np.asarray(np.linalg.inv(likeness), np.float64)
        self._weights: Floats = self._inverse @ (values - self._mean)

    def predict(self, where: Floats) -> tuple[Floats, Floats]:
        """What is expected at each place, and the standard deviation."""
        likeness = _likeness(where, self._where)
        known = (likeness @ self._inverse * likeness).sum(axis=1)
        unknown: Floats = np.sqrt(np.maximum(0.0, _SPREAD**2 - known))
        return self._mean + likeness @ self._weights, unknown


def _ran(score: Score) -> bool:
    return min(score.ratios) > 0 and score.power_w > 0


def _where(plan: Plan) -> Floats:
    """Where a plan lies among all: for every worker the part of its time for which it has each
    slice, its priority, and which kernels it has."""
    slices = len(plan.topology.slice_units)
    parts = []
    for part, worker in zip(plan.main.assignments, plan.mix.workers, strict=True):
        held = np.zeros(slices + 1)
        for group in part.groups:
            lane = plan.lanes[group.lane]
            held[list(lane.mask)] += group.predicted_ns
            held[-1] += _PRIORITY * lane.priority * group.predicted_ns
        units = plan.topology.units
        missing = _KERNELS * (1 - (worker.model.kernels_for or units) / units)
        parts.append(held / max(1, sum(group.predicted_ns for group in part.groups)))
        parts.append(np.array([missing]))
    return np.concatenate(parts)


def _likeness(these: Floats, those: Floats) -> Floats:
    # Not by differences, which would take so many times the memory as a place has numbers.
    squares = (these**2).sum(axis=1)[:, None] + (those**2).sum(axis=1)
    apart_by = np.maximum(0.0, squares - 2 * these @ those.T)
    likeness: Floats = _SPREAD**2 * np.exp(-apart_by / (2 * _REACH**2))
    return likeness
