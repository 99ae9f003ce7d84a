"""Floors: what background is promised beside services and beside other background, simulated.

A set of floors is *feasible* where each worker could have its floor in a part of the time of its
own, beside the services but without other background, and these parts fit into the whole.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import eclip
from eclip.core.load import CLOSED_LOOP
from eclip.core.mix import Background, Mix, mix_of
from eclip.core.plan import Plan, Promise, unpartitioned
from eclip.core.profile import Profile
from eclip.core.rules import BANKED_NS
from eclip.core.runlog import RunLog
from eclip.errors import UsageError
from eclip.files import store
from eclip.models.synthetic import synthetic_profile
from eclip.planner.joints import JointRules, give_way
from eclip.planner.tiers import rules_in_words
from simulations import CALIBRATIONS, H200, MI50, arrivals, case_of, flat_profile, free, run

US, MS = 1_000, 1_000_000
WARMUP_S = 0.2
MEASURED = "bert:1,gpt2:8,vgg19:32,resnet50:32,densenet201:8,albert:8,alexnet:8,resnet152:8"


def promising(profiles: Sequence[Profile], floors: Sequence[float]) -> Mix:
    mix = mix_of(profile.model for profile in profiles)
    workers = tuple(
        msgspec.structs.replace(worker, background=Background(floor=floor)) if floor else worker
        for worker, floor in zip(mix.workers, floors, strict=True)
    )
    return msgspec.structs.replace(mix, workers=workers)


def as_stored_earlier(plan: Plan) -> Plan:
    """Before background yielded to background."""
    workers = tuple(
        worker
        if worker.joints is None
        else msgspec.structs.replace(
            worker, joints=msgspec.structs.replace(worker.joints, floors_first=())
        )
        for worker in plan.workers
    )
    return msgspec.structs.replace(plan, workers=workers)


# --- Everything at random ---------------------------------------------------------------------


@functools.cache
def measured() -> tuple[Profile, ...]:
    return tuple(eclip.case(MEASURED).profiles)


@dataclass(frozen=True)
class Crowd:
    """Up to two services, at up to 1.2 times what they could serve alone, and background."""

    profiles: tuple[Profile, ...]
    services: int
    depths: tuple[int, ...]
    times: tuple[tuple[int, ...], ...]  # of the services' arrivals
    parts: tuple[float, ...]  # of the time, that background's floors are to take
    seconds: float

    @classmethod
    def of(cls, seed: int, seconds: float, fill: float) -> Crowd:
        rng = np.random.default_rng(seed)
        services, background = int(rng.integers(0, 3)), int(rng.integers(2, 5))
        count = services + background
        made = [
            synthetic_profile(seed * 7 + i, int(rng.integers(4, 60)), H200, name=f"m{i}")
            for i in range(count)
        ]
        known = [measured()[i] for i in rng.permutation(len(measured()))]
        profiles = [pair[int(rng.random() < 0.3)] for pair in zip(made, known, strict=False)]
        loads = np.empty(0)
        if services:
            loads = rng.uniform(0.1, 1.2) * rng.dirichlet(np.ones(services))
        times = []
        for part, profile in zip(loads.tolist(), profiles, strict=False):
            expected = part * (WARMUP_S + seconds) * 1e9 / profile.request_ns[-1]
            within = int(-WARMUP_S * 1e9), int(seconds * 1e9)
            times.append(np.sort(rng.integers(*within, rng.poisson(expected))).tolist())
        parts = fill * rng.dirichlet(np.ones(background))
        parts[rng.random(background) < 0.25] = 0.0
        depths = rng.integers(1, 3, count).tolist()
        return cls(
            tuple(profiles), services, tuple(depths), tuple(times), tuple(parts.tolist()), seconds
        )

    @property
    def background(self) -> range:
        return range(self.services, len(self.profiles))

    def plan(self, floors: Sequence[float]) -> Plan:
        mix = promising(self.profiles, [0.0] * self.services + list(floors))
        promises = {}
        for service in range(self.services):
            alone_ns = self.profiles[service].request_ns[-1]
            promises[service] = Promise(
                bound_ns=5 * alone_ns, request_ns=alone_ns, some_ns=0, none_ns=0
            )
        joined = range(len(self.profiles)) if self.services > 1 else self.background
        rules = {worker: JointRules(depth=self.depths[worker]) for worker in joined}
        return give_way(unpartitioned(H200, self.profiles, mix), self.profiles, promises, rules)

    def run(
        self, plan: Plan, background: Sequence[int], *, services: bool = True, trace_ms: float = 0
    ) -> RunLog:
        """With these of the background, and with the services or not."""
        times: list[list[int] | None] = [list(mine) if services else [] for mine in self.times]
        times += [CLOSED_LOOP if worker in background else [] for worker in self.background]
        window = {"seconds": self.seconds, "warmup_seconds": WARMUP_S, "trace_ms": trace_ms}
        return run(plan, self.profiles, arrivals(*times), CALIBRATIONS["h200"], **window)

    def feasible_floors(self) -> tuple[list[float], list[int]]:
        """And what each of the background has alone, in requests."""
        always = self.plan([0.999] * len(self.background))  # owed all the time: it never yields
        alone, floors = [], []
        for worker, part in zip(self.background, self.parts, strict=True):
            alone.append(served(self.run(always, [worker], services=False), worker))
            beside = served(self.run(always, [worker]), worker) / alone[-1]
            floors.append(min(part * beside, 0.99))
        return floors, alone

    def broken(self, log: RunLog, floors: Sequence[float], alone: Sequence[int]) -> list[int]:
        """Whose floor is. Work that was done up to 0.1 s before it was due counts, also when that
        was in the warm-up; and so does the request that is under way at the end, as in measures.
        """
        part = 1 - BANKED_NS / (1e9 * self.seconds)
        columns = zip(self.background, floors, alone, strict=True)
        return [
            worker
            for worker, floor, requests in columns
            if served(log, worker) + 1 < floor * requests * part
        ]


def served(log: RunLog, worker: int) -> int:
    return log.requests.worker.count(worker)


@settings(max_examples=30)
@given(st.integers(0, 100_000))
def test_no_feasible_floor_is_broken_and_somebody_always_works(seed: int) -> None:
    crowd = Crowd.of(seed, seconds=0.5, fill=0.95)
    floors, alone = crowd.feasible_floors()
    log = crowd.run(crowd.plan(floors), crowd.background, trace_ms=500)
    assert crowd.broken(log, floors, alone) == []
    ends = np.maximum.accumulate(np.array(log.kernels.end_ns)[np.argsort(log.kernels.start_ns)])
    idle = np.sort(log.kernels.start_ns)[1:] - ends[:-1]
    longest_gap = max(int(profile.gap_at(132).max()) for profile in crowd.profiles)
    assert idle.max() <= longest_gap + 50 * US  # no longer than launches and joints take


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 300, 50))
def test_of_hundreds_of_crowds_none_breaks_a_feasible_floor(
    capsys: pytest.CaptureFixture[str], first: int
) -> None:
    """Many did before background yielded to background that is owed. Prints how many."""
    crowds = [Crowd.of(seed, seconds=1.0, fill=0.95) for seed in range(first, first + 50)]
    before = after = 0
    for crowd in crowds:
        floors, alone = crowd.feasible_floors()
        plan = crowd.plan(floors)
        logs = [crowd.run(one, crowd.background) for one in (as_stored_earlier(plan), plan)]
        earlier, now = (crowd.broken(log, floors, alone) for log in logs)
        before, after = before + bool(earlier), after + bool(now)
    with capsys.disabled():
        print(f"\n{len(crowds)} crowds, floors broken in {before} before and in {after} now")
    assert after == 0 < before


# --- One thing at a time ----------------------------------------------------------------------

# Kernels of 500 µs and of 50 µs: the short ones wait behind the long ones, and get an eleventh.
LONG = flat_profile("long", [500 * US] * 4)
SHORT = flat_profile("short", [50 * US] * 20)
PAIR = (LONG, SHORT)


def side_by_side(
    floors: Sequence[float], profiles: Sequence[Profile] = PAIR, promises: Sequence[int] = ()
) -> Plan:
    """Background in stretches of one kernel, one in flight, beside services with long bounds."""
    plain = unpartitioned(MI50, profiles, promising(profiles, floors))
    promised = {
        index: Promise(bound_ns=100 * MS, request_ns=MS, some_ns=0, none_ns=0) for index in promises
    }
    rules = {
        index: JointRules(kernels=1, depth=1)
        for index in range(len(profiles))
        if index not in promises
    }
    return give_way(plain, profiles, promised, rules)


def share(log: RunLog, worker: int, kernel_ns: int, seconds: float = 0.2) -> float:
    return log.counters[worker].kernels * kernel_ns / (seconds * 1e9)


@pytest.mark.parametrize("floor", [0.3, 0.5, 0.8])
def test_floor_is_kept_beside_other_background(floor: float) -> None:
    plan = side_by_side([0.0, floor])
    load = arrivals(CLOSED_LOOP, CLOSED_LOOP)
    log = run(plan, PAIR, load, free(), seconds=0.2)
    assert floor - 0.01 <= share(log, 1, 50 * US) <= floor + 0.02
    assert share(log, 0, 500 * US) >= 1 - floor - 0.03  # and no more than the floor is taken
    earlier = run(as_stored_earlier(plan), PAIR, load, free(), seconds=0.2)
    assert share(earlier, 1, 50 * US) < 0.1
    assert earlier.counters[0].yields == 0


def test_only_whoever_is_owed_nothing_yields() -> None:
    log = run(side_by_side([0.0, 0.5]), PAIR, arrivals(None, None), free(), seconds=0.2)
    assert log.counters[0].yields > 10
    assert log.counters[1].yields == 0


def test_nobody_yields_to_background_without_a_request() -> None:
    """A floor of which nobody makes use costs nothing."""
    log = run(side_by_side([0.0, 0.8]), PAIR, arrivals(None, []), free(), seconds=0.2)
    assert log.counters[0].yields == 0
    once = run(side_by_side([0.0, 0.8]), PAIR, arrivals(None, [0]), free(), seconds=0.2)
    assert once.unfinished[1] == 0
    assert share(once, 0, 500 * US) > 0.98


def test_where_all_are_owed_for_good_all_go_on() -> None:
    """Such floors cannot be kept; whoever can be paid is, and the other gets what is left."""
    log = run(side_by_side([0.8, 0.8]), PAIR, arrivals(None, None), free(), seconds=0.2)
    assert share(log, 0, 500 * US) == pytest.approx(0.8, abs=0.02)
    assert share(log, 1, 50 * US) == pytest.approx(0.2, abs=0.03)


def test_debts_of_all_are_paid_side_by_side() -> None:
    """Each leaves room for the other. A service stops both for 20 ms, so both are owed; one after
    the other they would never have 80% each again."""
    whole = flat_profile("whole", [20 * MS])
    small = [flat_profile(name, [100 * US] * 10, blocks=1) for name in ("a", "b")]
    profiles = (whole, *small)
    plan = side_by_side([0.0, 0.8, 0.8], profiles, promises=[0])
    log = run(plan, profiles, arrivals([0], None, None), free(), seconds=0.2)
    assert min(share(log, worker, 100 * US) for worker in (1, 2)) >= 0.8


def test_floors_beside_a_service_that_is_always_busy() -> None:
    """Both do without services and without each other while they are owed."""
    service = flat_profile("service", [50 * US] * 20)
    profiles = (service, LONG, SHORT)
    plan = side_by_side([0.0, 0.3, 0.2], profiles, promises=[0])
    always = np.arange(0, 200 * MS, 900 * US).tolist()
    log = run(plan, profiles, arrivals(always, None, None), free(), seconds=0.2)
    assert 0.29 <= share(log, 1, 500 * US) <= 0.33
    assert 0.19 <= share(log, 2, 50 * US) <= 0.22


def test_service_never_yields_to_a_floor() -> None:
    service = flat_profile("service", [50 * US] * 20)
    plan = side_by_side([0.0, 0.9], (service, SHORT), promises=[0])
    log = run(plan, (service, SHORT), arrivals([0, 50 * MS], None), free(), seconds=0.2)
    assert log.counters[0].yields == 0
    with pytest.raises(ValueError, match="is a service, and yields to services only"):
        with_joints(plan, 0, 1)


@pytest.mark.parametrize(
    ("other", "words"),
    [(0, "yields to worker 0; name another one"), (2, "yields to worker 2"), (-1, "worker -1")],
)
def test_plan_names_whose_floors_come_first(other: int, words: str) -> None:
    plan = side_by_side([0.0, 0.5])
    joints = plan.workers[0].joints
    assert joints is not None and joints.floors_first == (1,)
    assert "yields while short is owed its floor" in rules_in_words(plan, 0)
    with pytest.raises(ValueError, match=words):
        with_joints(plan, 0, other)
    with pytest.raises(ValueError, match="yields to long, who has no floor"):
        with_joints(plan, 1, 0)


def with_joints(plan: Plan, worker: int, other: int) -> Plan:
    """The plan, in which this worker yields while that one is owed its floor."""
    workers = list(plan.workers)
    joints = workers[worker].joints or workers[1].joints
    assert joints is not None
    joints = msgspec.structs.replace(joints, floors_first=(other,))
    workers[worker] = msgspec.structs.replace(workers[worker], joints=joints)
    return msgspec.structs.replace(plan, workers=tuple(workers))


def test_plan_stored_earlier_is_read_and_does_what_it_did(tmp_path: Path) -> None:
    store.save(as_stored_earlier(side_by_side([0.0, 0.5])), tmp_path / "plan.json")
    assert "floors_first" not in (tmp_path / "plan.json").read_text()
    plan = store.load(tmp_path / "plan.json", Plan)
    log = run(plan, PAIR, arrivals(None, None), free(), seconds=0.2)
    assert log.counters[0].yields == 0


# --- What cannot be kept ----------------------------------------------------------------------


def planned(first: str, second: str, policy: str = "yield") -> Plan:
    profiles = [flat_profile(name, [50 * US] * 20, H200) for name in ("a", "b")]
    mix = eclip.parse_mix(f"a:1@{first},b:1@{second}")
    return eclip.plan(case_of(profiles, mix=mix), policy)


def test_floors_that_cannot_be_kept_are_refused_with_the_most_that_can() -> None:
    with pytest.raises(UsageError) as refused:
        planned("background/floor=0.7", "background/floor=0.7")
    words = str(refused.value)
    assert "the policy yield cannot keep every floor of a:1@background/floor=0.7," in words
    assert "of its rate alone, at least 70.0% wanted" in words and "\n" not in words


def test_floor_that_a_busy_service_leaves_no_room_for_is_refused() -> None:
    with pytest.raises(UsageError, match=r"b: \d.*% of its rate alone, at least 90\.0% wanted"):
        planned("600rps/50ms", "background/floor=0.9")
    assert planned("600rps/50ms", "background/floor=0.3").workers[1].floor == 0.3


def test_floors_need_no_service() -> None:
    plan = planned("background/floor=0.6", "background/floor=0.3")
    assert [worker.floor for worker in plan.workers] == [0.6, 0.3]
    assert "a service's request waits" not in plan.why


def test_plan_whose_background_yields_to_nobody_has_floors_too() -> None:
    """So that a run can say which of them it misses."""
    plan = planned("background/floor=0.9", "background", policy="shared")
    assert [worker.floor for worker in plan.workers] == [0.9, 0.0]


def test_yielding_without_a_service_or_a_floor_has_no_meaning() -> None:
    with pytest.raises(UsageError, match="the policy yield needs a service"):
        planned("background", "background")
