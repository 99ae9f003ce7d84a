"""Exploring: a search by simulation, which may continue on the device.

On the device the search begins with the simulator's best plans, swept masks, the best of both and
plain streams with kernels that fit, a few random placements, some with stream priorities, and the
best plans of an earlier search. A trial for one objective counts for all objectives.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from eclip.core.device import Capability
from eclip.core.plan import Plan, unpartitioned
from eclip.errors import StoppedError, UsageError
from eclip.files.observations import ObservedHome, ObservedRun
from eclip.planner.evaluate import SimEvaluator
from eclip.planner.policies import PolicyOptions
from eclip.planner.problem import Problem
from eclip.planner.search.candidates import Candidate, Found, Homes, fitted, search
from eclip.planner.search.objective import Objective, Score
from eclip.planner.search.placement import Home, Placer, groups_of
from eclip.planner.search.refine import refine
from eclip.progress import Progress
from eclip.rig.rig import Rig
from eclip.rig.trials import Trials
from eclip.tune.fit import plan_of
from eclip.tune.observe import placements

MOST_REFINE_SECONDS = 3600.0
# Placements that the device begins with, besides those it is told of:
_STARTS = 5  # finalists of the simulator
_STATIC = 1  # static masks of the simulator
_RANDOM = 5  # random placements, which show the simulator's error
_EARLIER = 4  # best placements of an earlier search
_LEVELS = 3  # of stream priorities that a search uses, if the device has them


@dataclass(frozen=True)
class Verification:
    """How a search's candidates are tried on the device before the choice."""

    finalists: int  # plans that run in turns at the end
    refine_seconds: float = 0.0  # of search on the device before the finals
    earlier: tuple[ObservedRun, ...] = ()  # of an earlier search of the mix there

    def __post_init__(self) -> None:
        if self.finalists < 1:
            raise UsageError("at least one plan must be tried on the device")
        if not 0 <= self.refine_seconds <= MOST_REFINE_SECONDS:
            raise UsageError(
                f"the search continues on the device for 0 to {MOST_REFINE_SECONDS:.0f} s"
            )


class Explorer:
    """Searches one mix, for one or several objectives."""

    def __init__(
        self,
        problem: Problem,
        evaluate: SimEvaluator,
        options: PolicyOptions,
        how: Verification,
    ) -> None:
        self.problem = problem
        self.evaluate = evaluate
        self.options = options
        self.how = how
        self._placer = Placer(problem, options.switch_ns)
        self._tried: dict[Homes, None] = {}  # on the device
        self.observed: list[ObservedRun] = []  # on the device, while the search went on there

    def simulate(self, objective: Objective, progress: Progress) -> Found:
        check_refinement(self.how.refine_seconds, objective, rates=self.problem.mix.has_rates)
        return search(
            self.problem,
            self.evaluate,
            objective,
            seconds=self.options.seconds,
            batches=self.options.batches,
            seed=self.options.seed,
            switch_ns=self.options.switch_ns,
            progress=progress,
        )

    def explore(
        self,
        found: Found,
        objective: Objective,
        rig: Rig,
        trials: Trials,
        progress: Progress,
        known: Sequence[Homes] = (),
    ) -> None:
        """Go on with the search on the device, if that is wanted.

        ``known``: further placements to begin with, such as have been tried before, the best first.
        """
        if self.how.refine_seconds == 0:
            return
        try:
            plain_score(self.problem, [objective], trials)
        except StoppedError:  # nothing can be compared yet, and what simulation found stays
            return
        starts = dict.fromkeys(self._best_earlier(objective, trials), "earlier")
        starts |= self._starts(found) | dict.fromkeys(known, "static")
        starts |= dict.fromkeys(self._fitting(known), "fewer units")
        if priority_levels(rig) > 1:
            starts |= dict.fromkeys(self._preferring(found, known), "priorities")
        tried = self._refine([*starts], objective, rig, trials, progress)
        new = [one for one in tried.candidates if one.homes not in self._tried]
        self._tried |= dict.fromkeys(one.homes for one in new)
        self._note(new, starts, rig, trials)

    def tried(self, objective: Objective, rig: Rig, trials: Trials) -> Found | None:
        """All that was tried on the device, ranked for the objective; it is known, and takes no
        time. None: nothing was."""
        if not self._tried:
            return None
        return self._refine([], objective, rig, trials, None)

    def _refine(
        self,
        starts: Sequence[Homes],
        objective: Objective,
        rig: Rig,
        trials: Trials,
        progress: Progress | None,  # None: known scores only
    ) -> Found:
        plain_score(self.problem, [objective], trials)
        return refine(
            self._placer,
            self.evaluate,
            trials,
            objective,
            # Scores of plans tried for other objectives are known and take no time.
            starts=list(dict.fromkeys([*starts, *self._tried])),
            seconds=0.0 if progress is None else self.how.refine_seconds,
            earlier=[(plan, score) for _, plan, score in self._earlier],
            seed=self.options.seed,
            priorities=priority_levels(rig),
            progress=progress,
        )

    @functools.cached_property
    def _earlier(self) -> list[tuple[Homes, Plan, Score]]:
        """The placements, plans and scores of an earlier search."""
        runs = self.how.earlier
        placers = {cost: Placer(self.problem, cost) for cost in {run.switch_ns for run in runs}}
        return [
            (
                tuple(Home(**msgspec.structs.asdict(home)) for home in run.homes),
                plan_of(run.kind, run.homes, placers[run.switch_ns], run.routes),
                Score(run.ratios, run.power_w, (math.inf,) * len(run.homes)),
            )
            for run in runs
        ]

    def _best_earlier(self, objective: Objective, trials: Trials) -> list[Homes]:
        """The best placements of an earlier search, to be planned and tried again: scores of a plan
        differ between two days by a few percent."""
        if not self._earlier:
            return []
        plain = plain_score(self.problem, [objective], trials)
        gave = {homes: objective.value(score, plain) for homes, _, score in self._earlier}
        return sorted(gave, key=lambda homes: -gave[homes])[:_EARLIER]

    def _starts(self, found: Found) -> dict[Homes, str]:
        """The first placements on the device, with the reason for each."""
        starts = {one.homes: "finalist" for one in found.finalists(_STARTS)}
        starts |= {one.homes: "static finalist" for one in found.static[:_STATIC]}
        slices = len(self.problem.topology.slice_units)
        drawn = placements(len(self.problem.profiles), slices, self.options.seed)
        for _, homes in itertools.islice((one for one in drawn if one[1]), _RANDOM):
            starts.setdefault(
                tuple(Home(**msgspec.structs.asdict(home)) for home in homes), "random"
            )
        return starts

    def _preferring(self, found: Found, known: Sequence[Homes]) -> list[Homes]:
        """Placements with priority for workers that get little under plain streams: all of the
        device for every worker, and the best known placement."""
        shares = found.plain.ratios
        first = [share < statistics.fmean(shares) for share in shares]
        return [
            tuple(
                dataclasses.replace(home, priority=int(preferred))
                for home, preferred in zip(homes, first, strict=True)
            )
            for homes in (self._whole, *known[:1])
        ]

    def _fitting(self, known: Sequence[Homes]) -> list[Homes]:
        """All of the device for every worker, and the best known placements, each with kernels that
        fit."""
        if not self.problem.others:
            return []
        return [fitted(homes, self.problem) for homes in (self._whole, *known[:2])]

    @property
    def _whole(self) -> Homes:
        """All of the device for every worker."""
        home = Home(0, 1, len(self.problem.topology.slice_units), 0.0, 0)
        return (home,) * len(self.problem.profiles)

    def _note(
        self,
        candidates: Sequence[Candidate],
        kinds: Mapping[Homes, str],
        rig: Rig,
        trials: Trials,
    ) -> None:
        """Add the trials' scores, which are known and take no time, to ``observed``."""
        alone_rps = rig.alone_rps
        for one, score in zip(candidates, trials([each.plan for each in candidates]), strict=True):
            if min(score.ratios) == 0 or score.power_w == 0:
                continue
            self.observed.append(
                ObservedRun(
                    mix=self.problem.mix.name,
                    kind=kinds.get(one.homes, "refined"),
                    homes=tuple(ObservedHome(**dataclasses.asdict(home)) for home in one.homes),
                    routes=groups_of(one.plan),
                    alone_rps=alone_rps,
                    rates_rps=tuple(
                        ratio * alone for ratio, alone in zip(score.ratios, alone_rps, strict=True)
                    ),
                    power_w=score.power_w,
                    seconds=trials.seconds,
                    switch_ns=self.options.switch_ns,
                )
            )


def check_refinement(seconds: float, objective: Objective, *, rates: bool) -> None:
    """Refuse a search on the device for bounds and rates: its trials are too short to tell them."""
    if seconds > 0 and (objective.kind == "slo" or rates):
        raise UsageError(
            "refine searches on the device for throughput or energy of workers that are always "
            "busy; leave it out for mixes with rates"
        )


def priority_levels(rig: Rig) -> int:
    """How many levels of stream priorities a search uses on the device."""
    return _LEVELS if Capability.PRIORITIES in rig.device.capabilities else 1


def plain_score(problem: Problem, objectives: Sequence[Objective], trials: Trials) -> Score:
    """The score of plain streams in a trial. All plans are compared with it, so a trial without
    results raises. A known score takes no time."""
    (score,) = trials([unpartitioned(problem.topology, problem.profiles, problem.mix)])
    if score.stp == 0 and trials.stopped:
        raise StoppedError("stopped before plain streams were tried")
    check_measured(score, objectives, trials.seconds)
    return score


def check_measured(plain: Score, objectives: Sequence[Objective], seconds: float) -> None:
    energy = any(aim.kind == "energy" for aim in objectives)
    every = (1.0,) * len(plain.ratios)
    counted = min(float(np.dot(plain.ratios, aim.weights or every)) for aim in objectives)
    if counted == 0 or (energy and plain.power_w == 0):
        raise UsageError(
            f"a trial of {seconds:g} s measured nothing; try {10 * seconds:g} s (the option "
            f"trial_seconds of a comparison)"
        )
