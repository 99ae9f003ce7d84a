"""Trials: what plans give on a device, each run for a moment, all workers back to back.

This is ``evaluate`` of a search that goes on on the device itself. What was tried is not tried
again; a plan that the device refuses gives nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from eclip.devices.base import Device, Window
from eclip.devices.load import CLOSED_LOOP, Load
from eclip.errors import EclipError
from eclip.measures import measure, steady_rates
from eclip.plan import Plan
from eclip.planning.objective import Score
from eclip.profile import Profile
from eclip.runtime.program import lower

Source = TypeVar("Source")

# Long enough for two ticks of a GPU's energy counter.
WINDOW = Window(seconds=0.32, warmup_seconds=0.03, trace_ms=0.0)


class Trials(Generic[Source]):
    def __init__(
        self,
        device: Device[Source],
        sources: Sequence[Source],
        profiles: Sequence[Profile],
        alone_rps: Sequence[float],
        window: Window = WINDOW,
        step: Callable[[], None] = lambda: None,  # called after every run
    ) -> None:
        self._device = device
        self._sources = sources
        self._traces = [profile.trace for profile in profiles]
        self._alone_rps = alone_rps
        self._window = window
        self._step = step
        self._known: dict[object, Score] = {}

    def __call__(self, plans: Sequence[Plan]) -> list[Score]:
        return [self._score(plan) for plan in plans]

    def _score(self, plan: Plan) -> Score:
        key = (plan.lanes, plan.variants)
        if key not in self._known:
            self._known[key] = self._try(plan)
        return self._known[key]

    def _try(self, plan: Plan) -> Score:
        workers = len(plan.workers)
        load = Load(label="closed loop", seed=0, arrivals=(CLOSED_LOOP,) * workers)
        try:
            opened = self._device.open(lower(plan, self._traces), self._sources)
        except EclipError:  # such as a kernel whose clusters do not fit these slices
            return Score((0.0,) * workers, 0.0, (float("inf"),) * workers)
        with opened as session:
            log = session.run(load, self._window, self._alone_rps)
        self._step()
        measured = measure(log)
        tails = (worker.p99_ms for worker in measured.workers)
        return Score(
            ratios=tuple(
                rate / alone for rate, alone in zip(steady_rates(log), self._alone_rps, strict=True)
            ),
            power_w=measured.power_w,
            p99_ms=tuple(float("inf") if tail is None else tail for tail in tails),
        )
