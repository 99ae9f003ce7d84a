"""Joints on the simulator: who gives way, when, for how long, and what it costs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eclip.core.calibration import Costs
from eclip.core.load import Load
from eclip.core.plan import Joints, Lane, Plan, Promise, Rule, Slack, Turns
from eclip.core.profile import Profile
from eclip.core.rules import MOST_OVERTAKEN
from eclip.core.runlog import RunLog
from eclip.core.topology import Mask
from eclip.models.synthetic import synthetic_profile
from eclip.planner.joints import JointRules, give_way
from eclip.sim import device as sim
from simulations import (
    CALIBRATIONS,
    H200,
    MI50,
    arrivals,
    closed,
    flat_profile,
    free,
    pinned,
    problem_of,
    random_plan,
    run,
)

US, MS = 1_000, 1_000_000
ALL = "0-3"  # of an MI50's slices


def promise(bound_ns: int, request_ns: int, some_ns: int = 0, none_ns: int = 0) -> Promise:
    return Promise(bound_ns=bound_ns, request_ns=request_ns, some_ns=some_ns, none_ns=none_ns)


def giving(
    profiles: Sequence[Profile],
    promises: Mapping[int, Promise],
    rules: Mapping[int, JointRules],
    floors: Mapping[int, float] | None = None,
    masks: Sequence[str] = (),
) -> Plan:
    """Everybody on a lane of all units or of these, and some give way."""
    masks = masks or [ALL] * len(profiles)
    plan = give_way(pinned(profiles, masks), profiles, promises, rules)
    return with_workers(plan, {w: {"floor": floor} for w, floor in (floors or {}).items()})


def with_workers(plan: Plan, changes: Mapping[int, Mapping[str, Any]]) -> Plan:
    workers = [
        msgspec.structs.replace(worker, **changes.get(index, {}))
        for index, worker in enumerate(plan.workers)
    ]
    return msgspec.structs.replace(plan, workers=tuple(workers))


def joints_of(plan: Plan, worker: int) -> Joints:
    joints = plan.workers[worker].joints
    assert joints is not None
    return joints


def requests_of(log: RunLog, worker: int) -> list[tuple[int, int, int]]:
    """Arrival, start, end."""
    columns = log.requests
    return [
        (arrival, start, end)
        for of, arrival, start, end in zip(
            columns.worker, columns.arrival_ns, columns.start_ns, columns.end_ns, strict=True
        )
        if of == worker
    ]


def latencies(log: RunLog, worker: int) -> list[int]:
    return [end - arrival for arrival, _, end in requests_of(log, worker)]


def kernels_of(log: RunLog, worker: int) -> list[tuple[int, int, int, int]]:
    """Position, lane, start, end."""
    columns = log.kernels
    return [
        (position, lane, start, end)
        for of, position, lane, start, end in columns.rows()
        if of == worker
    ]


def starts(log: RunLog, worker: int) -> list[int]:
    return [start for _, _, start, _ in kernels_of(log, worker)]


def stretch_of(joints: Joints, position: int) -> int:
    return int(np.searchsorted(joints.at, position, side="right"))


# A service of 400 µs, and background of 20 kernels of 100 µs, a stretch each.
SERVICE = flat_profile("service", [50 * US] * 8)
BACKGROUND = flat_profile("background", [100 * US] * 20)
PAIR = (SERVICE, BACKGROUND)
PROMISE = promise(bound_ns=2 * MS, request_ns=400 * US)
NOW_AND_THEN = list(range(1_030_000, 19 * MS, 1_733_000))


def pair(depth: int = 2, floor: float = 0.0, **given: Any) -> Plan:
    rules = JointRules(grain_ns=100 * US, depth=depth, **given)
    return giving(PAIR, {0: PROMISE}, {1: rules}, {1: floor})


# --- Yielding ---------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_service_waits_for_no_more_than_the_stretches_in_flight(depth: int) -> None:
    load = arrivals(NOW_AND_THEN, None)
    plan = pair(depth)
    alone = latencies(run(plan, PAIR, arrivals(NOW_AND_THEN, []), free()), 0)
    excess = np.subtract(latencies(run(plan, PAIR, load, free()), 0), alone)
    assert len(excess) == len(NOW_AND_THEN)
    assert (depth - 1) * 100 * US < excess.max() <= depth * 100 * US
    # Without joints it waits for whole requests.
    plain = pinned(PAIR, [ALL] * 2)
    assert np.subtract(latencies(run(plain, PAIR, load, free()), 0), alone).min() > 2 * 100 * US


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Plan, list[Profile], Load]:
    """A service beside background that yields to it, kernels and arrivals at random."""
    times = st.lists(st.integers(5 * US, 80 * US), min_size=1, max_size=12)
    profiles = [flat_profile(name, draw(times)) for name in ("s", "b")]
    alone_ns = profiles[0].request_ns[-1]
    grain_ns, depth = draw(st.integers(10 * US, 200 * US)), draw(st.sampled_from([1, 2]))
    rules = JointRules(grain_ns=grain_ns, depth=depth)
    plan = giving(profiles, {0: promise(100 * MS, alone_ns)}, {1: rules})
    gaps = draw(st.lists(st.integers(0, 800 * US), min_size=1, max_size=15))
    return plan, profiles, arrivals(np.cumsum(gaps).tolist(), None)


@given(pairs())
@settings(max_examples=60)
def test_background_takes_up_at_most_its_depth_while_a_service_is_busy(
    case: tuple[Plan, list[Profile], Load],
) -> None:
    plan, profiles, load = case
    log = run(plan, profiles, load, free(), seconds=0.05, trace_ms=50)
    joints = joints_of(plan, 1)
    launched = kernels_of(log, 1)
    assert launched
    for _, begin, end in requests_of(log, 0):
        inside = [position for position, _, start, _ in launched if begin < start < end]
        # A request is at most once around: the same stretch again is another one.
        runs = [key for key, _ in itertools.groupby(stretch_of(joints, p) for p in inside)]
        assert len(runs) <= joints.depth


@given(pairs())
@settings(max_examples=60)
def test_excess_is_at_most_depth_times_the_longest_stretch(
    case: tuple[Plan, list[Profile], Load],
) -> None:
    plan, profiles, load = case
    assert load.arrivals[0] is not None
    costs = free(launch_ns=6 * US, joint_ns=1_500, hold_ns=8 * US)
    alone = run(plan, profiles, arrivals(load.arrivals[0].tolist(), []), costs, seconds=0.1)
    log = run(plan, profiles, load, costs, seconds=0.1)
    joints = joints_of(plan, 1)
    most = joints.depth * (joints.longest_ns + costs.costs.joint_ns)
    excess = np.subtract(latencies(log, 0), latencies(alone, 0))
    assert len(excess) == len(load.arrivals[0])
    assert excess.max() <= most + 1
    assert excess.min() >= -1


def test_request_of_a_held_worker_has_begun() -> None:
    """Its latency runs while it waits at its head."""
    plan = pair()
    log = run(plan, PAIR, arrivals([0], [100 * US]), free())
    ((arrival, start, end),) = requests_of(log, 1)
    assert (arrival, start) == (100 * US, 100 * US)
    assert starts(log, 1)[0] == 400 * US
    assert end == 400 * US + 20 * 100 * US
    assert log.counters[1].yields == 1
    assert log.counters[1].longest_pause_ns == 300 * US


def test_pause_that_lasts_to_the_end_counts() -> None:
    whole = flat_profile("whole", [30 * MS])
    plan = giving([whole, BACKGROUND], {0: promise(100 * MS, 30 * MS)}, {1: JointRules()})
    log = run(plan, [whole, BACKGROUND], arrivals([0], [5 * MS]), free())
    assert log.counters[1].longest_pause_ns == 15 * MS
    assert log.counters[1].kernels == 0


def test_service_that_is_busy_ten_bounds_counts_as_idle() -> None:
    """Nothing happens at that time but that it is reached: one kernel runs all along."""
    hung = flat_profile("hung", [18 * MS], blocks=1)
    plan = giving([hung, BACKGROUND], {0: promise(1 * MS, 400 * US)}, {1: JointRules()})
    log = run(plan, [hung, BACKGROUND], arrivals([0], [100 * US]), free())
    assert starts(log, 1)[0] == pytest.approx(10 * MS, abs=1)


# --- What joints cost -------------------------------------------------------------------------


def test_stretches_follow_each_other_at_the_cost_of_a_joint_or_a_launch() -> None:
    costs = free(launch_ns=6 * US, joint_ns=1_500, notice_ns=5 * US, hold_ns=8 * US)
    for depth, between in ((2, 1_500), (1, 11 * US)):
        (_, start, end), *_ = requests_of(run(pair(depth), PAIR, arrivals([], [0]), costs), 1)
        assert end - start == 6 * US + 20 * 100 * US + 19 * between


def test_stretch_that_is_over_before_the_next_launch_is_through_leaves_a_bubble() -> None:
    quick = flat_profile("quick", [2 * US] * 10)
    plan = giving([SERVICE, quick], {0: PROMISE}, {1: JointRules(kernels=1)})
    costs = free(launch_ns=6 * US, joint_ns=500, hold_ns=0)
    log = run(plan, [SERVICE, quick], arrivals([], [0]), costs)
    # Two at once, 500 ns apart; the next two when the launches that followed those are through.
    first = starts(log, 1)[:4]
    assert np.diff(first).tolist() == [2_500, 5_500, 2_500]


def test_resuming_costs_a_hold_and_a_launch() -> None:
    costs = free(launch_ns=6 * US, joint_ns=1_500, hold_ns=8 * US)
    log = run(pair(), PAIR, arrivals([0], [0]), costs)
    assert requests_of(log, 0) == [(0, 0, 406 * US)]
    assert starts(log, 1)[0] == 406 * US + 8 * US + 6 * US


def test_worker_released_before_its_stretch_is_over_loses_nothing() -> None:
    """At depth 2 the decision comes early; if it is taken back in time, there is no bubble."""
    short = flat_profile("short", [10 * US], blocks=1)  # beside the other
    plan = giving(
        [short, BACKGROUND], {0: promise(MS, 10 * US)}, {1: JointRules(grain_ns=100 * US)}
    )
    costs = free(joint_ns=1_500, hold_ns=8 * US, launch_ns=6 * US)
    # It is busy at 107.5 µs, when the first stretch ends and the third is decided about.
    quiet = run(plan, [short, BACKGROUND], arrivals([], [0]), costs)
    log = run(plan, [short, BACKGROUND], arrivals([100 * US], [0]), costs)
    assert log.counters[1].yields == 1
    assert starts(log, 1)[2:] == pytest.approx(starts(quiet, 1)[2:], abs=10 * US)
    gaps = np.subtract(starts(log, 1)[1:], [end for *_, end in kernels_of(log, 1)][:-1])
    assert gaps.max() == 1_500


def test_background_with_joints_is_within_2_percent_of_one_without() -> None:
    for seed in range(3):
        profiles = [synthetic_profile(seed, 300, H200, name="b"), flat_profile("s", [9], H200)]
        plain = pinned(profiles, ["0-15"] * 2, H200)
        plan = give_way(plain, profiles, {1: promise(MS, 9)}, {0: JointRules(depth=2)})
        assert len(joints_of(plan, 0).at) > 5
        load = arrivals(None, [])
        calibration = CALIBRATIONS["h200"]
        done = [
            run(one, profiles, load, calibration, seconds=0.2).counters[0].kernels
            for one in (plan, plain)
        ]
        assert 0.98 * done[1] <= done[0] <= done[1]


def test_costs_of_joints_are_assumed_where_a_calibration_does_not_say() -> None:
    known = msgspec.to_builtins(CALIBRATIONS["h200"].costs)
    new = ("joint_ns", "notice_ns", "hold_ns")
    old = {name: value for name, value in known.items() if not name.endswith(new)}
    assumed = msgspec.convert(old, Costs)
    assert assumed.hold_ns > assumed.notice_ns > assumed.joint_ns > 0


def test_one_stretch_and_no_rules_run_as_without_joints() -> None:
    plan = random_plan(3, PAIR, MI50)
    joined = give_way(plan, PAIR, {}, {w: JointRules(yields=None, kernels=99) for w in (0, 1)})
    assert joined.gives_way and not plan.gives_way
    calibration = CALIBRATIONS["mi50"]
    log, plain = (run(one, PAIR, closed(plan), calibration) for one in (joined, plan))
    assert (log.requests, log.kernels, log.counters, log.energy_uj) == (
        plain.requests,
        plain.kernels,
        plain.counters,
        plain.energy_uj,
    )


# --- Moving, and how much slack there is ------------------------------------------------------


def test_worker_that_moves_runs_on_the_other_lane_while_the_service_is_busy() -> None:
    costs = free(barrier_ns=3 * US, joint_ns=0, hold_ns=0)
    corner = Mask.parse("3")
    rules = JointRules(None, Slack.PLENTY, corner, grain_ns=100 * US, depth=1)
    plan = giving(PAIR, {0: PROMISE}, {1: rules}, masks=["0-2", ALL])
    small = plan.lanes.index(Lane(1, corner))
    log = run(plan, PAIR, arrivals([1_050_000], [0]), costs)
    ((_, busy, idle),) = requests_of(log, 0)
    mine = kernels_of(log, 1)
    moved = [start for _, lane, start, _ in mine if lane == small]
    assert log.counters[1].moves == len(moved) > 2
    assert log.counters[1].yields == 0
    # One decision is in flight at either end.
    assert min(moved) - busy <= 103 * US
    assert idle - 1 <= max(end for _, lane, _, end in mine if lane == small) <= idle + 100 * US
    stayed = [start for _, lane, start, _ in mine if lane != small]
    assert not [start for start in stayed if min(moved) <= start <= max(moved)]
    # There and back, each with its barrier.
    assert log.counters[1].barriers == 2
    changed = [
        (start, end)
        for (_, left, _, end), (_, entered, start, _) in itertools.pairwise(mine)
        if left != entered
    ]
    assert [start - end for start, end in changed] == [3 * US, 3 * US]


def test_launch_pays_for_the_switches_of_the_way_that_is_taken() -> None:
    zigzag = problem_of(PAIR, MI50).plan(
        policy="by hand",
        lanes=[Lane(0, Mask.parse("0")), Lane(1, Mask.parse("1-2")), Lane(1, Mask.parse("1-3"))],
        choices=[np.zeros(8, dtype=np.int64), np.arange(20) % 2 + 1],
        whys=["", ""],
        why="",
    )
    rules = JointRules(None, Slack.PLENTY, Mask.parse("3"), kernels=5)
    plan = give_way(zigzag, PAIR, {0: PROMISE}, {1: rules})
    costs = free(launch_ns=6 * US, launch_switch_ns=US)
    stays = run(plan, PAIR, arrivals([], [0]), costs)
    moves = run(plan, PAIR, arrivals([0], [0]), costs)
    assert (starts(stays, 1)[0], starts(moves, 1)[0]) == (6 * US + 4 * US, 6 * US)


def test_each_level_of_slack_has_its_own_way() -> None:
    """Plenty: go on. Some: move. None: yield. The service is one long kernel that needs 1 ms and
    has 11: its slack falls from 10 ms on."""
    whole = flat_profile("whole", [12 * MS], blocks=1)
    limits = promise(bound_ns=11 * MS, request_ns=MS, some_ns=6 * MS, none_ns=2 * MS)
    corner = Mask.parse("3")
    rules = JointRules(Slack.NONE, Slack.SOME, corner, grain_ns=100 * US, depth=1)
    plan = giving([whole, BACKGROUND], {0: limits}, {1: rules})
    small = plan.lanes.index(Lane(1, corner))
    log = run(plan, [whole, BACKGROUND], arrivals([0], None), free())
    mine = kernels_of(log, 1)
    stayed = [start for _, lane, start, _ in mine if lane != small and start < 12 * MS]
    moved = [start for _, lane, start, _ in mine if lane == small]
    assert 4 * MS - 100 * US <= max(stayed) <= 4 * MS
    assert 4 * MS <= min(moved) <= 4 * MS + 100 * US + 1
    assert 8 * MS - 100 * US <= max(moved) <= 8 * MS
    assert min(start for start in starts(log, 1) if start > 8 * MS + 1) == 12 * MS
    assert log.counters[1].yields == 1


@pytest.mark.parametrize(("level", "at_ns"), [(Slack.SOME, 4 * MS), (Slack.NONE, 8 * MS)])
def test_held_worker_notices_when_slack_falls_although_nothing_happens(
    level: Slack, at_ns: int
) -> None:
    whole = flat_profile("whole", [12 * MS], blocks=1)
    limits = promise(bound_ns=11 * MS, request_ns=MS, some_ns=6 * MS, none_ns=2 * MS)
    corner = Mask.parse("3")
    plan = giving(
        [whole, BACKGROUND],
        {0: limits},
        {1: JointRules(Slack.PLENTY, level, corner, depth=1)},
    )
    log = run(plan, [whole, BACKGROUND], arrivals([0], [100 * US]), free())
    assert starts(log, 1)[0] == at_ns + 1
    assert kernels_of(log, 1)[0][1] == plan.lanes.index(Lane(1, corner))


def test_service_that_works_keeps_its_slack() -> None:
    """At its joints it says how much it has done: it never has less slack than 6 ms."""
    work = flat_profile("work", [100 * US] * 50, blocks=1)
    limits = promise(bound_ns=11 * MS, request_ns=5 * MS, some_ns=5_800 * US, none_ns=0)
    rules = {1: JointRules(Slack.SOME, grain_ns=100 * US)}
    joined = giving([work, BACKGROUND], {0: limits}, rules | {0: JointRules(kernels=1)})
    silent = giving([work, BACKGROUND], {0: limits}, rules)
    load = arrivals([0], None)
    assert run(joined, [work, BACKGROUND], load, free()).counters[1].yields == 0
    assert run(silent, [work, BACKGROUND], load, free()).counters[1].yields > 0


# --- Services among themselves ----------------------------------------------------------------

LONG = flat_profile("long", [100 * US] * 20)  # 2 ms
SHORT = flat_profile("short", [50 * US] * 4)  # 200 µs
BOTH = {0: JointRules(grain_ns=100 * US, depth=1), 1: JointRules(grain_ns=50 * US, depth=1)}


def two_services(long_ns: int, short_ns: int) -> Plan:
    promises = {0: promise(long_ns, 2 * MS), 1: promise(short_ns, 200 * US)}
    return giving([LONG, SHORT], promises, BOTH)


@pytest.mark.parametrize(("long_ns", "short_ns", "first"), [(9 * MS, MS, 1), (3 * MS, 5 * MS, 0)])
def test_service_with_less_slack_goes_first(long_ns: int, short_ns: int, first: int) -> None:
    plan = two_services(long_ns, short_ns)
    log = run(plan, [LONG, SHORT], arrivals([0], [0]), free())
    assert log.counters[first].yields == 0
    assert log.counters[1 - first].yields == 1
    alone = (2 * MS, 200 * US)
    assert latencies(log, first) == [alone[first]]
    assert latencies(log, 1 - first) == [sum(alone)]


def test_request_is_overtaken_at_most_twice() -> None:
    """Six urgent requests come while it runs; it lets two of them go first."""
    plan = two_services(50 * MS, MS)
    load = arrivals([0], list(range(150 * US, 4 * MS, 350 * US)))
    log = run(plan, [LONG, SHORT], load, free())
    assert log.counters[0].yields == MOST_OVERTAKEN == 2
    assert log.unfinished == (0, 0)
    assert max(latencies(log, 1)) > 200 * US + 100 * US


def test_hold_of_a_request_lasts_as_long_as_others_go_first() -> None:
    """Also its last one: being looked at again is not being overtaken again."""
    plan = two_services(50 * MS, 5 * MS)
    burst = [150 * US] * 3
    load = arrivals([0], [*burst, *[MS] * 3])
    log = run(plan, [LONG, SHORT], load, free())
    assert log.counters[0].yields == 2
    assert log.counters[0].longest_pause_ns == pytest.approx(600 * US, abs=50 * US)
    assert latencies(log, 0) == [2 * MS + 6 * 200 * US]


def test_queue_of_requests_makes_a_service_urgent() -> None:
    """Alone the short one has more slack; the last of twelve that wait has less."""
    plan = two_services(4 * MS, 4 * MS)
    one = run(plan, [LONG, SHORT], arrivals([0], [0]), free())
    twelve = run(plan, [LONG, SHORT], arrivals([0], [0] * 12), free())
    assert latencies(one, 1)[0] > MS
    assert latencies(twelve, 1)[0] == 200 * US


# --- Floors -----------------------------------------------------------------------------------


def overload(load: float, until_ns: int) -> list[int]:
    return np.arange(0, until_ns, 400 * US / load).astype(int).tolist()


@pytest.mark.parametrize("floor", [0.1, 0.2, 0.4])
@pytest.mark.parametrize("depth", [1, 2])
def test_floor_is_kept_beside_an_overloaded_service(floor: float, depth: int) -> None:
    load = arrivals(overload(1.2, 200 * MS), None)
    log = run(pair(depth, floor), PAIR, load, free(), seconds=0.2)
    done = log.counters[1].kernels * 100 * US / (200 * MS)
    # It is paid a stretch after it is owed, and no more than the stretches in flight too much.
    assert floor - 0.01 <= done <= floor + 0.02
    assert log.counters[1].longest_pause_ns <= depth * 100 * US / floor + 400 * US
    starved = run(pair(depth), PAIR, load, free(), seconds=0.2)
    assert starved.counters[1].kernels <= 2 * depth
    assert starved.counters[1].longest_pause_ns > 190 * MS


def test_floor_does_not_wait_for_an_event() -> None:
    """The service is one kernel of 18 ms: only the clock says that the floor is owed."""
    whole = flat_profile("whole", [18 * MS], blocks=1)
    plan = giving(
        [whole, BACKGROUND],
        {0: promise(100 * MS, 18 * MS)},
        {1: JointRules(grain_ns=100 * US, depth=1)},
        {1: 0.5},
    )
    log = run(plan, [whole, BACKGROUND], arrivals([0], [100 * US]), free())
    # A stretch of 100 µs pays for 200.
    assert starts(log, 1)[:3] == pytest.approx([100 * US, 300 * US, 500 * US], abs=3)


def test_work_done_in_good_times_is_remembered_for_a_while_only() -> None:
    """After 400 ms without a service, background is ahead by 100 ms of its floor at most."""
    busy_from = 400 * MS
    load = arrivals([busy_from + 400 * US * i for i in range(1500)], None)
    log = run(pair(1, 0.25), PAIR, load, free(), seconds=1.0, trace_ms=1000)
    resumed = min(start for start in starts(log, 1) if start > busy_from + MS)
    assert resumed - busy_from == pytest.approx(100 * MS, rel=0.02)


def test_floor_promises_nothing_for_time_without_requests() -> None:
    load = arrivals(overload(1.0, 45 * MS), [0, 30 * MS])
    log = run(pair(1, 0.2), PAIR, load, free(), seconds=0.05, trace_ms=50)
    (_, _, done), (_, again, _) = requests_of(log, 1)
    assert done < 15 * MS  # two at a fifth, and in one piece
    # Had it been owed since then, it would run at once.
    assert len([start for start in starts(log, 1) if again <= start < again + 2 * MS]) <= 6


# --- Everything at random ---------------------------------------------------------------------


SEEDS = st.integers(0, 100_000)
# Turns so short that nobody waits long for a lane that another one's turn is on.
QUICK_TURNS = msgspec.structs.replace(
    CALIBRATIONS["mi50"],
    costs=msgspec.structs.replace(
        CALIBRATIONS["mi50"].costs, turn_ns=100 * US, turn_switch_ns=5 * US
    ),
)


def society(seed: int) -> tuple[Plan, list[Profile], Load]:
    """Random routes on random lanes; services and background with random rules, joints and
    arrivals. All arrives within 4 ms, and takes a small part of the run."""
    rng = np.random.default_rng(seed)
    services, background = int(rng.integers(1, 4)), int(rng.integers(0, 3))
    count = services + background
    profiles = [
        synthetic_profile(seed * 7 + i, int(rng.integers(1, 14)), MI50, name=f"m{i}")
        for i in range(count)
    ]
    plan = random_plan(seed, profiles, MI50)
    promises = {}
    for worker in range(services):
        some, none = sorted(rng.integers(0, 2 * MS, 2).tolist(), reverse=True)
        promises[worker] = promise(
            int(rng.integers(50 * US, 5 * MS)), profiles[worker].request_ns[-1], some, none
        )
    joined = [worker for worker in range(count) if worker >= services or rng.random() < 0.8]
    given = {
        worker: JointRules(kernels=int(rng.integers(1, 6)), depth=int(rng.integers(1, 3)))
        for worker in joined
    }
    plan = give_way(plan, profiles, promises, given)
    changes: dict[int, dict[str, Any]] = {}
    for worker in joined:
        joints = joints_of(plan, worker)
        rules = random_rules(rng, plan, worker, services)
        changes[worker] = {"joints": msgspec.structs.replace(joints, rules=rules)}
        if worker >= services and rng.random() < 0.5:
            changes[worker]["floor"] = float(rng.uniform(0, 0.5))
    plan = with_workers(plan, changes)
    if rng.random() < 0.2:
        plan = msgspec.structs.replace(plan, sharing=Turns())
    times: list[list[int] | None] = [
        np.sort(rng.integers(0, 4 * MS, int(rng.integers(1, 10)))).tolist() for _ in range(services)
    ]
    return plan, profiles, arrivals(*times, *[None] * background, seed=seed)


def random_rules(
    rng: np.random.Generator, plan: Plan, worker: int, services: int
) -> tuple[Rule, ...]:
    others = [service for service in range(services) if service != worker]
    mine = [n for n, lane in enumerate(plan.lanes) if lane.owner in (worker, -1)]
    if not others:
        return ()
    return tuple(
        Rule(
            to=tuple(
                sorted(rng.permutation(others)[: int(rng.integers(1, len(others) + 1))].tolist())
            ),
            slack=Slack(rng.choice([level.value for level in Slack])),
            lane=None if rng.random() < 0.6 else int(rng.choice(mine)),
        )
        for _ in range(int(rng.integers(1, 4)))
    )


@given(SEEDS)
@settings(max_examples=80)
def test_nobody_is_held_for_ever_and_kernels_keep_their_order(
    seed: int,
) -> None:
    plan, profiles, load = society(seed)
    log = run(plan, profiles, load, QUICK_TURNS, seconds=0.15, trace_ms=150)
    served = 0
    for worker, times in enumerate(load.arrivals):
        if times is not None:
            assert log.unfinished[worker] == 0
            assert len(requests_of(log, worker)) == len(times)
            served = max(served, *(end for _, _, end in requests_of(log, worker)))
    for worker, planned in enumerate(plan.workers):
        mine = kernels_of(log, worker)
        order = [position for position, *_ in mine]
        assert order == [index % planned.kernels for index in range(len(order))]
        assert all(end <= start for (*_, end), (_, _, start, _) in itertools.pairwise(mine))
        if load.arrivals[worker] is None:
            assert mine[-1][3] > max(served, 140 * MS)  # it goes on to the end
        _check_counters(log, worker, mine)


def _check_counters(log: RunLog, worker: int, mine: list[tuple[int, int, int, int]]) -> None:
    planned, counter = log.plan.workers[worker], log.counters[worker]
    changes = sum(
        left != entered and position > 0
        for (_, left, *_), (position, entered, *_) in itertools.pairwise(mine)
    )
    assert changes <= counter.barriers <= changes + 1  # one may be under way at the end
    if planned.joints is None:
        assert (counter.yields, counter.moves, counter.longest_pause_ns) == (0, 0, 0)
    elif planned.promise is not None:
        begun = len(requests_of(log, worker)) + log.unfinished[worker]
        assert counter.yields <= MOST_OVERTAKEN * begun
    allowed = {
        group.lane
        for variant in log.plan.variants
        for part in variant.assignments
        if part.worker == worker
        for group in part.groups
    }
    if planned.joints is not None:
        allowed |= {one.lane for one in planned.joints.rules if one.lane is not None}
    assert {lane for _, lane, *_ in mine} <= allowed


@given(SEEDS)
@settings(max_examples=15)
def test_log_does_not_depend_on_how_the_run_is_cut(
    seed: int,
) -> None:
    plan, profiles, load = society(seed)
    whole = run(plan, profiles, load, QUICK_TURNS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sim, "_CHUNK_NS", 130_001.0)
        patch.setattr(sim, "_BUFFER_ROWS", 17)
        assert run(plan, profiles, load, QUICK_TURNS) == whole


# --- Turns ------------------------------------------------------------------------------------


def test_held_worker_gives_its_turn_up() -> None:
    """Otherwise the service would wait for the end of a turn of 5 ms."""
    plan = msgspec.structs.replace(pair(depth=1), sharing=Turns())
    costs = free(turn_ns=5 * MS)
    log = run(plan, PAIR, arrivals(NOW_AND_THEN, None), costs)
    assert len(latencies(log, 0)) == len(NOW_AND_THEN)
    assert max(latencies(log, 0)) <= 400 * US + 100 * US
    assert log.counters[1].kernels > 100
    plain = msgspec.structs.replace(pinned(PAIR, [ALL] * 2), sharing=Turns())
    assert max(latencies(run(plain, PAIR, arrivals(NOW_AND_THEN, None), costs), 0)) > MS
