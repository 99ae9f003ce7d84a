"""Promises confirmed on a device: finalists beside others and alone, with the same arrivals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from eclip.contest.confirm.bounds import (
    MOST_SECONDS,
    TO_CLAIM,
    TO_DECIDE,
    search_services,
    seconds_for,
    with_bounds,
)
from eclip.contest.confirm.plans import check_kept, make_plan
from eclip.core.mix import parse_mix
from eclip.core.plan import Plan
from eclip.core.program import Program
from eclip.errors import DeviceError, UsageError
from eclip.planner.policies import PolicyOptions
from eclip.planner.search.objective import Objective
from eclip.planner.tiers import make_promises
from eclip.progress import Progress
from eclip.rig.rig import Rig
from eclip.sim.device import SimDevice, SimSession
from heard import Heard
from simulations import CALIBRATIONS, H200, case_of, scaling_profile

US = 1000
SERVICE = scaling_profile("s", [50 * US] * 20)
JOB = scaling_profile("b", [100 * US] * 20)
OPTIONS = PolicyOptions(objective=Objective("slo"), batches=0)
QUIET = Progress()


class Watched(SimDevice):
    """Keeps the plans that it opened, and may refuse those in which somebody gives way."""

    def __init__(self, progress: Progress | None = None, *, joints: bool = True) -> None:
        super().__init__(H200, CALIBRATIONS["h200"], progress)
        self.joints = joints
        self.opened: list[Plan] = []

    def open(self, program: Program, sources: Sequence[Any], *, brief: bool = False) -> SimSession:
        if program.plan.gives_way and not self.joints:
            raise DeviceError("no joints here")
        self.opened.append(program.plan)
        return super().open(program, sources, brief=brief)


def stand_of(text: str, device: Watched | None = None) -> Rig:
    return Rig(case_of([SERVICE, JOB], mix=parse_mix(text)), device or Watched())


@pytest.fixture(scope="module")
def verified() -> Plan:
    with stand_of("s:1@400rps/1.5x,b:1@background") as rig:
        return search_services(rig, OPTIONS, 1, QUIET)


def test_chosen_plan_is_claimed_from_4000_requests_and_others_decided_from_1000(
    verified: Plan,
) -> None:
    assert verified.evidence is not None
    counts = {trial.chosen: trial.services[0].requests for trial in verified.evidence.trials}
    assert counts[True] >= TO_CLAIM
    fewest = min(trial.services[0].requests for trial in verified.evidence.trials[1:])
    assert fewest >= TO_DECIDE


def test_evidence_has_latency_excess_and_an_interval(verified: Plan) -> None:
    assert verified.evidence is not None
    (trial,) = (trial for trial in verified.evidence.trials if trial.chosen)
    (service,) = trial.services
    assert service.name == "s"
    assert service.p50_ms < service.p99_ms < service.longest_ms
    assert service.excess_p50_ms < service.excess_p99_ms < service.excess_longest_ms
    assert service.p99_ratio_low <= service.p99_ratio <= service.p99_ratio_high
    assert service.p99_ratio <= 1.5
    assert service.busy == pytest.approx(0.4, abs=0.05)
    assert 0.6 * 0.95 < trial.ratios[1] < 1
    (plain, *_) = verified.evidence.trials
    assert plain.refused and not plain.chosen


def test_ratios_are_of_the_rates_alone_on_all_units(verified: Plan) -> None:
    """A session of static masks has lower rates alone, which would flatter it."""
    assert verified.evidence is not None
    masks = next(one for one in verified.evidence.trials if one.label == "best static masks")
    assert masks.ratios[1] < 0.8


def test_tails_are_held_against_those_alone_on_all_units(verified: Plan) -> None:
    """A service on a part of the units has longer tails alone, which would flatter masks."""
    assert verified.evidence is not None
    masks = next(one for one in verified.evidence.trials if one.label == "best static masks")
    bound_ms = verified.evidence.bounds_ms[0]
    assert bound_ms is not None
    alone_ms = masks.services[0].p99_ms / masks.services[0].p99_ratio
    assert alone_ms == pytest.approx(bound_ms / 1.5, rel=0.1)


def test_bound_of_times_alone_is_of_the_p99_on_the_device(verified: Plan) -> None:
    assert verified.evidence is not None
    (bound_ms, none) = verified.evidence.bounds_ms
    promise = verified.workers[0].promise
    assert none is None and bound_ms is not None and promise is not None
    assert promise.bound_ns == pytest.approx(1e6 * bound_ms)
    (trial,) = (trial for trial in verified.evidence.trials if trial.chosen)
    alone_ms = trial.services[0].p99_ms / trial.services[0].p99_ratio
    assert bound_ms == pytest.approx(1.5 * alone_ms, rel=0.1)
    assert check_kept(verified) is verified


def test_device_without_joints_has_masks_or_plain_streams() -> None:
    device = Watched(joints=False)
    with stand_of("s:1@300rps/8ms,b:1@background", device) as rig:
        plan = search_services(rig, OPTIONS, 1, QUIET)
    assert not plan.gives_way
    assert plan.evidence is not None
    labels = {trial.label for trial in plan.evidence.trials}
    assert "best static masks" in labels and "yield, depth 2" not in labels


def test_no_finalist_takes_longer_than_a_minute() -> None:
    slow = parse_mix("s:1@2rps/8ms,b:1")
    assert seconds_for(slow, TO_CLAIM) == MOST_SECONDS / 2  # beside others, and alone
    both = parse_mix("s:1@400rps/8ms,t:1@200rps/8ms,b:1")
    assert 200 * seconds_for(both, TO_DECIDE) >= TO_DECIDE


def test_stop_before_every_finalist_ran_leaves_the_decision_to_the_search() -> None:
    progress = Heard(stop_at=0.3, stop_in="trying the finalists")
    device = Watched(Progress(progress))
    with stand_of("s:1@400rps/1.5x,b:1@background", device) as rig:
        plan = search_services(rig, OPTIONS, 1, progress)
    assert plan.evidence is not None
    assert plan.evidence.device == "the simulator"
    assert plan.gives_way


def test_new_bounds_leave_limits_of_slack_as_they_were() -> None:
    mix = parse_mix("s:1@300rps/8ms,b:1@background")
    plan = make_plan(case_of([SERVICE, JOB], mix=mix), "search", OPTIONS)
    tighter = make_promises(parse_mix("s:1@300rps/5ms,b:1"), [SERVICE, JOB])
    old, new = plan.workers[0].promise, with_bounds(plan, tighter).workers[0].promise
    assert old is not None and new is not None
    assert (new.bound_ns, new.none_ns, new.some_ns) == (5_000_000, old.none_ns, old.some_ns)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("s:1@300rps/0.5ms,b:1", "one request takes 1.00 ms"),
        ("s:1@1200rps/2x,b:1", "at most 1000/s"),
        ("s:1@300rps,b:1", "needs a service"),
    ],
)
def test_what_cannot_be_kept_is_refused_before_a_device_runs_anything(
    text: str, words: str
) -> None:
    device = Watched()
    with stand_of(text, device) as rig, pytest.raises(UsageError, match=words):
        search_services(rig, OPTIONS, 1, QUIET)
    assert device.opened == []
