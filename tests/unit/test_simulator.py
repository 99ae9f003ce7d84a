"""The simulator: its clock, its interference and its energy add up, and equal seeds repeat."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eclip import store
from eclip.calibration import Calibration
from eclip.devices.alone import alone_rates
from eclip.devices.base import Window
from eclip.devices.load import CLOSED_LOOP, Load, load_of_csv, load_of_mix
from eclip.devices.sim import device as sim
from eclip.devices.sim.contention import LIMITS, RUNNING_KERNEL, contend, draw_w
from eclip.errors import ArtefactError, MismatchError, UsageError
from eclip.frontends.synthetic import synthetic_profile
from eclip.measures import measure
from eclip.mix import mix_of, parse_mix
from eclip.plan import ALL_WORKERS, Assignment, Group, Lane, Plan, Variant
from eclip.planning.policies import make_plan
from eclip.planning.problem import Problem
from eclip.profile import Profile
from eclip.runlog import RunLog
from eclip.runtime.program import lower
from eclip.topology import Mask, Topology
from eclip.trace import Kernel, Trace

H200 = store.load_builtin(Topology, "h200")
MI50 = store.load_builtin(Topology, "mi50")
CALIBRATIONS = {
    topology.name: store.load_builtin(Calibration, topology.name) for topology in (H200, MI50)
}
FULL = {"seconds": 0.02, "warmup_seconds": 0.0, "trace_ms": 20.0}


def free(topology: Topology = MI50, **costs: int) -> Calibration:
    """The calibration with every cost but these at 0, and 1000 bytes/ns of memory."""
    calibration = CALIBRATIONS[topology.name]
    none = dict.fromkeys(calibration.costs.__struct_fields__, 0) | {"turn_ns": 1_000_000}
    return msgspec.structs.replace(
        calibration,
        costs=msgspec.convert(none | costs, type(calibration.costs)),
        memory=msgspec.structs.replace(
            calibration.memory, dram_bytes_per_s=1e12, l2_bytes_per_s=1e12
        ),
    )


def flat_profile(
    name: str,
    busy_ns: Sequence[int],
    topology: Topology = MI50,
    gap_ns: int = 0,
    dram_bytes: int = 0,
    blocks: int = 100_000,
) -> Profile:
    """Kernels that take the same time on any lane."""
    sizes = topology.lane_sizes
    kernel = Kernel(name="k", grid=(blocks, 1, 1), block=(256, 1, 1))
    trace = Trace(model=name, batch=1, kernels=(kernel,) * len(busy_ns))
    return Profile(
        trace=trace,
        fingerprint=msgspec.structs.replace(topology.fingerprint, traces={trace.key: trace.digest}),
        modelled=True,
        source="by hand",
        sizes=sizes,
        request_ns=(sum(busy_ns) + gap_ns * len(busy_ns),) * len(sizes),
        busy_ns=tuple((busy,) * len(sizes) for busy in busy_ns),
        gap_ns=((gap_ns,) * len(sizes),) * len(busy_ns),
        spread_ns=((0,) * len(sizes),) * len(busy_ns),
        dram_bytes=(dram_bytes,) * len(busy_ns),
        l2_bytes=(dram_bytes,) * len(busy_ns),
        blocks_per_unit=(1,) * len(busy_ns),
    )


def problem_of(profiles: Sequence[Profile], topology: Topology) -> Problem:
    mix = mix_of((profile.trace.model, profile.trace.batch) for profile in profiles)
    return Problem(mix, topology, tuple(profiles))


def pinned(profiles: Sequence[Profile], masks: Sequence[str], topology: Topology = MI50) -> Plan:
    """Every worker on one lane of its own."""
    return problem_of(profiles, topology).plan(
        policy="by hand",
        lanes=[Lane(worker, Mask.parse(mask)) for worker, mask in enumerate(masks)],
        choices=[
            np.full(len(profile.trace.kernels), worker, dtype=np.int64)
            for worker, profile in enumerate(profiles)
        ],
        whys=[""] * len(profiles),
        why="",
    )


def arrivals(*times: Sequence[int] | None, seed: int = 0) -> Load:
    return Load(
        label="by hand",
        seed=seed,
        arrivals=tuple(
            CLOSED_LOOP if part is None else np.array(part, dtype=np.int64) for part in times
        ),
    )


def run(
    plan: Plan,
    profiles: Sequence[Profile],
    load: Load,
    calibration: Calibration | None = None,
    **window: float,
) -> RunLog:
    device = sim.SimDevice(plan.topology, calibration or CALIBRATIONS[plan.topology.name])
    with device.open(lower(plan, [profile.trace for profile in profiles]), profiles) as session:
        return session.run(load, Window(**{**FULL, **window}), [1.0] * len(profiles))


def closed(plan: Plan, seed: int = 0) -> Load:
    return arrivals(*[None] * len(plan.workers), seed=seed)


def random_mix(seed: int, topology: Topology) -> list[Profile]:
    rng = np.random.default_rng(seed)
    workers = int(rng.integers(2, 5))
    return [
        synthetic_profile(seed * 10 + index, int(rng.integers(2, 12)), topology, name=f"m{index}")
        for index in range(workers)
    ]


def random_bursts(seed: int, workers: int, begin_ns: int, end_ns: int) -> Load:
    rng = np.random.default_rng(seed)
    return arrivals(
        *(
            np.sort(rng.integers(begin_ns, end_ns, rng.integers(1, 12))).tolist()
            for _ in range(workers)
        ),
        seed=seed,
    )


def random_plan(seed: int, profiles: Sequence[Profile], topology: Topology) -> Plan:
    """Random lanes, some of them of the same slices and some owned by all, and random routes."""
    rng = np.random.default_rng(seed)
    slices = len(topology.slice_units)
    lanes = []
    for owner in [*range(len(profiles)), *rng.integers(-1, len(profiles), 6).tolist()]:
        size = int(rng.integers(1, slices + 1))
        lanes.append(Lane(owner, Mask(rng.choice(slices, size, replace=False).tolist())))
    choices = []
    for worker, profile in enumerate(profiles):
        mine = [n for n, lane in enumerate(lanes) if lane.owner in (worker, ALL_WORKERS)]
        choices.append(rng.choice(mine, len(profile.trace.kernels)).astype(np.int64))
    return problem_of(profiles, topology).plan(
        policy="random", lanes=lanes, choices=choices, whys=[""] * len(profiles), why=""
    )


@dataclass(frozen=True)
class Integral:
    work_ns: npt.NDArray[np.float64]  # per kernel record: its speed integrated over its time
    slack_ns: npt.NDArray[np.float64]  # what rounding event times to whole ns can do to that
    profiled_ns: npt.NDArray[np.float64]
    energy_uj: float


def integrate(log: RunLog, profiles: Sequence[Profile], calibration: Calibration) -> Integral:
    """Replay the kernel records, which must hold the whole run, through the contention model."""
    plan, topology = log.plan, log.plan.topology
    slice_units = np.array(topology.slice_units, dtype=np.float64)
    lane_units = np.array(
        [[u * (s in lane.mask) for s, u in enumerate(slice_units)] for lane in plan.lanes]
    )
    limits = limits_of(calibration)
    start, end = np.array(log.kernels.start_ns), np.array(log.kernels.end_ns)
    running = np.zeros(len(start), dtype=RUNNING_KERNEL)
    profiled = np.zeros(len(start))
    for row, (worker, position, lane) in enumerate(
        zip(log.kernels.worker, log.kernels.position, log.kernels.lane, strict=True)
    ):
        profile, units = profiles[worker], plan.units(lane)
        profiled[row] = profile.busy_at(units)[position]
        running[row] = (
            lane,
            profile.dram_bytes[position] / profiled[row],
            profile.l2_bytes[position] / profiled[row],
            min(1.0, profile.trace.kernels[position].blocks / units),
            0.0,
        )
    work, slack, before = np.zeros(len(start)), np.ones(len(start)), np.zeros(len(start))
    energy = 0.0
    scratch = np.zeros(len(slice_units))
    events = np.unique(np.concatenate([start, end, [0, log.duration_ns]]))
    for now, then in itertools.pairwise(events.tolist()):
        active = np.flatnonzero((start <= now) & (end >= then))
        if len(active):
            contend(active, len(active), running, lane_units, lane_units.sum(1), limits, scratch)
        speed = np.zeros(len(start))
        speed[active] = running["speed"][active]
        work += speed * (then - now)
        slack += 0.5 * np.abs(speed - before)
        before = speed
        if now >= 0:
            power = draw_w(active, len(active), running, lane_units, slice_units, limits, scratch)
            energy += power * (then - now) / 1e3
    return Integral(work, slack + 0.5 * before, profiled, energy)


def limits_of(calibration: Calibration) -> npt.NDArray[np.void]:
    memory, power = calibration.memory, calibration.power
    constants = (
        memory.dram_bytes_per_s / 1e9,
        memory.l2_bytes_per_s / 1e9,
        power.idle_w,
        power.busy_unit_w,
        power.dram_pj_per_byte,
    )
    return np.array([constants], dtype=LIMITS)


# --- Time and energy add up -------------------------------------------------------------------


@pytest.mark.parametrize("topology", [H200, MI50], ids=lambda topology: str(topology.name))
@pytest.mark.parametrize("policy", ["shared", "model", "kernel", "eclip", "random"])
@pytest.mark.parametrize("seed", range(3))
def test_integrated_rate_is_the_profiled_time_and_integrated_power_the_energy(
    seed: int, policy: str, topology: Topology
) -> None:
    profiles = random_mix(seed, topology)
    plan = (
        random_plan(seed, profiles, topology)
        if policy == "random"
        else make_plan(policy, problem_of(profiles, topology))
    )
    load = random_bursts(seed, len(profiles), -1_000_000, 3_000_000)
    log = run(plan, profiles, load, warmup_seconds=0.001)
    assert sum(log.unfinished) == 0
    integral = integrate(log, profiles, CALIBRATIONS[topology.name])
    whole = np.array(log.kernels.start_ns) >= 0
    assert np.count_nonzero(whole) > 20
    error = np.abs(integral.work_ns - integral.profiled_ns)
    assert (error <= integral.slack_ns)[whole].all(), (error - integral.slack_ns).max()
    assert log.energy_uj == pytest.approx(integral.energy_uj, rel=1e-5)


def test_idle_device_draws_idle_power() -> None:
    profile = flat_profile("a", [1000])
    log = run(pinned([profile], ["0-3"]), [profile], arrivals([]))
    assert log.energy_uj == round(CALIBRATIONS["mi50"].power.idle_w * 0.02 * 1e6)
    assert log.requests.worker == log.kernels.worker == ()


def test_energy_of_the_warm_up_does_not_count() -> None:
    profile = flat_profile("a", [100_000])
    plan = pinned([profile], ["0-3"])
    busy_before = arrivals(list(range(-5_000_000, -200_000, 100_000)))
    log = run(plan, [profile], busy_before, calibration=free(), warmup_seconds=0.005)
    assert log.energy_uj == round(CALIBRATIONS["mi50"].power.idle_w * 0.02 * 1e6)
    assert log.counters[0].kernels == 0


@pytest.mark.parametrize("policy", ["shared", "model", "kernel", "eclip"])
def test_worker_alone_takes_launch_kernels_gaps_and_switches_exactly(policy: str) -> None:
    profile = synthetic_profile(3, 40, H200)
    plan = make_plan(policy, problem_of([profile], H200))
    costs = CALIBRATIONS["h200"].costs
    expected = float(costs.launch_ns)
    position = 0
    masks = []
    for group in plan.main.assignments[0].groups:
        units = plan.units(group.lane)
        here = slice(position, position + group.kernels)
        expected += float((profile.busy_at(units) + profile.gap_at(units))[here].sum())
        masks.append(plan.lanes[group.lane].mask)
        position += group.kernels
    for left, entered in itertools.pairwise(masks):
        outside = 1 - H200.units_of(left & entered) / min(map(H200.units_of, (left, entered)))
        expected += costs.launch_switch_ns + costs.barrier_ns + costs.switch_ns * outside
    log = run(plan, [profile], closed(plan))
    assert len(log.requests.end_ns) > 10
    for start, end in zip(log.requests.start_ns, log.requests.end_ns, strict=True):
        assert end - start == pytest.approx(expected, abs=1.01)
    if policy in ("kernel", "eclip"):
        assert len(masks) > 3


@pytest.mark.parametrize("busy_ns", [[100], [1_000], [70_000, 30_000]])
def test_rate_alone_is_that_of_undisturbed_requests(busy_ns: list[int]) -> None:
    profile = flat_profile("a", busy_ns, gap_ns=10)
    launch_ns = CALIBRATIONS["mi50"].costs.launch_ns
    rates = alone_rates(sim.SimDevice(MI50, CALIBRATIONS["mi50"]), [profile] * 2, [profile] * 2)
    assert list(rates) == pytest.approx([1e9 / (profile.request_ns[-1] + launch_ns)] * 2, rel=1e-3)


def test_entering_other_units_costs_a_switch_and_nested_lanes_only_a_barrier() -> None:
    profile = flat_profile("a", [1000, 1000])
    calibration = free(launch_ns=10, launch_switch_ns=100, barrier_ns=70, switch_ns=600)

    def latency(first: str, second: str) -> int:
        plan = problem_of([profile], MI50).plan(
            policy="by hand",
            lanes=[Lane(0, Mask.parse(first)), Lane(0, Mask.parse(second))],
            choices=[np.array([0, 1])],
            whys=[""],
            why="",
        )
        return run(plan, [profile], arrivals([0]), calibration).requests.end_ns[0]

    assert latency("0", "0-3") == latency("0-3", "0") == 2000 + 10 + 100 + 70
    assert latency("0", "1") == 2000 + 10 + 100 + 70 + 600
    assert latency("0-1", "1-2") == 2000 + 10 + 100 + 70 + 300


# --- Interference -----------------------------------------------------------------------------


def latencies(masks: Sequence[str], dram_bytes: int = 0) -> list[int]:
    """How long one kernel of 1 ms takes on each of these lanes, all begun together."""
    profiles = [
        flat_profile(f"m{n}", [1_000_000], dram_bytes=dram_bytes) for n in range(len(masks))
    ]
    plan = pinned(profiles, masks)
    log = run(plan, profiles, arrivals(*[[0]] * len(masks)), free())
    return [log.requests.end_ns[log.requests.worker.index(n)] for n in range(len(masks))]


def test_identical_kernels_on_the_same_units_take_twice_as_long_each() -> None:
    assert latencies(["0-3", "0-3"]) == [2_000_000] * 2
    assert latencies(["1-2", "1-2", "1-2"]) == [3_000_000] * 3


def test_kernels_on_disjoint_lanes_do_not_notice_each_other() -> None:
    assert latencies(["0-1", "2", "3"]) == [1_000_000] * 3


def test_partial_overlap_lies_between() -> None:
    assert latencies(["0-1", "1-2"]) == [1_333_333] * 2


def test_the_rest_of_a_kernel_runs_alone_once_the_other_is_done() -> None:
    profiles = [flat_profile("long", [1_000_000]), flat_profile("short", [200_000])]
    log = run(pinned(profiles, ["0-3", "0-3"]), profiles, arrivals([0], [0]), free())
    assert log.requests.worker == (1, 0)
    assert log.requests.end_ns == (400_000, 1_200_000)


def test_memory_bound_kernels_on_disjoint_lanes_share_the_bandwidth() -> None:
    half, most = 500_000_000, 800_000_000  # of the 1000 bytes/ns that the memory gives
    assert latencies(["0", "1"], dram_bytes=half) == [1_000_000] * 2
    assert latencies(["0", "1"], dram_bytes=most) == [1_600_000] * 2
    assert latencies(["0", "1", "2"], dram_bytes=half) == [1_500_000] * 3


Lanes = list[tuple[frozenset[int], float, float]]  # slices, DRAM rate, L2 rate
LIMIT = 100.0


def speeds(lanes: Lanes, units: Sequence[int]) -> list[float]:
    """``contend`` on one running kernel per lane, with 100 bytes/ns of DRAM and of L2."""
    running = np.zeros(len(lanes), dtype=RUNNING_KERNEL)
    lane_units = np.array(
        [[float(u) * (s in mask) for s, u in enumerate(units)] for mask, _, _ in lanes]
    )
    for row, (_, dram, l2) in enumerate(lanes):
        running[row] = (row, dram, l2, 1.0, 0.0)
    limits = np.array([(LIMIT, LIMIT, 0.0, 0.0, 0.0)], dtype=LIMITS)
    contend(
        np.arange(len(lanes)),
        len(lanes),
        running,
        lane_units,
        lane_units.sum(axis=1),
        limits,
        np.zeros(len(units)),
    )
    return [float(speed) for speed in running["speed"]]


def unit_shares(lanes: Lanes, units: Sequence[int]) -> list[float]:
    users = [sum(index in mask for mask, _, _ in lanes) for index in range(len(units))]
    return [
        sum(units[index] / users[index] for index in mask) / sum(units[index] for index in mask)
        for mask, _, _ in lanes
    ]


UNITS = st.lists(st.integers(1, 20), min_size=4, max_size=4)
RATES = st.floats(0.0, LIMIT) | st.just(0.0) | st.just(LIMIT)
MASKS = st.frozensets(st.integers(0, 3), min_size=1)


@settings(max_examples=200, deadline=None)
@given(
    lanes=st.lists(st.tuples(MASKS, RATES, RATES), min_size=1, max_size=5),
    units=UNITS,
)
def test_nobody_exceeds_its_share_of_units_nor_all_together_the_bandwidth(
    lanes: Lanes, units: list[int]
) -> None:
    found = speeds(lanes, units)
    for speed, share in zip(found, unit_shares(lanes, units), strict=True):
        assert 0 < speed <= share * (1 + 1e-9)
    for rates in ([dram for _, dram, _ in lanes], [l2 for _, _, l2 in lanes]):
        assert np.dot(found, rates) <= LIMIT * (1 + 1e-9)


@settings(max_examples=200, deadline=None)
@given(
    masks=st.lists(MASKS, min_size=1, max_size=5),
    units=UNITS,
    data=st.data(),
    resource=st.sampled_from([1, 2]),
)
def test_bandwidth_is_shared_max_min_fairly(
    masks: list[frozenset[int]], units: list[int], data: st.DataObject, resource: int
) -> None:
    rates = data.draw(st.lists(RATES, min_size=len(masks), max_size=len(masks)))
    lanes: Lanes = [
        (mask, rate, 0.0) if resource == 1 else (mask, 0.0, rate)
        for mask, rate in zip(masks, rates, strict=True)
    ]
    shares = unit_shares(lanes, units)
    found = speeds(lanes, units)
    taken = [speed * rate for speed, rate in zip(found, rates, strict=True)]
    held_back = [speed < share * (1 - 1e-9) for speed, share in zip(found, shares, strict=True)]
    if any(held_back):
        assert sum(taken) == pytest.approx(LIMIT, rel=1e-9)
    for index, slow in enumerate(held_back):
        if slow:
            assert taken[index] >= max(taken) * (1 - 1e-9)


@settings(max_examples=150, deadline=None)
@given(
    masks=st.lists(MASKS, min_size=2, max_size=6),
    units=UNITS,
)
def test_one_more_kernel_on_the_units_speeds_up_nobody(
    masks: list[frozenset[int]], units: list[int]
) -> None:
    lanes: Lanes = [(mask, 0.0, 0.0) for mask in masks]
    fewer = speeds(lanes[:-1], units)
    assert all(
        now <= before * (1 + 1e-12)
        for now, before in zip(speeds(lanes, units), fewer, strict=False)
    )


@settings(max_examples=150, deadline=None)
@given(rates=st.lists(st.floats(0.0, 3 * LIMIT), min_size=2, max_size=4))
def test_one_more_kernel_on_the_memory_speeds_up_nobody(rates: list[float]) -> None:
    lanes: Lanes = [(frozenset({index}), rate, 0.0) for index, rate in enumerate(rates)]
    fewer = speeds(lanes[:-1], [1] * 4)
    assert all(
        now <= before * (1 + 1e-9)
        for now, before in zip(speeds(lanes, [1] * 4), fewer, strict=False)
    )


def test_kernel_profiled_above_the_limit_is_not_slowed_down_by_one_that_needs_no_memory() -> None:
    greedy, modest = (frozenset({0}), 1.5 * LIMIT, 0.0), (frozenset({1}), 0.0, 0.0)
    assert speeds([greedy], [1] * 4) == [1.0]
    assert speeds([greedy, modest], [1] * 4) == [1.0, 1.0]


REPLACED_MODEL = """
import numpy as np
from eclip import store
from eclip.calibration import Calibration
from eclip.devices.base import Window
from eclip.devices.load import Load
from eclip.devices.sim.device import SimDevice
from eclip.frontends.synthetic import synthetic_profile
from eclip.plan import unpartitioned
from eclip.runtime.program import lower
from eclip.topology import Topology

mi50 = store.load_builtin(Topology, "mi50")
profiles = [synthetic_profile(0, 1, mi50, name=name) for name in "ab"]
device = SimDevice(mi50, store.load_builtin(Calibration, "mi50"))
session = device.open(lower(unpartitioned(mi50, profiles), [p.trace for p in profiles]), profiles)
log = session.run(Load("", 0, (np.array([0]),) * 2), Window(), [1.0] * 2)
print(log.requests.end_ns[-1])
"""


def test_replaced_contention_model_is_used_although_the_old_one_was_compiled_before(
    tmp_path: Path,
) -> None:
    package = tmp_path / "eclip"
    source = Path(sim.__file__).parents[2]
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def simulate() -> int:
        done = subprocess.run(
            [sys.executable, "-c", REPLACED_MODEL],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        )
        return int(done.stdout)

    before = simulate()
    model = package / "devices" / "sim" / "contention.py"
    text = model.read_text()
    model.write_text(text.replace("mine / lane_total[lane]", "0.25 * mine / lane_total[lane]"))
    assert model.read_text() != text
    assert simulate() > 2 * before


def test_power_counts_every_busy_unit_once_and_the_memory_traffic() -> None:
    units = np.array([10.0, 20.0])
    running = np.zeros(2, dtype=RUNNING_KERNEL)
    running[0] = (0, 100.0, 0.0, 0.5, 1.0)
    running[1] = (1, 40.0, 0.0, 0.8, 0.25)
    lane_units = np.array([[10.0, 20.0], [10.0, 0.0]])
    limits = np.array([(1e3, 1e3, 80.0, 2.0, 30.0)], dtype=LIMITS)

    def power(*active: int) -> float:
        indices = np.array(active, dtype=np.int64)
        return draw_w(indices, len(active), running, lane_units, units, limits, np.zeros(2))

    assert power() == 80
    assert power(0) == pytest.approx(80 + 2 * 15 + 3)
    assert power(1) == pytest.approx(80 + 2 * 8 + 0.3)
    assert power(0, 1) == pytest.approx(80 + 2 * (10 + 10) + 3 + 0.3)


# --- Order, lanes and hardware queues ---------------------------------------------------------


@pytest.mark.parametrize("queues", [1, 2, 3, 32])
@pytest.mark.parametrize("seed", range(4))
def test_kernels_keep_their_order_and_no_two_share_a_hardware_queue(seed: int, queues: int) -> None:
    topology = msgspec.structs.replace(MI50, hardware_queues=queues)
    profiles = random_mix(seed, topology)
    plan = random_plan(seed, profiles, topology)
    log = run(plan, profiles, closed(plan), trace_ms=5.0)
    lane_of = [
        [group.lane for group in part.groups for _ in range(group.kernels)]
        for part in plan.main.assignments
    ]
    by_worker: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    by_queue: dict[int, list[tuple[int, int]]] = defaultdict(list)
    columns = log.kernels
    for worker, position, lane, start, end in zip(
        columns.worker,
        columns.position,
        columns.lane,
        columns.start_ns,
        columns.end_ns,
        strict=True,
    ):
        assert lane == lane_of[worker][position]
        by_worker[worker].append((start, end, position))
        by_queue[lane % queues].append((start, end))
    assert sorted(by_worker) == list(plan.everyone)
    for worker, records in by_worker.items():
        count = plan.workers[worker].kernels
        for (_, end, position), (start, _, following) in itertools.pairwise(records):
            assert start >= end
            assert following == (position + 1) % count
    for spans in by_queue.values():
        assert all(later >= end for (_, end), (later, _) in itertools.pairwise(sorted(spans)))
    assert list(columns.end_ns) == sorted(columns.end_ns)


def test_lane_owned_by_all_serves_kernels_in_the_order_they_became_ready() -> None:
    profiles = [synthetic_profile(seed, 6, MI50, name=f"m{seed}") for seed in range(3)]
    plan = problem_of(profiles, MI50).plan(
        policy="by hand",
        lanes=[Lane(ALL_WORKERS, MI50.full)],
        choices=[np.zeros(6, dtype=np.int64)] * 3,
        whys=[""] * 3,
        why="",
    )
    log = run(plan, profiles, closed(plan))
    ready: dict[int, float] = {}
    served = []
    columns = log.kernels
    for worker, position, start, end in zip(
        columns.worker, columns.position, columns.start_ns, columns.end_ns, strict=True
    ):
        if worker in ready and position > 0:
            served.append((ready[worker], start))
        ready[worker] = end + profiles[worker].gap_ns[position][-1]
    assert len(served) > 100
    assert all(start >= when - 1 for when, start in served)
    for (first, _), (second, _) in itertools.pairwise(served):
        assert first <= second + 1
    assert all(counter.lane_waits > 0 for counter in log.counters)
    assert all(counter.false_waits == 0 for counter in log.counters)


def test_lanes_beyond_the_hardware_queues_wait_falsely() -> None:
    def simulate(queues: int) -> RunLog:
        topology = msgspec.structs.replace(MI50, hardware_queues=queues)
        profiles = [flat_profile(f"m{n}", [10_000] * 10, topology) for n in range(4)]
        plan = pinned(profiles, ["0", "1", "2", "3"], topology)
        return run(plan, profiles, closed(plan), free())

    enough, few = simulate(4), simulate(2)
    assert [counter.false_waits for counter in enough.counters] == [0] * 4
    assert enough.warnings == ()
    assert min(counter.false_waits for counter in few.counters) > 0
    assert min(counter.false_wait_ns for counter in few.counters) > 0
    assert any("hardware queues" in warning for warning in few.warnings)
    calm, crowded = (
        float(np.mean(np.subtract(log.requests.end_ns, log.requests.start_ns)))
        for log in (enough, few)
    )
    assert calm == 100_000
    assert crowded > 150_000


def test_false_wait_time_is_the_time_waited() -> None:
    topology = msgspec.structs.replace(MI50, hardware_queues=1)
    profiles = [flat_profile(f"m{n}", [10_000], topology) for n in range(3)]
    plan = pinned(profiles, ["0", "1", "2"], topology)
    log = run(plan, profiles, arrivals([0], [1_000], [2_000]), free())
    assert log.requests.end_ns == (10_000, 20_000, 30_000)
    assert [counter.false_wait_ns for counter in log.counters] == [0, 9_000, 18_000]
    assert [counter.false_waits for counter in log.counters] == [0, 1, 1]


# --- Time-slicing -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_time_sliced_workers_never_progress_together(seed: int) -> None:
    profiles = random_mix(seed, H200)
    plan = make_plan("timeslice", problem_of(profiles, H200))
    calibration = free(H200, turn_ns=30_000, turn_switch_ns=2_000)
    load = random_bursts(seed, len(profiles), 0, 1_000_000)
    log = run(plan, profiles, load, calibration)
    assert sum(log.unfinished) == 0
    columns = log.kernels
    start, end = np.array(columns.start_ns), np.array(columns.end_ns)
    busy = np.array(
        [
            profiles[worker].busy_ns[position][-1]
            for worker, position in zip(columns.worker, columns.position, strict=True)
        ]
    )
    assert (end - start >= busy - 1).all()
    for first in np.unique(start):
        inside = np.cumsum(np.where(start >= first, busy, 0))  # records are in order of completion
        assert (inside <= end - first + 1)[start >= first].all()


def test_time_sliced_workers_get_equal_shares_and_no_more_than_the_device() -> None:
    profiles = [synthetic_profile(seed, 30, H200, name=f"m{seed}") for seed in range(3)]
    plan = make_plan("timeslice", problem_of(profiles, H200))
    device = sim.SimDevice(H200, CALIBRATIONS["h200"])
    log = run(plan, profiles, closed(plan), seconds=0.5, trace_ms=0.0)
    rates = alone_rates(device, profiles, profiles)
    measures = measure(msgspec.structs.replace(log, alone_rps=rates))
    assert 0.85 < measures.stp <= 1.0
    assert measures.fairness > 0.95


def test_time_sliced_workers_do_not_share_hardware_queues() -> None:
    topology = msgspec.structs.replace(MI50, hardware_queues=1)
    profiles = [flat_profile(name, [10_000] * 5, topology, gap_ns=1_000) for name in "abc"]
    plan = make_plan("timeslice", problem_of(profiles, topology))
    log = run(plan, profiles, closed(plan), free(turn_ns=7_000))
    assert log.warnings == ()
    assert [counter.false_waits + counter.lane_waits for counter in log.counters] == [0] * 3
    assert set(log.requests.worker) == {0, 1, 2}


def test_handing_over_the_device_costs_time_and_keeping_it_does_not() -> None:
    profiles = [flat_profile(name, [1_000_000] * 2) for name in "ab"]
    plan = make_plan("timeslice", problem_of(profiles, MI50))
    calibration = free(turn_ns=1_000_000, turn_switch_ns=100_000)
    alone = run(plan, profiles, arrivals([0], []), calibration)
    both = run(plan, profiles, arrivals([0], [0]), calibration)
    assert alone.requests.end_ns == (2_100_000,)
    assert max(both.requests.end_ns) == 4 * 1_100_000


# --- Loads ------------------------------------------------------------------------------------


def test_same_seed_gives_an_equal_log() -> None:
    profiles = [synthetic_profile(seed, 10, H200, name=f"m{seed}") for seed in range(3)]
    plan = make_plan("eclip", problem_of(profiles, H200))
    poisson = load_of_mix(parse_mix("m0@900rps,m1,m2@2000rps"), 0.02, 0.01, seed=5)
    for load in (closed(plan, seed=5), poisson):
        first = run(plan, profiles, load, warmup_seconds=0.01)
        assert first == run(plan, profiles, load, warmup_seconds=0.01)
        assert len(first.requests.worker) > 20


def test_other_seed_gives_other_starts_and_arrivals() -> None:
    profiles = [synthetic_profile(seed, 10, H200, name=f"m{seed}") for seed in range(2)]
    plan = make_plan("shared", problem_of(profiles, H200))
    logs = [run(plan, profiles, closed(plan, seed)) for seed in (1, 2)]
    assert logs[0].requests.start_ns != logs[1].requests.start_ns
    mix = parse_mix("m0@500rps,m1@500rps")
    loads = [load_of_mix(mix, 1.0, 0.0, seed) for seed in (1, 2)]
    for worker in range(2):
        drawn = [load.arrivals[worker] for load in loads]
        assert drawn[0] is not None and drawn[1] is not None
        assert drawn[0].tolist() != drawn[1].tolist()


def test_closed_loop_begins_a_request_when_the_last_one_ends() -> None:
    profiles = [synthetic_profile(seed, 5, H200, name=f"m{seed}") for seed in range(3)]
    plan = make_plan("shared", problem_of(profiles, H200))
    log = run(plan, profiles, closed(plan))
    for worker in plan.everyone:
        mine = np.array(log.requests.worker) == worker
        start, end = np.array(log.requests.start_ns)[mine], np.array(log.requests.end_ns)[mine]
        assert start[1:].tolist() == end[:-1].tolist()
        assert (np.array(log.requests.arrival_ns)[mine] == start).all()
        assert log.unfinished[worker] == 1


def test_open_loop_requests_wait_their_turn_and_none_is_lost() -> None:
    profiles = [flat_profile("a", [100_000]), flat_profile("b", [400_000])]
    plan = pinned(profiles, ["0", "1"])
    mix = parse_mix("a@5000rps,b@5000rps")
    load = load_of_mix(mix, 0.02, 0.0, seed=1)
    log = run(plan, profiles, load, free())
    for worker, times in enumerate(load.arrivals):
        assert times is not None
        mine = np.array(log.requests.worker) == worker
        arrival, start, end = (
            np.array(column)[mine]
            for column in (log.requests.arrival_ns, log.requests.start_ns, log.requests.end_ns)
        )
        assert arrival.tolist() == times[: len(arrival)].tolist()
        previous_end = np.concatenate([[0], end[:-1]])
        assert start.tolist() == np.maximum(arrival, previous_end).tolist()
        assert np.count_nonzero(mine) + log.unfinished[worker] == len(times)
    assert log.unfinished[1] > 30


def test_arrivals_after_the_end_are_not_unfinished() -> None:
    profile = flat_profile("a", [1_000_000])
    plan = pinned([profile], ["0"])
    log = run(plan, [profile], arrivals([0, 19_500_000, 19_600_000, 20_000_000, 30_000_000]))
    assert len(log.requests.worker) == 1
    assert log.unfinished == (2,)


def test_poisson_arrivals_have_the_rate_and_the_variance_of_a_poisson_process() -> None:
    mix = parse_mix("a@1000rps")
    counts, totals = [], []
    for seed in range(200):
        times = load_of_mix(mix, 0.8, 0.2, seed).arrivals[0]
        assert times is not None
        totals.append(len(times))
        assert -200_000_000 <= times[0] <= times[-1] < 800_000_000
        assert (np.diff(times) >= 0).all()
        counts += np.histogram(times, bins=10, range=(-200_000_000, 800_000_000))[0].tolist()
    assert np.mean(counts) == pytest.approx(100, rel=0.01)
    assert np.var(counts) == pytest.approx(100, rel=0.15)
    assert np.var(totals) == pytest.approx(1000, rel=0.3)


def test_arrivals_of_a_worker_do_not_depend_on_the_policy_or_the_other_workers() -> None:
    alone = load_of_mix(parse_mix("a@700rps"), 1.0, 0.1, seed=3).arrivals[0]
    beside = load_of_mix(parse_mix("a@700rps,b,c@90rps"), 1.0, 0.1, seed=3)
    assert alone is not None and beside.arrivals[0] is not None
    assert alone.tolist() == beside.arrivals[0].tolist()
    assert beside.arrivals[1] is CLOSED_LOOP
    profiles = [flat_profile(name, [1_000]) for name in "abc"]
    problem = problem_of(profiles, MI50)
    seen = [
        sorted(zip(log.requests.worker, log.requests.arrival_ns, strict=True))
        for policy in ("shared", "timeslice")
        for log in [
            run(
                make_plan(policy, problem),
                profiles,
                load_of_mix(parse_mix("a@700rps,b@50rps,c@90rps"), 0.02, 0.0, seed=3),
            )
        ]
    ]
    assert seen[0] == seen[1]
    assert len(seen[0]) > 5


def test_more_arrivals_than_anyone_can_mean_are_refused() -> None:
    with pytest.raises(UsageError, match="lower the rate or the time"):
        load_of_mix(parse_mix("a@999999999rps"), 10.0, 0.0, seed=0)


def test_calibration_of_a_twin_of_the_device_is_used_with_a_warning() -> None:
    profile = flat_profile("a", [1000], H200)
    twin = store.load_builtin(Calibration, "h100")
    log = run(pinned([profile], ["0"], H200), [profile], arrivals([0]), twin)
    assert any("H100" in warning for warning in log.warnings)


def test_calibration_of_another_device_is_refused() -> None:
    with pytest.raises(MismatchError, match="units 60 against 132"):
        sim.SimDevice(H200, CALIBRATIONS["mi50"])


def test_load_for_another_number_of_workers_is_refused() -> None:
    profile = flat_profile("a", [1000])
    with pytest.raises(UsageError, match="2 workers, not 1"):
        run(pinned([profile], ["0"]), [profile], arrivals([0], [0]))


def test_csv_arrivals_are_sorted_and_workers_not_named_stay_idle(tmp_path: Path) -> None:
    path = tmp_path / "arrivals.csv"
    path.write_text("time_s, worker\r\n0.5,b\r\n0,a\r\n0.25, b\r\n")
    load = load_of_csv(path, ["a", "b", "c"], seed=0)
    found = [times.tolist() for times in load.arrivals if times is not None]
    assert found == [[0], [250_000_000, 500_000_000], []]
    assert load.label == "arrivals from arrivals.csv"


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "header"),
        (b"worker,time_s\n1,a\n", "header"),
        (b"0.1,a\n", "header"),
        (b"time_s,worker\n", "no arrivals"),
        (b"time_s,worker\nsoon,a\n", "line 2: 'soon'"),
        (b"time_s,worker\n0.1,a\n,a\n", "line 3: ''"),
        (b"time_s,worker\nnan,a\n", "finite"),
        (b"time_s,worker\ninf,a\n", "finite"),
        (b"time_s,worker\n-0.1,a\n", "at least 0"),
        (b"time_s,worker\n1e30,a\n", "line 2"),
        (b"time_s,worker\n0.1,z\n", "unknown worker 'z'; choose one of: a, b"),
        (b"time_s,worker\n0.1\n", "1 columns"),
        (b"time_s,worker\n0.1,a,b\n", "3 columns"),
        (b"\x00\xff\xfe\x80", ""),
        (b"\x1f\x8b\x08\x00", ""),
        (b"time_s,worker\n0.1,a\xff\n", "not a CSV text file"),
        (b"time_s,worker\n0.1," + b"a" * 200_000, "not a CSV text file"),
        (b'time_s,worker\n"0.1,a\n', ""),
        (b"time_s,worker\n0.1\x00,a\n", ""),
    ],
)
def test_bad_csv_is_refused_with_the_file_and_the_fault(
    tmp_path: Path, content: bytes, fault: str
) -> None:
    path = tmp_path / "arrivals.csv"
    path.write_bytes(content)
    with pytest.raises(ArtefactError) as refusal:
        load_of_csv(path, ["a", "b"], seed=0)
    assert str(path) in str(refusal.value)
    assert fault in str(refusal.value)


def test_missing_csv_and_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.csv", tmp_path):
        with pytest.raises(ArtefactError, match="cannot read"):
            load_of_csv(path, ["a"], seed=0)


# --- The run itself ---------------------------------------------------------------------------


def test_twice_as_long_a_run_completes_twice_as_many_requests() -> None:
    profiles = [synthetic_profile(seed, 10, H200, name=f"m{seed}") for seed in range(3)]
    plan = make_plan("eclip", problem_of(profiles, H200))
    short, long = (
        len(run(plan, profiles, closed(plan), seconds=seconds, trace_ms=0.0).requests.worker)
        for seconds in (0.05, 0.1)
    )
    assert long == pytest.approx(2 * short, rel=0.02)


def test_log_does_not_depend_on_the_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    profiles = [synthetic_profile(seed, 10, H200, name=f"m{seed}") for seed in range(3)]
    plan = make_plan("kernel", problem_of(profiles, H200))
    whole = run(plan, profiles, closed(plan))
    monkeypatch.setattr(sim, "_BUFFER_ROWS", 4)
    assert run(plan, profiles, closed(plan)) == whole
    assert len(whole.kernels.worker) > 1000


def test_log_does_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    profiles = [synthetic_profile(seed, 10, H200, name=f"m{seed}") for seed in range(3)]
    plan = make_plan("kernel", problem_of(profiles, H200))
    whole = run(plan, profiles, closed(plan))
    monkeypatch.setattr(sim, "_CHUNK_NS", 1234.5)
    assert run(plan, profiles, closed(plan)) == whole


def test_progress_rises_to_the_end() -> None:
    profile = flat_profile("a", [1000])
    plan = pinned([profile], ["0"])
    seen: list[float] = []
    device = sim.SimDevice(MI50, CALIBRATIONS["mi50"], progress=seen.append)
    with device.open(lower(plan, [profile.trace]), [profile]) as session:
        session.run(closed(plan), Window(seconds=0.3, warmup_seconds=0.1), [1.0])
    assert seen == sorted(seen)
    assert len(seen) > 3
    assert seen[-1] == 1.0


def test_kernels_are_recorded_inside_the_trace_window_only() -> None:
    profiles = [synthetic_profile(seed, 10, H200, name=f"m{seed}") for seed in range(2)]
    plan = make_plan("shared", problem_of(profiles, H200))
    none = run(plan, profiles, closed(plan), trace_ms=0.0)
    some = run(plan, profiles, closed(plan), trace_ms=5.0)
    whole = run(plan, profiles, closed(plan))
    assert none.kernels.worker == ()
    assert none.requests == some.requests == whole.requests
    inside = [end for end in whole.kernels.end_ns if end < 5_000_000]
    assert list(some.kernels.end_ns) == inside
    assert sum(counter.kernels for counter in whole.counters) == len(whole.kernels.worker)
    assert none.counters == whole.counters


def test_what_began_in_the_warm_up_starts_before_0_and_what_ended_there_is_left_out() -> None:
    profile = flat_profile("a", [300_000] * 3)
    plan = pinned([profile], ["0"])
    log = run(plan, [profile], arrivals([-1_000_000, -900_000]), free(), warmup_seconds=0.002)
    assert log.requests.start_ns == (-100_000,)
    assert log.requests.arrival_ns == (-900_000,)
    assert log.requests.end_ns == (800_000,)
    assert log.kernels.position == (0, 1, 2)
    assert log.kernels.start_ns == (-100_000, 200_000, 500_000)
    assert log.counters[0].kernels == 3


def variants_plan(profiles: Sequence[Profile]) -> Plan:
    """Worker 0 has all units while it is alone, and otherwise half of them."""
    plan = pinned(profiles, ["0-1", "2-3"])
    kernels = plan.workers[0].kernels
    solo = Variant((0,), (Assignment(0, (Group(2, kernels, 1),)),))
    return msgspec.structs.replace(
        plan, lanes=(*plan.lanes, Lane(0, MI50.full)), variants=(plan.main, solo)
    )


def test_variant_of_the_active_workers_is_used() -> None:
    profiles = [flat_profile("a", [10_000] * 2), flat_profile("b", [10_000] * 2)]
    plan = variants_plan(profiles)
    alone, together, after = 0, 1_000_500, 2_000_000
    load = arrivals([alone, together, after], [1_000_000])
    log = run(plan, profiles, load, free())
    lanes = {
        (worker, start): lane
        for worker, start, lane in zip(
            log.kernels.worker, log.kernels.start_ns, log.kernels.lane, strict=True
        )
    }
    assert lanes[0, alone] == 2
    assert lanes[0, together] == 0
    assert lanes[0, after] == 2
    assert lanes[1, 1_000_000] == 1


def test_request_keeps_the_variant_it_began_with() -> None:
    profiles = [flat_profile("a", [10_000] * 3), flat_profile("b", [10_000])]
    log = run(variants_plan(profiles), profiles, arrivals([0], [5_000]), free())
    mine = [
        lane
        for worker, lane in zip(log.kernels.worker, log.kernels.lane, strict=True)
        if worker == 0
    ]
    assert mine == [2, 2, 2]


@pytest.mark.parametrize(
    "window",
    [
        {"seconds": 0.0},
        {"seconds": -1.0},
        {"seconds": float("nan")},
        {"seconds": float("inf")},
        {"seconds": 1e9},
        {"warmup_seconds": -0.1},
        {"warmup_seconds": float("nan")},
        {"warmup_seconds": float("inf")},
        {"trace_ms": -1.0},
        {"trace_ms": float("nan")},
        {"trace_ms": 2000.1},
    ],
)
def test_impossible_window_is_refused(window: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        Window(**window)


@settings(max_examples=200, deadline=None)
@given(milliseconds=st.integers(1, 100_000))
def test_trace_window_may_be_the_whole_run(milliseconds: int) -> None:
    Window(seconds=milliseconds / 1000, trace_ms=float(milliseconds))


LONG_RUN = """
import numpy as np
from eclip import store
from eclip.calibration import Calibration
from eclip.devices.base import MAX_SECONDS, Window
from eclip.devices.load import Load
from eclip.devices.sim import device as sim
from eclip.frontends.synthetic import synthetic_profile
from eclip.plan import unpartitioned
from eclip.runtime.program import lower
from eclip.topology import Topology

h200 = store.load_builtin(Topology, "h200")
profiles = [synthetic_profile(seed, 20, h200, name=f"m{seed}") for seed in range(3)]
sim._CHUNK_NS = 1e13
device = sim.SimDevice(h200, store.load_builtin(Calibration, "h200"))
session = device.open(lower(unpartitioned(h200, profiles), [p.trace for p in profiles]), profiles)
late = np.full(200, round((MAX_SECONDS - 1) * 1e9))
window = Window(seconds=MAX_SECONDS, warmup_seconds=0.0, trace_ms=0.0)
log = session.run(Load("late", 0, (late,) * 3), window, [1.0] * 3)
assert len(log.requests.worker) == 600, len(log.requests.worker)
"""


def test_longest_run_allowed_comes_to_its_end() -> None:
    """In a process of its own: compiled code that does not end cannot be interrupted."""
    subprocess.run([sys.executable, "-c", LONG_RUN], check=True, timeout=20)
