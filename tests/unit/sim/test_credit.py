"""Accounts of services on the simulator: what they promise, on any device and for any arrivals."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from account import Account, Ended
from eclip.core import credit, rules
from eclip.core.calibration import Calibration
from eclip.core.load import Load
from eclip.core.plan import P99_GAIN, Plan, Promise, Rule, Slack
from eclip.core.profile import Profile
from eclip.core.runlog import RunLog
from eclip.models.synthetic import synthetic_profile
from eclip.planner.joints import JointRules, give_way
from eclip.sim import device as sim
from simulations import CALIBRATIONS, H200, arrivals, flat_profile, pinned, random_plan, run

US, MS = 1_000, 1_000_000
SEEDS = st.integers(0, 1_000_000)


def with_gain(plan: Plan, gain: float) -> Plan:
    workers = [
        worker
        if worker.promise is None
        else msgspec.structs.replace(
            worker, promise=msgspec.structs.replace(worker.promise, gain=gain)
        )
        for worker in plan.workers
    ]
    return msgspec.structs.replace(plan, workers=tuple(workers))


def device_near(calibration: Calibration, rng: np.random.Generator) -> Calibration:
    """Another device than the one that plans are made for: interference and costs differ."""
    sharing, costs = calibration.interference, calibration.costs
    return msgspec.structs.replace(
        calibration,
        interference=msgspec.structs.replace(
            sharing,
            presence=sharing.presence * float(rng.uniform(0.5, 2.0)),
            pressure=sharing.pressure * float(rng.uniform(0.5, 2.0)),
            crowding=sharing.crowding * float(rng.uniform(0.5, 2.0)),
        ),
        costs=msgspec.structs.replace(
            costs,
            launch_ns=round(costs.launch_ns * float(rng.uniform(0.5, 3.0))),
            notice_ns=round(costs.notice_ns * float(rng.uniform(0.5, 3.0))),
            hold_ns=round(costs.hold_ns * float(rng.uniform(0.5, 3.0))),
        ),
    )


def arrivals_at_random(rng: np.random.Generator, every_ns: float, end_ns: int) -> list[int]:
    """Poisson, in bursts, or all at once now and then."""
    kind = int(rng.integers(3))
    count = int(end_ns / every_ns) + 1
    if kind == 0:
        times = np.cumsum(rng.exponential(every_ns, count))
    else:
        together = int(rng.integers(2, 12))
        begins = np.cumsum(rng.exponential(every_ns * together, count // together + 1))
        apart = 0.0 if kind == 2 else every_ns / 10
        times = np.sort((begins[:, None] + apart * np.arange(together)).ravel())
    return [int(time) for time in times if time < end_ns]


def society(seed: int, seconds: float) -> tuple[Plan, list[Profile], Load, Calibration]:
    """Services with accounts beside background, all at random: routes, lanes, rules, bounds, loads
    and the device."""
    rng = np.random.default_rng(seed)
    services, background = int(rng.integers(1, 4)), int(rng.integers(1, 3))
    profiles = [
        synthetic_profile(seed * 7 + i, int(rng.integers(1, 14)), H200, name=f"m{i}")
        for i in range(services + background)
    ]
    plan = random_plan(seed, profiles, H200)
    promises = {}
    for worker in range(services):
        request_ns = profiles[worker].request_ns[-1]
        some, none = sorted(rng.integers(0, 2 * request_ns, 2).tolist(), reverse=True)
        promises[worker] = Promise(
            bound_ns=round(request_ns * float(rng.uniform(1.05, 6.0))),
            request_ns=request_ns,
            some_ns=some,
            none_ns=none,
            gain=float(rng.choice([P99_GAIN, P99_GAIN / 2, P99_GAIN / 10])),
        )
    joined = [w for w in range(len(profiles)) if w >= services or rng.random() < 0.7]
    cut = {
        worker: JointRules(kernels=int(rng.integers(1, 6)), depth=int(rng.integers(1, 3)))
        for worker in joined
    }
    plan = give_way(plan, profiles, promises, cut)
    changed = list(plan.workers)
    for worker in joined:
        joints = changed[worker].joints
        assert joints is not None
        given_way = random_rules(rng, plan, worker, services)
        changed[worker] = msgspec.structs.replace(
            changed[worker],
            joints=msgspec.structs.replace(joints, rules=given_way),
            floor=float(rng.uniform(0, 0.3)) if worker >= services and rng.random() < 0.3 else 0.0,
        )
    plan = msgspec.structs.replace(plan, workers=tuple(changed))
    load = float(rng.uniform(0.1, 0.7)) / services
    times: list[Sequence[int] | None] = [
        arrivals_at_random(rng, promises[worker].request_ns / load, int(seconds * 1e9))
        for worker in range(services)
    ]
    device = device_near(CALIBRATIONS["h200"], rng)
    return plan, profiles, arrivals(*times, *[None] * background, seed=seed), device


def random_rules(
    rng: np.random.Generator, plan: Plan, worker: int, services: int
) -> tuple[Rule, ...]:
    others = [service for service in range(services) if service != worker]
    mine = [n for n, lane in enumerate(plan.lanes) if lane.owner in (worker, -1)]
    if not others:
        return ()
    return tuple(
        Rule(
            to=tuple(sorted(rng.permutation(others)[: int(rng.integers(1, 4))].tolist())),
            slack=Slack(rng.choice([level.value for level in Slack])),
            lane=None if rng.random() < 0.5 else int(rng.choice(mine)),
        )
        for _ in range(int(rng.integers(1, 4)))
    )


def ended(log: RunLog, worker: int) -> list[Ended]:
    columns = log.requests
    rows = zip(columns.worker, columns.arrival_ns, columns.end_ns, columns.verdict, strict=True)
    return [Ended(arrival, end, verdict) for of, arrival, end, verdict in rows if of == worker]


def excess_of(requests: Sequence[Ended], promise: Promise) -> Fraction:
    """The most that any requests in a row were late beyond what their account allows."""
    gain = Fraction(round(promise.gain * rules.ONE_CREDIT), rules.ONE_CREDIT)
    worst = here = Fraction(0)
    for one in requests:
        beyond = credit.fate_of(one.verdict)[0] in (credit.WAS_LOST, credit.WAS_STRICT)
        late = one.end - one.arrival > promise.bound_ns
        here = max(here + late - beyond - gain, Fraction(0))
        worst = max(worst, here)
    return worst - credit.MOST_CREDIT


def check_inequality(seed: int, seconds: float = 0.15) -> tuple[int, int]:
    """Over any N requests in a row: late <= gain * N + 5 + lost + strict; and what the log says of
    each request is what a second account says. How many requests, and how many were late."""
    plan, profiles, load, device = society(seed, seconds)
    log = run(plan, profiles, load, device, seconds=seconds)
    total = late = 0
    for worker, planned in enumerate(plan.workers):
        if planned.promise is None:
            continue
        requests = ended(log, worker)
        account = Account(planned.promise)
        for one in requests:
            account.check(one)
        assert excess_of(requests, planned.promise) <= 0
        total += len(requests)
        late += account.late
    return total, late


@given(SEEDS)
@settings(max_examples=30)
def test_lateness_is_what_the_account_allows_on_any_device_for_any_arrivals(seed: int) -> None:
    check_inequality(seed)


@pytest.mark.long
def test_lateness_is_what_the_account_allows_in_a_thousand_runs() -> None:
    found = [check_inequality(seed, seconds=0.3) for seed in range(10_000, 11_000)]
    total, late = map(sum, zip(*found, strict=True))
    assert total > 100_000
    assert late > 1_000  # or the runs show nothing


# --- Strict -----------------------------------------------------------------------------------


def all_yield(plan: Plan) -> Plan:
    """The same plan, in which background yields to every service that its rules name."""
    workers = []
    for worker in plan.workers:
        joints = worker.joints
        if joints is not None and worker.promise is None:
            given_way = tuple(Rule(to=rule.to) for rule in joints.rules)
            joints = msgspec.structs.replace(joints, rules=given_way)
        workers.append(msgspec.structs.replace(worker, joints=joints))
    return msgspec.structs.replace(plan, workers=tuple(workers))


def without_credit(plan: Plan) -> Any:
    board = rules.board_of(plan)
    board[:, rules.CREDIT] = -(10**12)
    return board


@given(SEEDS)
@settings(max_examples=25)
def test_strict_is_the_same_plan_with_yield_for_rules_event_by_event(seed: int) -> None:
    plan, profiles, load, device = society(seed, 0.03)
    window = {"seconds": 0.03, "trace_ms": 30.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sim, "board_of", without_credit)
        strict = run(plan, profiles, load, device, **window)
    plain = run(with_gain(all_yield(plan), 0.0), profiles, load, device, **window)
    assert strict.kernels == plain.kernels
    assert strict.counters == plain.counters
    assert strict.energy_uj == plain.energy_uj
    assert msgspec.structs.replace(strict.requests, verdict=()) == plain.requests


@given(SEEDS)
@settings(max_examples=15)
def test_a_plan_without_gains_runs_as_before_and_says_nothing_of_verdicts(seed: int) -> None:
    plan, profiles, load, device = society(seed, 0.02)
    log = run(with_gain(plan, 0.0), profiles, load, device)
    assert log.requests.verdict == ()

    def with_credit(plan: Plan) -> Any:
        """So much that no service ever turns strict."""
        board = rules.board_of(plan)
        board[:, rules.GAIN] = 0
        return board

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sim, "board_of", with_credit)
        same = run(plan, profiles, load, device)
    assert same.requests.end_ns == log.requests.end_ns
    assert same.kernels == log.kernels


# --- By hand ----------------------------------------------------------------------------------


# A service of 400 us beside background whose kernels take 100 us, each a stretch.
SERVICE = flat_profile("service", [50 * US] * 8, H200)
BACKGROUND = flat_profile("background", [100 * US] * 20, H200)
PAIR = (SERVICE, BACKGROUND)
ALL = "0-15"


def pair(bound_ns: int, *, gain: float = P99_GAIN, **given: Any) -> Plan:
    """Background that goes on beside the service, until it is strict."""
    promise = Promise(bound_ns=bound_ns, request_ns=400 * US, some_ns=1, none_ns=1, gain=gain)
    plan = give_way(pinned(PAIR, [ALL] * 2, H200), PAIR, {0: promise}, {1: JointRules(kernels=1)})
    background = plan.workers[1]
    assert background.joints is not None
    joints = msgspec.structs.replace(background.joints, rules=(Rule(to=(0,), slack=Slack.NONE),))
    background = msgspec.structs.replace(background, joints=joints)
    return msgspec.structs.replace(plan, workers=(plan.workers[0], background))


def test_a_service_begins_strict_and_earns_freedom_with_its_first_request_in_time() -> None:
    plan = pair(bound_ns=10 * MS)
    log = run(plan, PAIR, arrivals([1 * MS, 6 * MS, 11 * MS], None))
    took = [one.end - one.arrival for one in ended(log, 0)]
    assert took[0] < 700 * US < 800 * US < took[1]
    reasons = [credit.fate_of(one.verdict)[1] for one in ended(log, 0)]
    assert reasons == [rules.SPENT, credit.NOT_STRICT, credit.NOT_STRICT]


def test_credit_is_written_back_after_each_late_request() -> None:
    """A bound that background beside the service breaks: one late request, and it is strict until
    200 requests in time have paid for it."""
    plan = pair(bound_ns=800 * US)
    log = run(plan, PAIR, arrivals(range(1 * MS, 800 * MS, 2 * MS), None), seconds=0.8)
    fates = [credit.fate_of(one.verdict) for one in ended(log, 0)]
    late = [index for index, (fate, _) in enumerate(fates) if fate != credit.IN_TIME]
    assert late[0] == 1
    assert fates[1] == (credit.WAS_LOST, credit.EARLY)
    assert all(reason == rules.SPENT for _, reason in fates[2:201])
    assert late[1] in range(201, 203)


def test_a_request_that_waits_in_vain_makes_its_period_strict_at_once() -> None:
    """Ten at once, of which the last can never be in time: all are strict from the first on."""
    plan = pair(bound_ns=3 * MS)
    first = [1 * MS, 6 * MS]
    log = run(plan, PAIR, arrivals([*first, *[11 * MS] * 10], None), seconds=0.05)
    fates = [credit.fate_of(one.verdict) for one in ended(log, 0)]
    assert [reason for _, reason in fates[2:]] == [credit.EARLY] * 10
    assert fates[2][0] == credit.IN_TIME
    together = [one.end for one in ended(log, 0)[2:]]
    assert max(end - begin for begin, end in itertools.pairwise(together)) < 600 * US


def test_audits_are_few_and_at_random() -> None:
    plan = pair(bound_ns=10 * MS)
    log = run(plan, PAIR, arrivals(range(1 * MS, 4000 * MS, 2 * MS), None), seconds=4.0)
    audits = [
        index
        for index, one in enumerate(ended(log, 0))
        if credit.fate_of(one.verdict)[1] == credit.AUDIT
    ]
    assert 0.02 < len(audits) / 2000 < 0.05
    assert len(set(np.diff(audits).tolist())) > 10
