"""Verification: from what a search found by simulation to a plan that the device has confirmed.

The search may go on on the device, from the simulator's best plans, masks that were swept, a few
random placements and some with stream priorities. At the end the best plans, plain streams and the
best static masks run in turns, longer, and what measures best is the plan.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from eclip.artefacts.measures import waits_longest
from eclip.artefacts.observations import ObservedHome, ObservedRun
from eclip.cli import wiring
from eclip.devices.base import Window
from eclip.devices.load import load_of_mix
from eclip.errors import EclipError, UsageError

if TYPE_CHECKING:
    from eclip.artefacts.mix import Mix
    from eclip.artefacts.plan import Plan
    from eclip.artefacts.runlog import RunLog
    from eclip.devices.base import Device, Session
    from eclip.lab.evaluate import Evaluator
    from eclip.lab.trials import Trials
    from eclip.planning.policies import PolicyOptions
    from eclip.planning.problem import Problem
    from eclip.planning.search.candidates import Candidate, Found
    from eclip.planning.search.decision import Entry
    from eclip.planning.search.objective import Objective, Score
    from eclip.planning.search.placement import Home

_ROUNDS = 2  # of the runs in turns
# Of such a run, at least: a GPU may go above its power limit for a quarter of a second, and its
# energy counter ticks ten times in one.
_SECONDS = {"throughput": 0.5, "energy": 1.0, "latency": 0.5}
# Placements that the device begins with, besides those it is told of:
_STARTS = 5  # finalists of the simulator
_STATIC = 1  # static masks of the simulator
_RANDOM = 5  # at random, which tell how far the simulator can be trusted
_EARLIER = 4  # the best that an earlier search has tried


@dataclass(frozen=True)
class Verification:
    finalists: int  # plans that run in turns at the end
    refine_seconds: float = 0.0  # how long the search goes on on the device before
    earlier: tuple[ObservedRun, ...] = ()  # what an earlier search of the mix has tried there

    def __post_init__(self) -> None:
        if self.finalists < 1:
            raise UsageError("at least one plan must be tried on the device")
        if not 0 <= self.refine_seconds <= 3600:
            raise UsageError("the search goes on on the device for 0 to 3600 s")


@dataclass(frozen=True)
class Opened:
    """A device with its sources, and every worker's rate alone on it."""

    device: Device[Any]
    sources: wiring.Sources
    alone_rps: Sequence[float]

    def open(self, plan: Plan) -> Session:
        return self.sources.open(self.device, plan)

    def trials(self, mix: Mix, **options: Any) -> Trials:
        """Short runs of plans, under the mix's load."""
        from eclip.lab.trials import Trials

        return Trials(self.open, self.alone_rps, mix, **options)


class Verifier:
    """Searches one mix, for one or several objectives."""

    def __init__(
        self, problem: Problem, evaluate: Evaluator, options: PolicyOptions, how: Verification
    ) -> None:
        self._problem = problem
        self._evaluate = evaluate
        self._options = options
        self._how = how
        self._busy = all(worker.rate_rps is None for worker in problem.mix.workers)
        self._tried: dict[tuple[Home, ...], None] = {}  # on the device
        self.observed: list[ObservedRun] = []  # on the device, while the search went on there

    def simulate(self, objective: Objective, progress: wiring.Progress) -> Found:
        from eclip.planning.search.candidates import search

        if self._how.refine_seconds > 0 and (objective.kind == "latency" or not self._busy):
            raise UsageError(
                "a search goes on on the device (--refine) for throughput or energy of workers "
                "that are always busy"
            )
        return search(
            self._problem,
            self._evaluate,
            objective,
            seconds=self._options.seconds,
            batches=self._options.batches,
            seed=self._options.seed,
            switch_ns=self._options.switch_ns,
            progress=progress,
        )

    def explore(
        self,
        found: Found,
        objective: Objective,
        opened: Opened,
        trials: Trials,
        progress: wiring.Progress,
        known: Sequence[tuple[Home, ...]] = (),
    ) -> None:
        """Go on with the search on the device, if that is wanted.

        ``known``: further placements to begin with, such as have been tried before, the best first.
        """
        if self._how.refine_seconds == 0:
            return
        starts = dict.fromkeys(self._best_earlier(objective, trials), "earlier")
        starts |= self._starts(found) | dict.fromkeys(known, "static")
        starts |= dict.fromkeys(self._fitting(known), "other kernels")
        levels = wiring.priority_levels(opened.device)
        if levels > 1:
            starts |= dict.fromkeys(self._preferring(found, known), "priorities")
        seconds = self._how.refine_seconds
        tried = self._refine([*starts], objective, opened, trials, seconds, progress)
        new = [one for one in tried.candidates if one.homes not in self._tried]
        self._tried |= dict.fromkeys(one.homes for one in new)
        self._note(new, starts, opened, trials)

    def confirm(
        self,
        found: Found,
        objective: Objective,
        opened: Opened,
        trials: Trials,
        window: Window,
        progress: wiring.Progress,
    ) -> Plan:
        """The plan that measures best, with its evidence and its variants: of what was explored,
        for whatever objective, or of what simulation found."""
        from eclip.planning.search.decision import decide, shortlist
        from eclip.planning.search.variants import with_variants

        tried = None
        if self._tried:  # which is known, and takes no time
            tried = self._refine([], objective, opened, trials, 0.0, lambda part: None)
        entries = shortlist(tried or found, self._problem, self._how.finalists, objective)
        if objective.kind == "latency" and wiring.priority_levels(opened.device) > 1:
            entries += self._preferring_who_waits(entries, opened.alone_rps)
        plans = [entry.plan for entry in entries]
        if not self._busy:
            # Where requests arrive by themselves, what happens beside idle workers counts.
            plans = [with_variants(one, self._problem, self._evaluate, objective) for one in plans]
        seconds = max(window.seconds, _SECONDS[objective.kind])
        window = dataclasses.replace(window, seconds=seconds)
        ran = self._in_turns(plans, opened, window, progress)
        plain = ran[0]
        scores = [wiring.mean_score(logs) for logs in ran.values()]
        check_measured(scores[0], [objective], window.seconds)
        plan = decide(
            [dataclasses.replace(entries[index], plan=plans[index]) for index in ran],
            scores,
            found,
            dataclasses.replace(objective, rough=True),
            seed=self._options.seed,
            device=plain[0].device,
            modelled=plain[0].modelled,
            tried=tried,
        )
        return with_variants(plan, self._problem, self._evaluate, objective)

    def _refine(
        self,
        starts: Sequence[tuple[Home, ...]],
        objective: Objective,
        opened: Opened,
        trials: Trials,
        seconds: float,
        progress: wiring.Progress,
    ) -> Found:
        """Everything that was tried on the device and what is tried now, ranked for the
        objective."""
        from eclip.planning.search.refine import refine

        with wiring.quick_opening(opened.device):
            self._plain(objective, trials)
            return refine(
                self._problem,
                self._evaluate,
                trials,
                dataclasses.replace(objective, rough=True),
                # What was tried for another objective is known and takes no time.
                starts=list(dict.fromkeys([*starts, *self._tried])),
                seconds=seconds,
                earlier=[(plan, score) for _, plan, score in self._earlier],
                seed=self._options.seed,
                switch_ns=self._options.switch_ns,
                priorities=wiring.priority_levels(opened.device),
                progress=progress,
            )

    def _plain(self, objective: Objective, trials: Trials) -> Score:
        """What plain streams give in a trial, which must be something; once it is known it takes no
        time."""
        from eclip.artefacts.plan import unpartitioned

        problem = self._problem
        (score,) = trials([unpartitioned(problem.topology, problem.profiles, problem.mix)])
        check_measured(score, [objective], trials.seconds)
        return score

    @functools.cached_property
    def _earlier(self) -> list[tuple[tuple[Home, ...], Plan, Score]]:
        """What an earlier search has tried, with the plans as they ran and what they gave."""
        from eclip.lab.fit import plan_of
        from eclip.planning.search.objective import Score
        from eclip.planning.search.placement import Home, Placer

        runs = self._how.earlier
        placers = {cost: Placer(self._problem, cost) for cost in {run.switch_ns for run in runs}}
        return [
            (
                tuple(Home(**msgspec.structs.asdict(home)) for home in run.homes),
                plan_of(run.kind, run.homes, placers[run.switch_ns], run.routes),
                Score(run.ratios, run.power_w, (math.inf,) * len(run.homes)),
            )
            for run in runs
        ]

    def _best_earlier(self, objective: Objective, trials: Trials) -> list[tuple[Home, ...]]:
        """The placements with which an earlier search did best, to be planned anew and tried again:
        what a plan gives differs between two days by a few percent."""
        if not self._earlier:
            return []
        plain = self._plain(objective, trials)
        gave = {homes: objective.value(score, plain) for homes, _, score in self._earlier}
        return sorted(gave, key=lambda homes: -gave[homes])[:_EARLIER]

    def _starts(self, found: Found) -> dict[tuple[Home, ...], str]:
        """Where the device begins, and why there."""
        from eclip.lab.observe import placements
        from eclip.planning.search.placement import Home

        starts = {one.homes: "finalist" for one in found.finalists(_STARTS)}
        starts |= {one.homes: "static finalist" for one in found.static[:_STATIC]}
        slices = len(self._problem.topology.slice_units)
        drawn = placements(len(self._problem.profiles), slices, self._options.seed)
        for _, homes in itertools.islice((one for one in drawn if one[1]), _RANDOM):
            starts.setdefault(
                tuple(Home(**msgspec.structs.asdict(home)) for home in homes), "random"
            )
        return starts

    def _preferring(
        self, found: Found, known: Sequence[tuple[Home, ...]]
    ) -> list[tuple[Home, ...]]:
        """Placements in which whoever gets little under plain streams goes first: with all of the
        device for everybody, and in the best of the known placements."""
        shares = found.plain.ratios
        first = [share < statistics.fmean(shares) for share in shares]
        return [
            tuple(
                dataclasses.replace(home, priority=int(preferred))
                for home, preferred in zip(homes, first, strict=True)
            )
            for homes in (self._whole, *known[:1])
        ]

    @staticmethod
    def _preferring_who_waits(entries: Sequence[Entry], alone_rps: Sequence[float]) -> list[Entry]:
        """Those without masks once more, whoever waits longest for its length going first: of
        priorities simulation knows nothing."""
        from eclip.planning.search.decision import OTHER_KERNELS, PLAIN

        first = waits_longest(entries[0].found.p99_ms, alone_rps)
        name = entries[0].plan.workers[first].name
        return [
            dataclasses.replace(
                entry,
                label=f"{entry.label}, {name} first",
                plan=msgspec.structs.replace(
                    entry.plan,
                    lanes=tuple(
                        msgspec.structs.replace(lane, priority=int(lane.owner == first))
                        for lane in entry.plan.lanes
                    ),
                ),
            )
            for entry in entries
            if entry.label in (PLAIN, OTHER_KERNELS)
        ]

    def _fitting(self, known: Sequence[tuple[Home, ...]]) -> list[tuple[Home, ...]]:
        """All of the device for everybody and the best known placements, with kernels that fit
        them."""
        from eclip.planning.search.candidates import fitted

        if not self._problem.others:
            return []
        return [fitted(homes, self._problem) for homes in (self._whole, *known[:2])]

    @property
    def _whole(self) -> tuple[Home, ...]:
        """All of the device for everybody."""
        from eclip.planning.search.placement import Home

        home = Home(0, 1, len(self._problem.topology.slice_units), 0.0, 0)
        return (home,) * len(self._problem.profiles)

    def _note(
        self,
        candidates: Sequence[Candidate],
        kinds: Mapping[tuple[Home, ...], str],
        opened: Opened,
        trials: Trials,
    ) -> None:
        """What the trials themselves gave, which are known and take no time."""
        from eclip.planning.search.placement import groups_of

        measured = trials([one.plan for one in candidates])
        for one, score in zip(candidates, measured, strict=True):
            if min(score.ratios) == 0 or score.power_w == 0:
                continue
            self.observed.append(
                ObservedRun(
                    mix=self._problem.mix.name,
                    kind=kinds.get(one.homes, "refined"),
                    homes=tuple(ObservedHome(**dataclasses.asdict(home)) for home in one.homes),
                    routes=groups_of(one.plan),
                    alone_rps=tuple(opened.alone_rps),
                    rates_rps=tuple(
                        ratio * alone
                        for ratio, alone in zip(score.ratios, opened.alone_rps, strict=True)
                    ),
                    power_w=score.power_w,
                    seconds=trials.seconds,
                    switch_ns=self._options.switch_ns,
                )
            )

    def _in_turns(
        self, plans: Sequence[Plan], opened: Opened, window: Window, progress: wiring.Progress
    ) -> dict[int, list[RunLog]]:
        """Every plan under the mix's load, several rounds, each beginning with another plan.

        By the plan's place. One that the device refuses, such as for a kernel whose clusters do not
        fit its slices, is left out; the first, plain streams, must run.
        """
        from eclip.lab.rounds import rotation

        load = load_of_mix(
            self._problem.mix, window.seconds, window.warmup_seconds, self._options.seed
        )
        logs: dict[int, list[RunLog]] = {}
        with contextlib.ExitStack() as stack:
            sessions = []
            for index, plan in enumerate(plans):
                try:
                    session = opened.open(plan)
                except EclipError:
                    if index == 0:
                        raise
                    continue
                sessions.append((index, stack.enter_context(session)))
                logs[index] = []
            for done, (_, turn) in enumerate(rotation(len(sessions), _ROUNDS), 1):
                index, session = sessions[turn]
                logs[index].append(session.run(load, window, opened.alone_rps))
                progress(done / (_ROUNDS * len(sessions)))
        return logs


def check_measured(plain: Score, objectives: Sequence[Objective], seconds: float) -> None:
    """Everything is compared with what plain streams gave in a run of so many seconds."""
    energy = any(aim.kind == "energy" for aim in objectives)
    every = (1.0,) * len(plain.ratios)
    counted = min(float(np.dot(plain.ratios, aim.weights or every)) for aim in objectives)
    if counted == 0 or (energy and plain.power_w == 0):
        raise UsageError(
            f"a trial of {seconds:g} s measured nothing; give eclip compare more --trial-seconds"
        )
