"""Trials: what plans give on a device under the mix's load, each run for a moment.

This is ``evaluate`` of a search that goes on on the device itself, and of sweeps. What was tried is
not tried again; a plan that the device refuses gives nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from eclip.artefacts.measures import measure, steady_rates
from eclip.artefacts.mix import Mix
from eclip.artefacts.plan import Plan
from eclip.artefacts.runlog import RunLog
from eclip.devices.base import Session, Window
from eclip.devices.load import load_of_mix
from eclip.errors import EclipError
from eclip.planning.search.objective import Score

# Long enough for two ticks of a GPU's energy counter.
_WINDOW = Window(seconds=0.26, warmup_seconds=0.03, trace_ms=0.0)


class Trials:
    def __init__(
        self,
        opened: Callable[[Plan], Session],  # a session of a plan
        alone_rps: Sequence[float],
        mix: Mix,
        *,
        window: Window = _WINDOW,
        seed: int = 0,
        step: Callable[[], None] = lambda: None,  # called after every run
    ) -> None:
        self.seconds = window.seconds  # of one run
        self.refused: EclipError | None = None  # why, the last time that a plan was
        self._open = opened
        self._alone_rps = alone_rps
        self._load = load_of_mix(mix, window.seconds, window.warmup_seconds, seed)
        self._window = window
        self._step = step
        self._known: dict[object, Score] = {}

    def __call__(self, plans: Sequence[Plan]) -> list[Score]:
        return [self._score(plan) for plan in plans]

    def _score(self, plan: Plan) -> Score:
        key = (plan.models, plan.lanes, plan.variants)
        if key not in self._known:
            self._known[key] = self._try(plan)
        return self._known[key]

    def _try(self, plan: Plan) -> Score:
        workers = len(plan.workers)
        try:
            opened = self._open(plan)
        except EclipError as error:  # such as a kernel whose clusters do not fit these slices
            self.refused = error
            return Score((0.0,) * workers, 0.0, (float("inf"),) * workers)
        with opened as session:
            log = session.run(self._load, self._window, self._alone_rps)
        self._step()
        return score_of(log)


def score_of(log: RunLog) -> Score:
    """Of a short run. Workers that are always busy have their rates between completions."""
    found = measure(log)
    rates = [worker.rate_rps for worker in found.workers]
    for index, steady in enumerate(steady_rates(log)):
        if log.plan.mix.workers[index].rate_rps is None and steady > 0:
            rates[index] = steady
    return Score(
        ratios=tuple(rate / alone for rate, alone in zip(rates, log.alone_rps, strict=True)),
        power_w=found.power_w,
        p99_ms=tuple(
            float("inf") if worker.p99_ms is None else worker.p99_ms for worker in found.workers
        ),
    )
