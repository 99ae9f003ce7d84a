"""Copies between host and device: what a request is cut into, and who waits for a link."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eclip.core.copies import NO_LINK, PART_BYTES, TO_DEVICE, TO_HOST, Copy, taken_of_gaps
from eclip.core.plan import Lane, Plan, Promise
from eclip.core.profile import Profile
from eclip.core.program import program_of
from eclip.core.runlog import RunLog
from eclip.core.topology import Mask
from eclip.cuda import driver, graphs
from eclip.planner.joints import JointRules, cut_by_time, give_way, stretch_times_ns
from eclip.sim.device import build_machine
from eclip.sim.tables import KernelTables
from simulations import MI50, arrivals, closed, flat_profile, free, pinned, problem_of, run

US, MS = 1_000, 1_000_000
ALL = "0-3"  # of an MI50's slices
LONG = 4 * PART_BYTES


def copy(before: int, ns: int, size: int = 1, *, to_device: bool = True) -> Copy:
    return Copy(before=before, to_device=to_device, bytes=size, ns=ns)


def copying(name: str, busy_ns: Sequence[int], *copies: Copy, idle_ns: int = 0) -> Profile:
    """Kernels with these copies around them, and idle time after each kernel."""
    plain = flat_profile(name, busy_ns)
    taken = taken_of_gaps(copies, len(busy_ns)).astype(int) + idle_ns
    return msgspec.structs.replace(
        plain,
        gap_ns=tuple((int(gap),) * len(plain.sizes) for gap in taken),
        request_ns=(int(sum(busy_ns) + taken.sum()),) * len(plain.sizes),
        copies=copies,
    )


def ends(log: RunLog, worker: int) -> list[int]:
    columns = log.requests
    return [end for of, end in zip(columns.worker, columns.end_ns, strict=True) if of == worker]


def kernel_starts(log: RunLog, worker: int) -> list[int]:
    columns = log.kernels
    return [at for of, at in zip(columns.worker, columns.start_ns, strict=True) if of == worker]


def beside(first: Profile, second: Profile, *times: Sequence[int]) -> RunLog:
    profiles = [first, second]
    return run(pinned(profiles, ["0-1", "2-3"]), profiles, arrivals(*times), free())


# --- Steps ------------------------------------------------------------------------------------


def test_long_copies_are_steps_in_parts_and_pieces_of_their_own() -> None:
    profile = copying(
        "m",
        [10, 20, 30],
        copy(0, 100, LONG),
        copy(1, 5),
        copy(3, 80, 2 * PART_BYTES, to_device=False),
        idle_ns=1,
    )
    steps = profile.steps
    inward, outward = [TO_DEVICE] * 4, [TO_HOST] * 2
    assert steps.link.tolist() == [*inward, NO_LINK, TO_DEVICE, NO_LINK, NO_LINK, *outward]
    assert steps.kernel.tolist() == [0] * 5 + [1, 1] + [2] * 3
    assert profile.step_ns_at(60).tolist() == [25.0] * 4 + [11, 5, 21, 31, 40, 40]
    # A joint before a kernel is before the copies that go with it.
    assert steps.pieces([1]).tolist() == [0, 1, 2, 3, 4, 5, 8, 9]
    assert steps.pieces([]).tolist() == [0, 1, 2, 3, 4, 8, 9]


def test_plan_states_the_longest_piece_around_parts_of_copies() -> None:
    profile = copying("m", [70 * US, 70 * US, 70 * US], copy(1, 400 * US, LONG))
    # The copy is cut anyway: no joint is needed there, and what follows begins anew.
    assert cut_by_time(profile, 60, 100 * US) == (2,)
    assert stretch_times_ns(profile, (2,)) == (540 * US, 70 * US)
    plan = giving_way([flat_profile("s", [1]), profile], depth=2)
    joints = plan.workers[1].joints
    assert joints is not None
    assert (joints.at, joints.longest_ns, max(joints.stretch_ns)) == ((2,), 100 * US, 540 * US)


@pytest.mark.parametrize(
    ("busy_us", "copies", "at"),
    [
        ([70, 70], [copy(1, 70 * US)], (1,)),
        ([70, 20], [copy(2, 30 * US, to_device=False)], (1,)),  # behind the last
        ([90, 50], [copy(1, 20 * US), copy(1, 400 * US, LONG)], (1,)),  # before one that is cut
        ([90, 50], [copy(1, 400 * US, LONG), copy(1, 20 * US)], ()),
    ],
)
def test_short_copies_count_in_the_piece_that_they_are_in(
    busy_us: Sequence[int], copies: Sequence[Copy], at: tuple[int, ...]
) -> None:
    profile = copying("m", [US * each for each in busy_us], *copies)
    assert cut_by_time(profile, 60, 100 * US) == at


def giving_way(profiles: Sequence[Profile], depth: int, plan: Plan | None = None) -> Plan:
    promise = Promise(
        bound_ns=100 * MS, request_ns=profiles[0].request_ns[-1], some_ns=0, none_ns=0
    )
    rules = JointRules(grain_ns=100 * US, depth=depth)
    return give_way(plan or pinned(profiles, [ALL] * 2), profiles, {0: promise}, {1: rules})


def test_copies_that_a_gap_has_no_room_for_are_refused() -> None:
    profile = copying("m", [10, 20], copy(1, 30))
    with pytest.raises(ValueError, match="longer than the gap"):
        msgspec.structs.replace(profile, copies=(copy(1, 31),))
    with pytest.raises(ValueError, match="one of 2 kernels or behind the last"):
        msgspec.structs.replace(profile, copies=(copy(3, 1),))


# --- Links ------------------------------------------------------------------------------------


def test_copies_come_before_between_and_behind_kernels() -> None:
    profile = copying("m", [10 * US, 20 * US], copy(0, 5 * US), copy(1, 7 * US), copy(2, 3 * US))
    log = run(pinned([profile], [ALL]), [profile], arrivals([0]), free())
    assert kernel_starts(log, 0) == [5 * US, 22 * US]
    assert ends(log, 0) == [45 * US]


def test_link_takes_one_copy_after_the_other_in_the_order_they_came() -> None:
    first = copying("a", [10 * US], copy(0, 100 * US))
    second = copying("b", [10 * US], copy(0, 60 * US))
    log = beside(first, second, [0], [30 * US])
    assert (ends(log, 0), ends(log, 1)) == ([110 * US], [170 * US])
    for counters in log.counters:  # of lanes
        assert (counters.lane_waits, counters.false_waits) == (0, 0)


def test_directions_do_not_hinder_each_other() -> None:
    first = copying("a", [10 * US], copy(0, 100 * US))
    second = copying("b", [10 * US], copy(1, 60 * US, to_device=False))
    log = beside(first, second, [0], [30 * US])
    assert (ends(log, 0), ends(log, 1)) == ([110 * US], [100 * US])


def test_kernels_and_copies_run_at_the_same_time() -> None:
    log = beside(copying("a", [10 * US], copy(0, 90 * US)), flat_profile("b", [80 * US]), [0], [0])
    assert (ends(log, 0), ends(log, 1)) == ([100 * US], [80 * US])


def test_copies_of_one_request_that_follow_each_other_keep_the_link() -> None:
    first = copying("a", [10 * US], copy(0, 40 * US), copy(0, 60 * US))
    second = copying("b", [10 * US], copy(0, 60 * US))
    log = beside(first, second, [0], [30 * US])
    assert (ends(log, 0), ends(log, 1)) == ([110 * US], [170 * US])


def test_two_that_copy_all_the_time_are_in_step() -> None:
    """As measured on an H200: beside copies of 64 MiB a service's request took as long as one of
    background, which noticed nothing. On a link shared alike it would be faster, and background
    slower."""
    service = copying("s", [100 * US], copy(0, 460 * US), copy(1, 460 * US, to_device=False))
    background = copying("b", [220 * US], copy(0, 1220 * US), copy(1, 1220 * US, to_device=False))
    plan = pinned([service, background], ["0-1", "2-3"])
    log = run(plan, [service, background], closed(plan), free(), seconds=0.1)
    for worker in (0, 1):
        periods = np.diff(ends(log, worker)[5:])
        assert periods == pytest.approx(2660 * US, rel=1e-6)


# --- Giving way -------------------------------------------------------------------------------

SERVICE = copying("s", [50 * US], copy(0, 200 * US), copy(1, 200 * US, to_device=False))
BACKGROUND = copying("b", [50 * US] * 2, copy(1, 800 * US, 2 * LONG))
NOW_AND_THEN = list(range(1_030_000, 18 * MS, 1_733_000))


@pytest.mark.parametrize("depth", [1, 2])
def test_background_yields_between_the_parts_of_a_copy(depth: int) -> None:
    profiles = [SERVICE, BACKGROUND]
    plan = giving_way(profiles, depth)
    alone = ends(run(plan, profiles, arrivals(NOW_AND_THEN, []), free()), 0)
    log = run(plan, profiles, arrivals(NOW_AND_THEN, None), free())
    excess = np.subtract(ends(log, 0), alone)
    assert (depth - 1) * 100 * US < excess.max() <= depth * 100 * US
    # Its copies do not go on while it is held: it has what the service leaves.
    busy_ns = len(NOW_AND_THEN) * (SERVICE.request_ns[-1])
    most = (20 * MS - busy_ns) / BACKGROUND.request_ns[-1]
    assert most - 2 < len(ends(log, 1)) <= most + 1


@pytest.mark.parametrize(("depth", "waits_us"), [(1, 70), (2, 770)])
def test_worker_keeps_the_link_while_its_next_part_is_in_flight(depth: int, waits_us: int) -> None:
    """At depth 1 the link is free between two parts, and whoever waits for it comes in."""
    profiles = [SERVICE, BACKGROUND]
    plan = giving_way(profiles, depth)
    joints = plan.workers[1].joints
    assert joints is not None
    deaf = msgspec.structs.replace(
        plan.workers[1], joints=msgspec.structs.replace(joints, rules=())
    )
    plan = msgspec.structs.replace(plan, workers=(plan.workers[0], deaf))
    log = run(plan, profiles, arrivals([80 * US], [0]), free())
    assert ends(log, 0)[0] - 80 * US - SERVICE.request_ns[-1] == waits_us * US


def test_parts_of_a_copy_count_as_done_at_the_end_of_their_stretch() -> None:
    """As on a GPU: so the service's slack and a floor are the same on both."""
    profiles = [SERVICE, BACKGROUND]
    plan = giving_way(profiles, 2)
    machine = build_machine(program_of(plan), KernelTables(profiles, free()), closed(plan), 0)
    alone_ns = machine.stretches.rows["alone_ns"].tolist()
    assert alone_ns == [0] * 9 + [BACKGROUND.request_ns[-1]]


def test_lane_changed_before_a_copy_costs_one_barrier_with_a_joint_there_and_without() -> None:
    profiles = [flat_profile("s", [1]), copying("m", [70 * US] * 2, copy(1, 40 * US))]
    plan = problem_of(profiles, MI50).plan(
        policy="by hand",
        lanes=[Lane(worker, Mask.parse(mask)) for worker, mask in ((0, ALL), (1, "0-1"), (1, ALL))],
        choices=[np.array([0]), np.array([1, 2])],
        whys=["", ""],
        why="",
    )
    with_joints = giving_way(profiles, 2, plan)
    joints = with_joints.workers[1].joints
    assert joints is not None and joints.at == (1,)
    for one in (plan, with_joints):
        log = run(one, profiles, arrivals([], [0]), free(barrier_ns=9 * US))
        assert ends(log, 1) == [(70 + 9 + 40 + 70) * US]
        assert log.counters[1].barriers == 1


@st.composite
def profiles_with_copies(draw: st.DrawFn) -> Profile:
    busy = draw(st.lists(st.integers(1 * US, 80 * US), min_size=1, max_size=6))
    copies = st.builds(
        copy,
        st.integers(0, len(busy)),
        st.integers(0, 300 * US),
        st.integers(1, 3 * PART_BYTES),
        to_device=st.booleans(),
    )
    drawn = draw(st.lists(copies, max_size=4))
    return copying("m", busy, *drawn, idle_ns=draw(st.integers(0, 2 * US)))


@given(profiles_with_copies())
@settings(max_examples=60)
def test_only_a_kernel_with_its_copies_takes_longer_than_the_grain(profile: Profile) -> None:
    grain_ns = 100 * US
    steps, took_ns = profile.steps, profile.step_ns_at(60)
    pieces = steps.pieces(cut_by_time(profile, 60, grain_ns))
    for piece in np.split(np.arange(len(took_ns)), pieces[1:]):
        of_one = len(set(steps.kernel[piece].tolist())) == 1
        assert of_one or took_ns[piece].sum() <= grain_ns + 1e-6


@given(profiles_with_copies(), st.sampled_from([None, 1, 2]))
@settings(max_examples=60)
def test_request_alone_takes_its_time_however_it_is_cut(
    profile: Profile, depth: int | None
) -> None:
    profiles = [flat_profile("s", [1]), profile]
    plan = pinned(profiles, [ALL] * 2) if depth is None else giving_way(profiles, depth)
    log = run(plan, profiles, arrivals([], [0]), free())
    assert ends(log, 1) == pytest.approx([profile.request_ns[-1]], abs=1)
    assert log.counters[1].kernels == len(profile.trace.kernels)
    assert log.kernels.position == tuple(range(len(profile.trace.kernels)))


# --- Captured graphs --------------------------------------------------------------------------


class MemoryType(enum.IntEnum):
    """As CUDA numbers them."""

    CU_MEMORYTYPE_HOST = 1
    CU_MEMORYTYPE_DEVICE = 2
    CU_MEMORYTYPE_UNIFIED = 4


HOST, DEVICE, UNIFIED = MemoryType


@pytest.mark.parametrize(
    ("source", "target", "height", "expected"),
    [
        ((HOST, 0), (DEVICE, 0), 1, (96, True)),
        ((DEVICE, 0), (HOST, 0), 1, (96, False)),
        ((UNIFIED, HOST), (UNIFIED, DEVICE), 1, (96, True)),  # a pinned tensor
        ((UNIFIED, DEVICE), (UNIFIED, HOST), 1, (96, False)),
        ((DEVICE, 0), (DEVICE, 0), 1, (0, False)),
        ((HOST, 0), (HOST, 0), 1, (0, False)),
        ((HOST, 0), (DEVICE, 0), 2, (0, False)),  # in rows: it cannot be cut
    ],
)
def test_captured_copy_has_its_bytes_and_direction(
    monkeypatch: pytest.MonkeyPatch,
    source: tuple[MemoryType, int],
    target: tuple[MemoryType, int],
    height: int,
    expected: tuple[int, bool],
) -> None:
    """An address of unified memory stands for where it lies."""
    params = SimpleNamespace(
        srcMemoryType=source[0],
        srcDevice=source[1],
        dstMemoryType=target[0],
        dstDevice=target[1],
        WidthInBytes=96,
        Height=height,
        Depth=1,
    )
    fake = SimpleNamespace(
        CUmemorytype=MemoryType,
        CUpointer_attribute=SimpleNamespace(CU_POINTER_ATTRIBUTE_MEMORY_TYPE=2),
        CUresult=SimpleNamespace(CUDA_SUCCESS=0),
        cuGraphMemcpyNodeGetParams=lambda handle: (0, params),
        cuPointerGetAttribute=lambda asked, pointer: (0, pointer),
    )
    for module in (driver, graphs):
        monkeypatch.setattr(module, "cu", fake)
    assert graphs._copied("a node") == expected
