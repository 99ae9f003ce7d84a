"""Services beside background: the simple policies, their promises, and what cannot be kept."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

import eclip
from eclip.contest.confirm.plans import make_plan as lab_plan
from eclip.core.device import Window
from eclip.core.mix import Mix, parse_mix
from eclip.core.plan import FOREIGN, Plan, Slack, unpartitioned
from eclip.core.profile import Profile
from eclip.core.program import lower
from eclip.errors import UsageError
from eclip.planner.alone import p99_alone_ns, typical_load
from eclip.planner.joints import GRAIN_NS, far_mask
from eclip.planner.policies import POLICIES, PolicyOptions, make_plan
from eclip.planner.problem import Problem
from eclip.planner.tiers import (
    FOR_SERVICES,
    LAUNCHES,
    expected_excess_ns,
    make_promises,
)
from eclip.sim.device import SimDevice
from simulations import CALIBRATIONS, H200, case_of, flat_profile

US = 1000
SERVICE = flat_profile("s", [100 * US] * 10, H200)
OTHER = flat_profile("t", [100 * US] * 20, H200)
JOB = flat_profile("b", [60 * US] * 20, H200)


def problem(text: str, *profiles: Profile) -> Problem:
    return Problem(parse_mix(text), H200, profiles)


def plan_of(policy: str, text: str = "s:1@100rps/5ms,b:1@background") -> Plan:
    return make_plan(policy, problem(text, SERVICE, JOB))


@pytest.mark.parametrize("policy", FOR_SERVICES)
def test_only_those_without_a_bound_have_joints(policy: str) -> None:
    plan = plan_of(policy)
    assert plan.policy == policy
    assert [worker.joints is None for worker in plan.workers] == [True, False]
    assert [worker.promise is None for worker in plan.workers] == [False, True]
    lower(plan, [SERVICE.trace, JOB.trace])


@pytest.mark.parametrize("policy", FOR_SERVICES)
def test_policies_for_services_want_one(policy: str) -> None:
    with pytest.raises(UsageError, match=f"{policy} needs a service"):
        make_plan(policy, problem("s:1@100rps,b:1", SERVICE, JOB))


def test_background_yields_at_joints_of_the_grain() -> None:
    joints = plan_of("yield").workers[1].joints
    assert joints is not None
    assert (joints.depth, joints.longest_ns) == (2, 120 * US)  # two kernels of 60 µs fit 150
    assert joints.longest_ns <= GRAIN_NS
    (rule,) = joints.rules
    assert (rule.lane, rule.slack, set(rule.to)) == (None, Slack.PLENTY, {0, FOREIGN})
    assert msgspec.to_builtins(joints)["reactions"]  # as files of version 0.1 call them


def test_plan_says_what_a_request_waits_and_which_kernel_exceeds_the_grain() -> None:
    plan = plan_of("yield")
    assert expected_excess_ns(plan) == 240 * US
    assert "waits at most about 0.24 ms" in plan.why
    assert "exceeds" not in plan.workers[1].why
    long = flat_profile("b", [60 * US, 2_000 * US, 60 * US], H200)
    plan = make_plan("yield", problem("s:1@100rps/5ms,b:1", SERVICE, long))
    assert "one kernel of 2.00 ms exceeds the grain of 150 µs" in plan.workers[1].why
    assert expected_excess_ns(plan) == 4_000 * US


def test_a_request_waits_for_what_all_background_has_in_flight() -> None:
    plan = make_plan("yield", problem("s:1@100rps/5ms,b:1,t:1", SERVICE, JOB, OTHER))
    waits = [expected_excess_ns(plan_of("yield")), expected_excess_ns(plan)]
    joints = plan.workers[2].joints
    assert joints is not None
    assert waits == [240 * US, 240 * US + joints.depth * joints.longest_ns]


def test_plan_says_that_a_floor_comes_before_what_a_request_waits() -> None:
    words = "while a floor is owed, background does not give way"
    assert words in plan_of("yield", "s:1@100rps/5ms,b:1@background/floor=0.2").why
    assert words not in plan_of("yield").why


@pytest.mark.parametrize(("policy", "counts"), LAUNCHES.items())
def test_launches_are_counted_whatever_time_they_take(policy: str, counts: tuple[int, int]) -> None:
    joints = plan_of(policy).workers[1].joints
    assert joints is not None
    assert joints.at == tuple(range(counts[0], 20, counts[0]))
    assert joints.depth == counts[1]


def test_move_goes_to_half_of_the_device_at_its_far_end() -> None:
    plan = plan_of("move")
    joints = plan.workers[1].joints
    assert joints is not None and joints.rules[0].lane is not None
    lane = plan.lanes[joints.rules[0].lane]
    assert (lane.owner, lane.mask, H200.units_of(lane.mask)) == (1, far_mask(H200, 64), 64)
    assert expected_excess_ns(plan) is None


def test_services_go_first_by_their_bounds() -> None:
    text = "s:1@100rps/9ms,t:1@50rps/4ms,b:1@background"
    plan = make_plan("priority", problem(text, SERVICE, OTHER, JOB))
    assert [lane.priority for lane in plan.lanes] == [1, 2, 0]
    segments = make_plan("priority-segments", problem(text, SERVICE, OTHER, JOB))
    assert segments.lanes == plan.lanes
    assert [worker.joints and worker.joints.rules for worker in segments.workers] == [()] * 3


def test_services_yield_to_each_other_only_where_there_are_several() -> None:
    text = "s:1@100rps/9ms,t:1@50rps/4ms,b:1@background"
    plan = make_plan("yield", problem(text, SERVICE, OTHER, JOB))
    joints = [worker.joints for worker in plan.workers]
    assert [set(one.rules[0].to) for one in joints if one] == [
        {FOREIGN, 1},
        {FOREIGN, 0},
        {FOREIGN, 0, 1},
    ]
    assert "less slack" in plan.workers[0].why


@pytest.mark.parametrize("policy", sorted({*POLICIES} - {*FOR_SERVICES, "search"}))
def test_every_plan_of_a_mix_with_services_has_their_promises(policy: str) -> None:
    plan = plan_of(policy, "s:1@100rps/5ms,b:1@background/floor=0.2")
    assert plan.workers[0].promise is not None
    assert plan.workers[0].promise.bound_ns == 5_000_000
    assert plan.workers[1].floor == 0.2
    assert not plan.gives_way


def mix(text: str) -> Mix:
    return parse_mix(text)


def test_bound_below_a_request_at_rest_is_refused_with_both_times() -> None:
    with pytest.raises(UsageError, match=r"bound of 0\.9 ms: one request takes 1\.00 ms"):
        make_promises(mix("s:1@100rps/0.9ms,b:1"), [SERVICE, JOB])
    make_promises(mix("s:1@100rps/1ms,b:1"), [SERVICE, JOB])


@pytest.mark.parametrize("bound", ["90000s", "9999999999x", "1000000x"])
def test_bound_longer_than_a_day_is_refused(bound: str) -> None:
    """Ten times as long would be more than a word holds, and the service would count as hung."""
    with pytest.raises(UsageError, match="a day"):
        make_promises(
            mix(f"s:1@100rps/{bound},b:1"),
            [SERVICE, JOB],
            lambda: [np.array([1e8]), np.array([1e8])],
        )


def test_service_that_a_simulation_asks_nothing_of_is_refused() -> None:
    for bound in ("5ms", "2x"):
        rare = case_of([SERVICE, JOB], mix=mix(f"s:1@0.0001rps/{bound},b:1"))
        with pytest.raises(UsageError, match=r"s gets 0\.0001 requests/s: none arrives in the"):
            lab_plan(rare, "search", PolicyOptions(batches=0))


def test_rate_above_capacity_is_refused_with_the_most_it_serves() -> None:
    with pytest.raises(UsageError, match=r"cannot serve 1000 requests/s.*at most 1000/s"):
        make_promises(mix("s:1@1000rps/5ms,b:1"), [SERVICE, JOB])
    make_promises(mix("s:1@999rps/5ms,b:1"), [SERVICE, JOB])


def test_bound_of_times_alone_is_of_the_p99_that_modelled_times_give() -> None:
    with pytest.raises(UsageError, match="p99 alone"):
        make_promises(mix("s:1@100rps/2x,b:1"), [SERVICE, JOB])
    plans = [
        lab_plan(
            case_of([SERVICE, JOB], mix=mix(f"s:1@{rate}rps/{times}x,b:1")),
            "yield",
            PolicyOptions(),
        )
        for rate, times in ((300, 2), (300, 1), (800, 1))
    ]
    twice, once, crowded = [plan.workers[0].promise for plan in plans]
    assert twice is not None and once is not None and crowded is not None
    assert abs(twice.bound_ns - 2 * once.bound_ns) <= 1
    assert once.request_ns < once.bound_ns < crowded.bound_ns  # its own queue counts


def test_p99_alone_is_that_of_the_queue_that_theory_knows() -> None:
    """Where all requests take a second, at half load, waits fall off as 0.661 exp(-1.2564 t)."""
    waits_s = np.log(66.1) / 1.2564
    assert p99_alone_ns(0.5, np.array([1e9])) == pytest.approx(1e9 * (1 + waits_s), rel=0.03)
    # Exponential times: the time in the system is exponential, too.
    drawn = np.random.default_rng(5).exponential(1e9, 100_000)
    assert p99_alone_ns(0.5, drawn) == pytest.approx(1e9 * np.log(100) / 0.5, rel=0.04)
    assert p99_alone_ns(1e-6, np.array([1e9])) == pytest.approx(1e9)


def test_typical_arrivals_give_services_the_p99_alone_of_many() -> None:
    both = mix("s:1@300rps/2x,t:1@100rps/2x,b:1")
    load = typical_load(both, 2.0, 0.5, (1000.0, 500.0, 700.0))
    plan = unpartitioned(H200, (SERVICE, OTHER, JOB), both)
    with SimDevice(H200, CALIBRATIONS["h200"]).open(
        lower(plan, [SERVICE.trace, OTHER.trace, JOB.trace]), (SERVICE, OTHER, JOB)
    ) as session:
        for service, rate in ((0, 300), (1, 100)):
            log = session.run(load.only(service), Window(2.0, 0.5, 0.0))
            ends, arrivals = np.array(log.requests.end_ns), np.array(log.requests.arrival_ns)
            found = np.percentile(ends - arrivals, 99)
            times = np.array([float(np.median(ends - np.array(log.requests.start_ns)))])
            assert found == pytest.approx(p99_alone_ns(rate, times), rel=0.06)


def test_a_bound_of_times_alone_is_one_number_on_a_modelled_device() -> None:
    """Whatever arrivals a comparison has, it judges by the bound that a plan says."""
    case = case_of([SERVICE, JOB], mix=mix("s:1@300rps/1.5x,b:1"))
    planned = lab_plan(case, "yield", PolicyOptions()).workers[0].promise
    for seconds in (0.2, 1.0):
        compared = eclip.compare(case, ["yield"], seconds=seconds)
        assert compared.plans["yield"].workers[0].promise == planned
        assert planned is not None
        assert compared.comparison.bounds_ms[0] == planned.bound_ns / 1e6
        (excess,) = compared.comparison.entries[0].services
        assert excess.bound_ms == planned.bound_ns / 1e6
