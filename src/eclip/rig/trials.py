"""Trials: scores of plans by short runs on a device under the mix's load.

A search on the device, and sweeps, use Trials as ``evaluate``. A plan that was tried is not run
again. A plan that the device refuses, or that comes after a stop request, scores ``nothing``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from eclip.core.device import Window
from eclip.core.load import load_of_mix
from eclip.core.measures import Measures, measure, steady_rates
from eclip.core.mix import Mix
from eclip.core.plan import Plan
from eclip.core.runlog import RunLog
from eclip.errors import EclipError, StoppedError
from eclip.planner.search.objective import Score
from eclip.progress import Progress
from eclip.rig.rig import Rig

# Long enough for two ticks of a GPU's energy counter.
_WINDOW = Window(seconds=0.26, warmup_seconds=0.03, trace_ms=0.0)


class Trials:
    def __init__(
        self,
        rig: Rig,
        mix: Mix | None = None,  # with rates of its own; without: the case's
        *,
        window: Window = _WINDOW,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> None:
        self.seconds = window.seconds  # of one run
        self.refused: EclipError | None = None  # the reason of the last refusal
        self._rig = rig
        self._load = load_of_mix(mix or rig.case.mix, window.seconds, window.warmup_seconds, seed)
        self._window = window
        self._progress = progress or Progress()
        self._known: dict[object, Score] = {}

    @property
    def stopped(self) -> bool:
        """True after a stop request: plans that were not tried score ``nothing``."""
        return self._progress.stopped

    def __call__(self, plans: Sequence[Plan]) -> list[Score]:
        return [self._score(plan) for plan in plans]

    def _score(self, plan: Plan) -> Score:
        # Not their words: placements that differ in price or direction may come to the same plan.
        rules = tuple((one.joints, one.promise, one.floor) for one in plan.workers)
        key = (plan.models, plan.lanes, plan.variants, rules)
        if key not in self._known:
            score = nothing(len(plan.workers)) if self.stopped else self._try(plan)
            if self.stopped:  # it may have been cut short
                return nothing(len(plan.workers))
            self._known[key] = score
        return self._known[key]

    def _try(self, plan: Plan) -> Score:
        try:
            session = self._rig.open(plan, brief=True)
        except EclipError as error:  # such as a kernel whose clusters do not fit these slices
            self.refused = error
            return nothing(len(plan.workers))
        with session:
            try:
                return score_of(self._rig.run(session, plan, self._load, self._window))
            except StoppedError:
                return nothing(len(plan.workers))


def nothing(workers: int) -> Score:
    """The score of a plan that did not run."""
    return Score((0.0,) * workers, 0.0, (math.inf,) * workers)


def score_of(log: RunLog) -> Score:
    """The score of a short run. Rates of closed-loop workers are taken between completions."""
    measures = measure(log)
    rates = [worker.rate_rps for worker in measures.workers]
    for index, steady in enumerate(steady_rates(log)):
        if log.plan.mix.workers[index].rate_rps is None and steady > 0:
            rates[index] = steady
    return Score(
        ratios=tuple(rate / alone for rate, alone in zip(rates, log.alone_rps, strict=True)),
        power_w=measures.power_w,
        p99_ms=tails(measures),
    )


def tails(measures: Measures) -> tuple[float, ...]:
    """Every worker's p99; infinite if no request completed."""
    return tuple(
        math.inf if worker.p99_ms is None else worker.p99_ms for worker in measures.workers
    )
