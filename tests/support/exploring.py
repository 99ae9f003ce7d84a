"""Searches that go on on a device, which is the simulator: what several tests of them share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from eclip.contest.confirm.explore import Explorer, Verification
from eclip.core.device import Capability, Window
from eclip.core.mix import Mix, mix_of
from eclip.core.plan import Plan
from eclip.core.profile import Profile
from eclip.errors import DeviceError
from eclip.planner.evaluate import SimEvaluator
from eclip.planner.policies import PolicyOptions
from eclip.planner.problem import Problem
from eclip.planner.search.placement import Home, Placer
from eclip.progress import Progress
from eclip.rig.rig import Rig
from eclip.rig.trials import Trials
from eclip.sim.device import SimDevice
from simulations import CALIBRATIONS, H200, case_of, flat_profile

PROFILES = (flat_profile("a", [400_000] * 4, H200), flat_profile("b", [150_000] * 6, H200))
OTHERS = (flat_profile("a~66", [150_000] * 5, H200), flat_profile("b~66", [50_000] * 6, H200))
MIX = mix_of(profile.model for profile in PROFILES)
WINDOW = Window(seconds=0.05, warmup_seconds=0.01, trace_ms=0.0)
QUIET = Progress()


class Refusing(SimDevice):
    """Notes what it opens, and refuses plans with a lane of one slice."""

    def __init__(self, progress: Progress | None = None) -> None:
        super().__init__(H200, CALIBRATIONS["h200"], progress)
        self.opened: list[Plan] = []

    def open(self, program: Any, sources: Any, *, brief: bool = False) -> Any:
        if any(len(lane.mask) == 1 for lane in program.plan.lanes):
            raise DeviceError("clusters do not fit")
        self.opened.append(program.plan)
        return super().open(program, sources, brief=brief)


class WithPriorities(Refusing):
    """Says that it knows stream priorities, which do nothing on it."""

    capabilities = SimDevice.capabilities | {Capability.PRIORITIES}


class Looks:
    """Stands for the module ``time``: a second passes between any two looks at the clock."""

    def __init__(self) -> None:
        self._seconds = itertools.count()

    def monotonic(self) -> float:
        return float(next(self._seconds))


def stand_on(device: Refusing, others: Sequence[Profile] = OTHERS) -> Rig:
    """With the rates alone known, and what was opened for them forgotten."""
    rig = Rig(case_of(PROFILES, others=others), device)
    rig.measure_alone()
    device.opened.clear()
    return rig


def trials_on(rig: Rig, mix: Mix = MIX, window: Window = WINDOW) -> Trials:
    return Trials(rig, mix, window=window)


def explorer_of(how: Verification, mix: Mix = MIX, others: tuple[Profile, ...] = ()) -> Explorer:
    problem = Problem(mix, H200, PROFILES, others)
    evaluate = SimEvaluator(H200, PROFILES, CALIBRATIONS["h200"], mix, others)
    return Explorer(problem, evaluate, PolicyOptions(batches=1), how)


def plans_of(*homes: Sequence[Home]) -> list[Plan]:
    placer = Placer(Problem(MIX, H200, PROFILES))
    return [placer.plan(tuple(one), "search", "") for one in homes]
