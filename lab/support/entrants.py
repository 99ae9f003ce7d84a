"""The ways of sharing that a pair is measured in, each with its session open.

Processes start first, because they take longest, and are waited for before anything is measured:
their start would disturb it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from lab.support import bounded
from lab.support.contenders import APART, BOUNDED, OURS_APART, WAYS, Scene
from lab.support.effort import Task
from lab.support.workshop import Bench

from eclip.contest.confirm.bounds import with_bounds
from eclip.core.device import Session, StartedSessions
from eclip.core.mix import Mix
from eclip.core.plan import Lanes, Plan, Processes
from eclip.errors import EclipError
from eclip.files import store
from eclip.planner.case import Case
from eclip.planner.tiers import make_promises
from eclip.rig.rig import Stand


@dataclass(frozen=True)
class Entrant:
    """A way of sharing with its session open."""

    name: str
    plan: Plan
    session: Session
    opened_s: float

    @property
    def apart(self) -> bool:
        return self.name in APART

    @property
    def loop(self) -> tuple[Any, ...]:
        """What background's rate alone depends on; without joints, on nothing that differs."""
        joints = self.plan.workers[-1].joints
        where = self.name if self.name in OURS_APART else ""
        return () if joints is None else (where, joints.at, joints.depth)


class Opening:
    """Sessions of a pair; what cannot be opened is a line that says why."""

    def __init__(
        self,
        bench: Bench,
        task: Task,
        scene: Scene,
        stand: Stand,
        stack: contextlib.ExitStack,
    ) -> None:
        self._bench = bench
        self._task = task
        self._scene = scene
        self._stand = stand
        self._stack = stack

    def all(self) -> list[Entrant]:
        started = self._start()
        inside = [*self._inside()]
        return [*inside, *self._wait(started)]

    def _start(self) -> list[tuple[list[tuple[str, Plan]], StartedSessions, float]]:
        """Processes, with and without MPS apart: one that fails takes its set along."""
        if self._bench.device.modelled:
            return []
        begun = []
        plans = [(way, APART[way](self._scene)) for way in self._task.apart]
        for under_mps in (False, True):
            mine = [one for one in plans if isinstance(one[1].sharing, Processes) == under_mps]
            if not mine:
                continue
            with self._told(*(way for way, _ in mine)):
                sets = self._stand.start([plan for _, plan in mine])
                self._stack.callback(sets.close)
                begun.append((mine, sets, time.monotonic()))
        return begun

    def _wait(
        self, started: Sequence[tuple[list[tuple[str, Plan]], StartedSessions, float]]
    ) -> Iterator[Entrant]:
        for mine, sets, begin in started:
            with self._told(*(way for way, _ in mine)):
                sets.wait()
                took = time.monotonic() - begin
                for (way, plan), session in zip(mine, sets.sessions, strict=True):
                    yield Entrant(way, plan, session, took)
        if self._bench.device.modelled:
            yield from self._rehearsed()

    def _rehearsed(self) -> Iterator[Entrant]:
        """The simulator has turns but no MPS: there, plain sharing stands for it."""
        for way in self._task.apart:
            plan = APART[way](self._scene)
            if isinstance(plan.sharing, Processes):
                plan = msgspec.structs.replace(plan, sharing=Lanes())
            yield from self._open(way, plan)

    def _inside(self) -> Iterator[Entrant]:
        for way in self._task.inside:
            yield from self._open(way, None)

    def _open(
        self, way: str, plan: Plan | None, stack: contextlib.ExitStack | None = None
    ) -> Iterator[Entrant]:
        begin = time.monotonic()
        with self._told(way):
            made = WAYS[way](self._scene) if plan is None else plan
            session = (stack or self._stack).enter_context(self._stand.open(made))
            yield Entrant(way, made, session, time.monotonic() - begin)

    def bounded(
        self, load: float, mix: Mix, p99_alone_ms: Sequence[float], stack: contextlib.ExitStack
    ) -> list[Entrant]:
        """Their bounds are of the p99 alone that was measured a moment ago."""
        plans = self._plans(load, mix)
        found: list[Entrant] = []
        for way in self._task.bounded_at(load):
            if way not in plans:
                continue
            asked = bounded.with_factors(mix, BOUNDED[way][0])
            with self._told(way):
                promises = make_promises(asked, self._scene.profiles, lambda: p99_alone_ms)
                plan = with_bounds(plans[way], promises)
                found += self._open(way, plan, stack)
                self._bench.say(f"{self._task.name} at {load:g}, {way}: {plan.why}")
        return found

    def _plans(self, load: float, mix: Mix) -> dict[str, Plan]:
        """Those that were made before, and new ones."""
        bench, task = self._bench, self._task
        files = {way: plan_file(bench.folder, task, load, way) for way in task.bounded_at(load)}
        profiles = self._scene.profiles
        plans = {way: bounded.kept_plan(path, profiles) for way, path in files.items()}
        missing = [way for way, plan in plans.items() if plan is None]
        with self._told(*missing):
            case = Case(mix, bench.shelf.topology, bench.shelf.calibration, profiles)
            made = bounded.search_plans(case, missing, bench.search_s)
            save_plans(made, files)
            plans |= made
        return {way: plan for way, plan in plans.items() if plan is not None}

    @contextlib.contextmanager
    def _told(self, *ways: str) -> Iterator[None]:
        try:
            yield
        except EclipError as error:  # a kernel that fits no half, for example
            for way in ways:
                row = {"stage": self._task.stage, "pair": self._task.pair, "way": way}
                self._bench.keep(row | {"error": str(error)})
            self._bench.say(f"{self._task.name}, {', '.join(ways)}: {error}")


def plan_file(folder: Path, task: Task, load: float, way: str) -> Path:
    stem = f"{task.pair}-floor{task.floor:g}" if task.floor else task.pair
    return bounded.plan_file(folder, stem, load, way)


def save_plans(plans: dict[str, Plan], files: dict[str, Path]) -> None:
    for way, plan in plans.items():
        files[way].parent.mkdir(parents=True, exist_ok=True)
        store.save(plan, files[way])
