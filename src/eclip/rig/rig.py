"""Rig: an open device, its executables, and the workers' rates alone.

This is the one place that opens a plan, runs it, and takes the log. *Alone* means: all workers are
there, in one session of plain streams, and all but one are idle. Rates alone are taken again
between the runs of a long measurement (``measure_alone``), because a device's speed changes with
time; a log carries those that were last measured.

Where workers give way, what counts is a service's latency alone and background's rate alone in the
very session that they share (``run_beside_alone``): its loop has costs that plain streams have not.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from eclip.capture.sources import make_source
from eclip.core.device import (
    Closing,
    Device,
    Session,
    SourceKind,
    StartedSessions,
    Window,
)
from eclip.core.load import CLOSED_LOOP, Load
from eclip.core.memory import check_memory, memory_of_plan
from eclip.core.model_key import ModelKey
from eclip.core.plan import Plan, unpartitioned
from eclip.core.profile import Profile
from eclip.core.program import lower
from eclip.core.runlog import RunLog
from eclip.errors import StoppedError, UsageError
from eclip.planner.alone import alone_rate, alone_rates
from eclip.planner.case import Case
from eclip.planner.evaluate import SimEvaluator
from eclip.progress import Progress
from eclip.rig.rounds import rotation

# Of background alone, at least: a GPU may go above its power limit for a quarter of a second.
_BACKGROUND_SECONDS = 1.0
_EVERYBODY = -1  # in place of a worker: all workers


class Rig(Closing):
    """``extra``: profiles of plans that are not the case's, which may have other kernels."""

    def __init__(self, case: Case, device: Device, extra: Iterable[Profile] = ()) -> None:
        self.case = case
        self.device = device
        self._profiles = {profile.model: profile for profile in (*extra, *case.profiles)}
        self._made: dict[tuple[SourceKind, int, ModelKey], Any] = {}
        self._alone: list[tuple[float, ...]] = []  # every time they were measured

    @functools.cached_property
    def evaluator(self) -> SimEvaluator:
        """Simulates plans of the case; what it finds out of its workers is kept."""
        return SimEvaluator.of(self.case)

    @property
    def alone_rps(self) -> tuple[float, ...]:
        """Every worker's rate alone, the median of all measurements; measured now if there are
        none."""
        if not self._alone:
            self.measure_alone()
        return tuple(statistics.median(rates) for rates in zip(*self._alone, strict=True))

    def measure_alone(self) -> None:
        profiles = self.case.profiles
        kind = self.device.source_kind(self.plain.sharing)
        self._alone.append(alone_rates(self.device, profiles, self._sources(kind, profiles)))

    def prepare(self) -> None:
        """Make the executables of the case's workers, which takes seconds on a GPU."""
        self._sources(self.device.source_kind(self.plain.sharing), self.case.profiles)

    def open(self, plan: Plan, *, brief: bool = False) -> Session:
        """A session of the plan; ``brief`` opens faster, for short runs."""
        profiles = self.profiles_of(plan)
        check_memory(memory_of_plan(plan, self.device.topology), "the plan")  # before any capture
        program = lower(plan, [profile.trace for profile in profiles])
        kind = self.device.source_kind(plan.sharing)
        return self.device.open(program, self._sources(kind, profiles), brief=brief)

    def start(self, plans: Sequence[Plan]) -> StartedSessions:
        """Sessions of plans whose workers are processes, not waited for yet."""
        jobs = [self._sources(SourceKind.JOB, self.profiles_of(plan)) for plan in plans]
        return self.device.start(plans, jobs)

    def run(self, session: Session, plan: Plan, load: Load, window: Window) -> RunLog:
        """A run of the session. Its log gets ``plan`` and the rates alone."""
        alone_rps = self.alone_rps  # before: a stop request must not cost the run
        log = session.run(load, window)
        return msgspec.structs.replace(log, plan=plan, alone_rps=alone_rps)

    def run_once(self, plan: Plan, load: Load, window: Window) -> RunLog:
        with self.open(plan) as session:
            return self.run(session, plan, load, window)

    def close(self) -> None:
        self._made.clear()
        self.device.close()

    @property
    def plain(self) -> Plan:
        return unpartitioned(self.case.topology, self.case.profiles, self.case.mix)

    def profiles_of(self, plan: Plan) -> list[Profile]:
        if not self._profiles.keys() >= set(plan.models):  # others are only read if they are needed
            self._profiles = {other.model: other for other in self.case.others} | self._profiles
        missing = [str(model) for model in plan.models if model not in self._profiles]
        if missing:
            raise UsageError(
                f"the plan needs the profile of {', '.join(missing)}; give its folder as profiles"
            )
        return [self._profiles[model] for model in plan.models]

    def _sources(self, kind: SourceKind, profiles: Sequence[Profile]) -> list[Any]:
        """A source for every worker, made at first use: a capture has its own buffers."""
        for worker, profile in enumerate(profiles):
            key = (kind, worker, profile.model)
            if key not in self._made:
                self._made[key] = make_source(kind, profile, self.device)
        return [self._made[kind, worker, profile.model] for worker, profile in enumerate(profiles)]


@dataclass(frozen=True)
class Beside:
    """Runs with the same arrivals: of all workers, and of every service alone."""

    shared: RunLog
    alone: dict[int, RunLog]  # by the service's place in the plan


def run_beside_alone(
    rig: Rig,
    session: Session,
    plan: Plan,
    loads: Sequence[Load],  # one a round; other arrivals make the rounds independent
    window: Window,
    progress: Progress | None = None,
    alone_in: Session | None = None,  # services are alone in this session instead
) -> list[Beside]:
    """Rounds of a plan's session. A round runs all workers together, every service alone with the
    same arrivals, and every closed loop alone for its rate; each round has another order.

    The logs' rates alone are of this session. After a stop request only whole rounds are returned.
    """
    progress = progress or Progress()
    profiles = rig.profiles_of(plan)
    services = {w for w in plan.everyone if loads[0].arrivals[w] is not CLOSED_LOOP}
    runs = (_EVERYBODY, *plan.everyone)
    logs: list[dict[int, RunLog]] = [{} for _ in loads]
    done = 0
    with contextlib.suppress(StoppedError):
        rates = {w: [alone_rate(session, w, profiles)] for w in services}
        for number, turn in rotation(len(runs), len(loads)):
            who, load = runs[turn], loads[number]
            if who == _EVERYBODY:
                logs[number][who] = session.run(load, window)
            elif who in services:
                logs[number][who] = (alone_in or session).run(load.only(who), window)
            else:
                rate = alone_rate(session, who, profiles, _BACKGROUND_SECONDS)
                rates.setdefault(who, []).append(rate)
            if progress.stopped:  # the run may have been cut short
                break
            done += 1
            progress.part(done / (len(runs) * len(loads)))
    whole = logs[: done // len(runs)]
    if not whole:
        raise StoppedError("stopped before the first round of runs together and alone was complete")
    alone_rps = tuple(statistics.median(rates[w]) for w in plan.everyone)
    return [_beside(of_round, plan, alone_rps) for of_round in whole]


def _beside(logs: dict[int, RunLog], plan: Plan, alone_rps: tuple[float, ...]) -> Beside:
    named = {
        who: msgspec.structs.replace(log, plan=plan, alone_rps=alone_rps)
        for who, log in logs.items()
    }
    return Beside(shared=named.pop(_EVERYBODY), alone=named)
