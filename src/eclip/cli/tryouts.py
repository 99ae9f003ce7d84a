"""Tryouts: what a contest tries on the device before its rounds.

Swept policies (MPS shares, static masks) try their settings in short runs, and the best one for
every objective enters. A search that is to be verified goes on from all masks that were swept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from eclip.artefacts.comparison import Trial, trial_of
from eclip.artefacts.plan import Plan, unpartitioned
from eclip.cli.contest_options import ContestOptions
from eclip.cli.verification import Opened, Verifier, check_measured
from eclip.devices.base import Window
from eclip.devices.load import load_of_mix
from eclip.errors import UsageError
from eclip.lab.trials import score_of
from eclip.planning.problem import Problem
from eclip.planning.search.masks import StaticMasks, best_setting, masks_setting
from eclip.planning.search.objective import Objective, Score

if TYPE_CHECKING:
    from eclip.artefacts.runlog import RunLog
    from eclip.devices.base import Session
    from eclip.devices.remote import ProcessSession
    from eclip.planning.search.candidates import Found
    from eclip.planning.search.placement import Home

_WARMUP_S = 0.05
_TAIL_SECONDS = 2.0  # of a run that is to tell a 99th percentile


@dataclass(frozen=True)
class Setting:
    """One that won its trials, and all that were tried."""

    plan: Plan
    label: str
    trials: tuple[Trial, ...]


class Tryouts:
    def __init__(
        self,
        problem: Problem,
        opened: Opened,
        options: ContestOptions,
        seed: int,
        step: Callable[[], None],  # called after every run
    ) -> None:
        self._problem = problem
        self._opened = opened
        self._options = options
        self._seed = seed
        self._step = step
        self._window = Window(seconds=options.trial_seconds, warmup_seconds=_WARMUP_S, trace_ms=0.0)
        self._trials = opened.trials(problem.mix, window=self._window, seed=seed, step=step)
        self._masks: list[tuple[tuple[Home, ...], Score]] = []  # that were tried

    def run(self, session: Session) -> RunLog:
        """A short run under the mix's load."""
        window = self._window
        load = load_of_mix(self._problem.mix, window.seconds, window.warmup_seconds, self._seed)
        log = session.run(load, window, self._opened.alone_rps)
        self._step()
        return log

    def sweep_masks(self) -> list[Setting]:
        """The best static masks for every objective."""
        aims = self._options.objectives
        trials = self._options.trials * len(aims)
        masks = StaticMasks(self._problem, trials, self._seed)
        plans: list[Plan] = []
        scores: list[Score] = []
        for number in range(trials):
            aim = aims[number % len(aims)]
            homes = masks.propose(self._masks[self._best(scores, aim)][0] if scores else None)
            if homes is None:
                break
            plan = masks.plan(homes)
            (score,) = self._trials([plan])
            if score.stp > 0:
                self._masks.append((homes, score))
                plans.append(plan)
                scores.append(score)
        if not scores:
            raise self._trials.refused or UsageError("no static masks could be tried")
        labels = [masks_setting(plan) for plan in plans]
        tried = _trials(labels, scores)
        return [
            Setting(self._named(plans[best], aim), labels[best], tried)
            for best, aim in self._winners(scores).items()
        ]

    def sweep_processes(
        self, sessions: Sequence[ProcessSession]
    ) -> list[tuple[Setting, ProcessSession]]:
        """The best of these sets of processes for every objective; the others leave."""
        several = len(sessions) > 1
        scores = [score_of(self.run(session)) for session in sessions] if several else []
        winners = self._winners(scores) if several else {0: self._options.objectives[0]}
        losers = [session for index, session in enumerate(sessions) if index not in winners]
        for session in losers:
            session.dismiss()
        for session in losers:
            session.close()
        tried = _trials([session.sharing.label for session in sessions], scores)
        found = []
        for best, aim in winners.items():
            sharing = sessions[best].sharing
            label = "" if sharing.shares is None else sharing.label
            found.append((Setting(self._named(sharing.plan, aim), label, tried), sessions[best]))
        return found

    def name(self, plans: Sequence[Plan]) -> list[Plan]:
        """One plan for every objective, with the objective in its policy's name."""
        return [
            self._named(plan, aim)
            for plan, aim in zip(plans, self._options.objectives, strict=True)
        ]

    def confirm(
        self, verifier: Verifier, searches: Sequence[tuple[Objective, Found]]
    ) -> list[Plan]:
        """What the device confirms of what was found by simulation, for every objective."""
        # All of it first: what is tried for one objective may serve another.
        for aim, found in searches:
            best = sorted(self._masks, key=lambda one: -aim.value(one[1], self._plain))
            known = [homes for homes, _ in best]  # and what they gave, by the same trials
            verifier.explore(found, aim, self._opened, self._trials, lambda part: None, known)
        plans = [
            verifier.confirm(
                found, aim, self._opened, self._trials, self._window, lambda part: None
            )
            for aim, found in searches
        ]
        return self.name(plans)

    def confirm_for_load(self, verifier: Verifier, found: Found, aim: Objective) -> Plan:
        """The same for requests that arrive by themselves, in runs long enough for their tails."""
        window = Window(seconds=_TAIL_SECONDS, warmup_seconds=_WARMUP_S, trace_ms=0.0)
        return verifier.confirm(found, aim, self._opened, self._trials, window, lambda part: None)

    @functools.cached_property
    def _plain(self) -> Score:
        """What plain streams give in a trial: settings are held to their fairness."""
        problem = self._problem
        (score,) = self._trials([unpartitioned(problem.topology, problem.profiles, problem.mix)])
        check_measured(score, self._options.objectives, self._options.trial_seconds)
        return score

    def _best(self, scores: Sequence[Score], aim: Objective) -> int:
        return best_setting(scores, aim, self._plain)

    def _winners(self, scores: Sequence[Score]) -> dict[int, Objective]:
        """The best setting for every objective; one that is best for several counts once."""
        winners: dict[int, Objective] = {}
        for aim in self._options.objectives:
            winners.setdefault(self._best(scores, aim), aim)
        return winners

    def _named(self, plan: Plan, aim: Objective) -> Plan:
        """With the objective in its policy's name, if that is not the first one."""
        if aim == self._options.objectives[0]:
            return plan
        return msgspec.structs.replace(plan, policy=f"{plan.policy}-{aim.kind}")


def _trials(labels: Sequence[str], scores: Sequence[Score]) -> tuple[Trial, ...]:
    return tuple(
        trial_of(label, score.stp, score.fairness, score.efficiency)
        for label, score in zip(labels, scores, strict=bool(scores))
    )
