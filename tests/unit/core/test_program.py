"""Lowering: a worker's kernels take effect in submission order, with no barrier too many."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eclip.core.mix import mix_of
from eclip.core.model_key import ModelKey
from eclip.core.plan import (
    ALL_WORKERS,
    Assignment,
    Group,
    Lane,
    Plan,
    PlannedWorker,
    Variant,
)
from eclip.core.program import NO_WAIT, Program, Route, lower
from eclip.core.topology import Mask, Topology
from eclip.core.trace import Kernel, Trace, with_traces
from eclip.errors import MismatchError
from eclip.files import store

MI50 = store.load_builtin("mi50", Topology)


def trace_of(model: str, kernels: int) -> Trace:
    return Trace(
        model=ModelKey(model, 1),
        kernels=tuple(
            Kernel(name=f"{model}.{index}", grid=(1, 1, 1), block=(1, 1, 1))
            for index in range(kernels)
        ),
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Plan, list[Trace]]:
    """A valid plan of random lanes, groups and variants, and its traces."""
    workers = draw(st.integers(1, 3))
    traces = [trace_of(f"m{index}", draw(st.integers(1, 8))) for index in range(workers)]
    owners = [*range(workers), *draw(st.lists(st.integers(-1, workers - 1), max_size=5))]
    masks = st.sets(st.integers(0, 3), min_size=1)
    lanes = tuple(Lane(owner, Mask(draw(masks))) for owner in owners)

    def assignment(worker: int) -> Assignment:
        mine = [n for n, lane in enumerate(lanes) if lane.owner in (worker, ALL_WORKERS)]
        kernels = len(traces[worker].kernels)
        route = draw(st.lists(st.sampled_from(mine), min_size=kernels, max_size=kernels))
        groups = [(lane, len(list(run))) for lane, run in itertools.groupby(route)]
        return Assignment(worker, tuple(Group(lane, count, 1) for lane, count in groups))

    everyone = tuple(range(workers))
    others = draw(st.sets(st.sets(st.sampled_from(everyone), min_size=1).map(tuple), max_size=3))
    keys = [everyone, *sorted({tuple(sorted(key)) for key in others} - {everyone})]
    plan = Plan(
        mix=mix_of(trace.model for trace in traces),
        policy="random",
        topology=MI50,
        fingerprint=with_traces(MI50.fingerprint, traces),
        modelled=True,
        workers=tuple(
            PlannedWorker(
                name=trace.model.name, model=trace.model, kernels=len(trace.kernels), why=""
            )
            for trace in traces
        ),
        lanes=lanes,
        variants=tuple(Variant(key, tuple(assignment(worker) for worker in key)) for key in keys),
        why="",
    )
    return plan, traces


@dataclass
class Launch:
    worker: int
    number: int  # in submission order, over all requests of the worker
    waits_for: list[Launch]
    done: bool = False


def submit(routes: tuple[Route, ...], requests: int, chance: random.Random) -> list[list[Launch]]:
    """Fill the lanes' queues as workers submit in any interleaving.

    A barrier waits for the last kernel that the worker had on the other lane when it was submitted.
    The head of a request waits for the request before, as the worker's user stream has it.
    """
    lanes: dict[int, list[Launch]] = {}
    submitted: dict[int, list[Launch]] = {route.worker: [] for route in routes}
    turns = [route for route in routes for _ in range(requests * len(route.lane))]
    chance.shuffle(turns)
    for route in turns:
        mine = submitted[route.worker]
        position = len(mine) % len(route.lane)
        waits_for: list[Launch] = []
        if position == 0:
            waits_for = mine[-1:]
        elif route.wait_on[position] != NO_WAIT:
            there = lanes.get(int(route.wait_on[position]), [])
            waits_for = [other for other in there if other.worker == route.worker][-1:]
        launch = Launch(route.worker, len(mine), waits_for)
        mine.append(launch)
        lanes.setdefault(int(route.lane[position]), []).append(launch)
    return list(lanes.values())


def execute(lanes: list[list[Launch]], chance: random.Random) -> None:
    """Run the lanes in any order that they and the barriers allow; fail where a worker's breaks."""
    finished: dict[int, int] = {}
    pending = [list(lane) for lane in lanes]
    head_runs = [False] * len(pending)
    while any(pending):
        ready = [
            index
            for index, lane in enumerate(pending)
            if lane and not head_runs[index] and all(before.done for before in lane[0].waits_for)
        ]
        busy = [index for index, runs in enumerate(head_runs) if runs]
        assert ready or busy, "the lanes wait for each other"
        index = chance.choice(ready + busy)
        launch = pending[index][0]
        if head_runs[index]:
            launch.done = True
            finished[launch.worker] = launch.number + 1
            pending[index].pop(0)
            head_runs[index] = False
        else:
            assert finished.get(launch.worker, 0) == launch.number, "started before its predecessor"
            head_runs[index] = True


def violates_order(routes: tuple[Route, ...], seed: int) -> bool:
    chance = random.Random(seed)
    try:
        execute(submit(routes, 2, chance), chance)
    except AssertionError:
        return True
    return False


@settings(max_examples=150, deadline=None)
@given(case=cases(), seeds=st.lists(st.integers(), min_size=3, max_size=3))
def test_kernels_take_effect_in_submission_order_under_any_interleaving(
    case: tuple[Plan, list[Trace]], seeds: list[int]
) -> None:
    for routes in lower(*case).routes:
        for seed in seeds:
            chance = random.Random(seed)
            execute(submit(routes, 2, chance), chance)


def test_missing_barrier_would_break_the_order() -> None:
    route = Route(worker=0, lane=np.array([0, 1, 0]), wait_on=np.array([NO_WAIT, 0, 1]))
    without = Route(worker=0, lane=route.lane, wait_on=np.full(3, NO_WAIT))
    assert not any(violates_order((route,), seed) for seed in range(50))
    assert any(violates_order((without,), seed) for seed in range(50))


@settings(max_examples=200, deadline=None)
@given(case=cases())
def test_barrier_is_absent_within_a_lane_and_present_at_every_switch(
    case: tuple[Plan, list[Trace]],
) -> None:
    plan, traces = case
    program = lower(plan, traces)
    assert program.plan == plan
    assert len(program.routes) == len(plan.variants)
    for variant, routes in zip(plan.variants, program.routes, strict=True):
        assert tuple(route.worker for route in routes) == variant.active
        for part, route in zip(variant.assignments, routes, strict=True):
            lanes = [group.lane for group in part.groups for _ in range(group.kernels)]
            assert route.lane.tolist() == lanes
            assert route.wait_on.tolist() == [
                NO_WAIT,
                *(
                    NO_WAIT if lane == before else before
                    for before, lane in itertools.pairwise(lanes)
                ),
            ]
            assert route.barriers == part.switches == len(part.groups) - 1


def small_case() -> tuple[Plan, list[Trace]]:
    traces = [trace_of("a", 3), trace_of("b", 2)]
    lanes = (Lane(0, Mask([0])), Lane(1, Mask([1])))
    plan = Plan(
        mix=mix_of([ModelKey("a", 1), ModelKey("b", 1)]),
        policy="by hand",
        topology=MI50,
        fingerprint=with_traces(MI50.fingerprint, traces),
        modelled=True,
        workers=(
            PlannedWorker(name="a", model=ModelKey("a", 1), kernels=3, why=""),
            PlannedWorker(name="b", model=ModelKey("b", 1), kernels=2, why=""),
        ),
        lanes=lanes,
        variants=(
            Variant((0, 1), (Assignment(0, (Group(0, 3, 1),)), Assignment(1, (Group(1, 2, 1),)))),
        ),
        why="",
    )
    return plan, traces


def refused(plan: Plan, traces: list[Trace]) -> str:
    with pytest.raises(MismatchError) as caught:
        lower(plan, traces)
    return str(caught.value)


def test_traces_of_the_plan_are_accepted() -> None:
    assert isinstance(lower(*small_case()), Program)


def test_wrong_number_of_traces_is_refused() -> None:
    plan, traces = small_case()
    assert "2 workers, 1 traces" in refused(plan, traces[:1])
    assert "2 workers, 3 traces" in refused(plan, [*traces, traces[0]])


def test_traces_of_other_kernels_models_or_order_are_refused() -> None:
    plan, (a, b) = small_case()
    renamed = msgspec.structs.replace(a.kernels[0], name="other")
    larger = msgspec.structs.replace(a.kernels[0], grid=(2, 1, 1))
    for kernels in (
        (renamed, *a.kernels[1:]),
        (larger, *a.kernels[1:]),
        a.kernels[::-1],
        a.kernels[:-1],
        (*a.kernels, a.kernels[0]),
    ):
        assert "worker a" in refused(plan, [msgspec.structs.replace(a, kernels=kernels), b])
    assert "worker a" in refused(plan, [b, a])
    assert "worker a" in refused(plan, [msgspec.structs.replace(a, model=ModelKey("a", 2)), b])
    assert "worker b" in refused(plan, [a, msgspec.structs.replace(b, model=ModelKey("c", 1))])
    assert "worker b" in refused(plan, [a, msgspec.structs.replace(b, model=ModelKey("b", 1, 66))])


def test_plan_without_the_digest_of_a_trace_is_refused() -> None:
    plan, traces = small_case()
    unknown = msgspec.structs.replace(plan.fingerprint, traces={})
    refused(msgspec.structs.replace(plan, fingerprint=unknown), traces)


def test_plan_for_another_number_of_kernels_than_its_trace_is_refused() -> None:
    plan, traces = small_case()
    fewer = msgspec.structs.replace(
        plan,
        workers=(msgspec.structs.replace(plan.workers[0], kernels=2), plan.workers[1]),
        variants=(
            Variant((0, 1), (Assignment(0, (Group(0, 2, 1),)), Assignment(1, (Group(1, 2, 1),)))),
        ),
    )
    assert "worker a" in refused(fewer, traces)


@pytest.mark.parametrize("seed", range(20))
def test_segments_cover_the_kernels_and_each_stays_on_one_lane(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lane = rng.integers(0, 3, rng.integers(1, 40))
    wait_on = np.where(np.diff(lane, prepend=lane[0]) != 0, np.roll(lane, 1), NO_WAIT)
    segments = Route(worker=0, lane=lane, wait_on=wait_on).segments()
    assert [kernel for segment in segments for kernel in segment] == list(range(len(lane)))
    for segment in segments:
        assert len({int(lane[kernel]) for kernel in segment}) == 1
        assert (wait_on[segment.start] != NO_WAIT) == (segment.start > 0)
