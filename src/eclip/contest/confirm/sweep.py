"""Sweeps: swept policies try their settings in short runs, and the best setting for every objective
takes part in the contest.

A user who partitions a GPU by hand tries a few splits and keeps the best. Swept policies do the
same: static masks, and shares of MPS.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from eclip.contest.confirm.explore import plain_score
from eclip.core.device import Session, Window
from eclip.core.load import load_of_mix
from eclip.core.plan import Plan, Processes
from eclip.errors import StoppedError, UsageError
from eclip.files.comparison import SettingTrial, trial_of
from eclip.planner.problem import Problem
from eclip.planner.search.candidates import Homes
from eclip.planner.search.giving import tradeoff_of
from eclip.planner.search.masks import StaticMasks, best_setting, masks_setting
from eclip.planner.search.objective import Objective, Score
from eclip.progress import Progress
from eclip.rig.rig import Rig
from eclip.rig.trials import Trials, score_of

_WARMUP_S = 0.05
MOST_CLIENTS = 48  # of MPS that one GPU serves at once
# What is tried first counts most: one share for all of 60% was the best of most mixes on an H200,
# 100% is what MPS does unless told, and equal parts take the least energy.
_SHARES = (60, 100, 0, 75, 50, 85, 40, 33, 25)  # percent; 0 stands for equal parts


@dataclass(frozen=True)
class Setting:
    """A setting that won its trials, with all the settings that were tried."""

    plan: Plan
    label: str
    trials: tuple[SettingTrial, ...]


class Sweep:
    """The sweeps of one contest, for one or several objectives."""

    def __init__(
        self,
        rig: Rig,
        objectives: Sequence[Objective],
        seconds: float,  # of a trial
        seed: int,
        progress: Progress,
    ) -> None:
        self._rig = rig
        self._problem: Problem = rig.case.problem()
        self._objectives = objectives
        self._seed = seed
        self._progress = progress
        self.window = Window(seconds=seconds, warmup_seconds=_WARMUP_S, trace_ms=0.0)
        self.trials = Trials(rig, window=self.window, seed=seed, progress=progress)
        self._masks: list[tuple[Homes, Score]] = []  # that were tried

    def run(self, session: Session, plan: Plan) -> Score:
        """The score of a short run under the mix's load."""
        window, mix = self.window, self._problem.mix
        load = load_of_mix(mix, window.seconds, window.warmup_seconds, self._seed)
        return score_of(self._rig.run(session, plan, load, window))

    def masks(self, count: int) -> list[Setting]:
        """The best static masks for every objective, of ``count`` tried for each."""
        aims = self._objectives
        wanted = count * len(aims)
        proposals = StaticMasks(self._problem, wanted, self._seed)
        plans: list[Plan] = []
        for number in range(wanted):
            if self._progress.stopped:
                break
            aim = aims[number % len(aims)]
            best = self._masks[self._best(self._scores, aim)][0] if self._masks else None
            homes = proposals.propose(best)
            if homes is None:
                break
            plan = proposals.plan(homes)
            (score,) = self.trials([plan])
            if score.stp > 0:
                self._masks.append((homes, score))
                plans.append(plan)
            self._progress.part((number + 1) / wanted)
        if not plans and self._progress.stopped:
            raise StoppedError("stopped before any static masks were tried")
        if not plans:
            raise self.trials.refused or UsageError("no static masks could be tried")
        labels = [masks_setting(plan) for plan in plans]
        tried = self._tried(labels, self._scores)
        return [
            Setting(self.named(plans[best], aim), labels[best], tried)
            for best, aim in self._winners(self._scores).items()
        ]

    def processes(
        self, plans: Sequence[Plan], sessions: Sequence[Session]
    ) -> list[tuple[Setting, Session]]:
        """The best session for every objective; the others are closed."""
        several = len(sessions) > 1
        scores = [
            self.run(session, plan)
            for plan, session in zip(plans, sessions, strict=True)
            if several
        ]
        winners = self._winners(scores) if several else {0: self._objectives[0]}
        for index, session in enumerate(sessions):
            if index not in winners:
                session.close()
        labels = [_label(plan) for plan in plans]
        tried = self._tried(labels, scores) if several else ()
        return [
            (Setting(self.named(plans[best], aim), labels[best], tried), sessions[best])
            for best, aim in winners.items()
        ]

    def best_masks(self, objective: Objective) -> list[Homes]:
        """All masks that were tried, the best first."""
        if not self._masks:  # then plain streams need not be tried to rank them
            return []
        plain = self._plain
        ranked = sorted(self._masks, key=lambda masks: -objective.value(masks[1], plain))
        return [homes for homes, _ in ranked]

    def named(self, plan: Plan, objective: Objective) -> Plan:
        """The plan, with the objective in its policy's name unless the objective is the first."""
        if objective == self._objectives[0]:
            return plan
        return msgspec.structs.replace(plan, policy=f"{plan.policy}-{objective.kind}")

    @functools.cached_property
    def _plain(self) -> Score:
        """The score of plain streams in a trial; settings must reach their fairness."""
        return plain_score(self._problem, self._objectives, self.trials)

    @property
    def _scores(self) -> list[Score]:
        return [score for _, score in self._masks]

    def _best(self, scores: Sequence[Score], objective: Objective) -> int:
        return best_setting(scores, objective, self._plain)

    def _tried(self, labels: Sequence[str], scores: Sequence[Score]) -> tuple[SettingTrial, ...]:
        aim = next((aim for aim in self._objectives if aim.kind == "slo"), None)
        return tuple(
            trial_of(
                label,
                score.stp,
                score.fairness,
                score.efficiency,
                None if aim is None else tradeoff_of(label, score, aim),
            )
            for label, score in zip(labels, scores, strict=True)
        )

    def _winners(self, scores: Sequence[Score]) -> dict[int, Objective]:
        """The best setting for every objective, without repeats."""
        winners: dict[int, Objective] = {}
        for aim in self._objectives:
            winners.setdefault(self._best(scores, aim), aim)
        return winners


def equal_shares(workers: int, sets: int) -> tuple[int, ...]:
    """Shares to try, the same for every worker, for at most ``sets`` sets of processes.

    Shares below an equal part would leave units unused.
    """
    equal = max(1, 100 // workers)
    wanted = dict.fromkeys(share or equal for share in _SHARES if share == 0 or share >= equal)
    fitting = min(sets, MOST_CLIENTS // workers)
    return tuple(sorted(list(wanted)[: max(0, fitting)], reverse=True))


def _label(plan: Plan) -> str:
    return f"mps {plan.sharing.label}" if isinstance(plan.sharing, Processes) else ""
