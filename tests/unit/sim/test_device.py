"""The simulator's run: its clock and its energy add up, and its log is complete and repeatable."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from eclip.core.calibration import Calibration
from eclip.core.device import Window
from eclip.core.load import Load
from eclip.core.plan import Assignment, Group, Lane, Plan, Variant, unpartitioned
from eclip.core.profile import Profile
from eclip.core.program import lower
from eclip.core.runlog import RunLog
from eclip.core.topology import Mask, Topology
from eclip.errors import MismatchError
from eclip.files import store
from eclip.models.synthetic import synthetic_profile
from eclip.planner.alone import alone_rates
from eclip.planner.policies import make_plan
from eclip.progress import Progress
from eclip.sim import device as sim
from eclip.sim import events
from eclip.sim.contention import LIMITS, RUNNING_KERNEL, contend, draw_w
from eclip.sim.tables import KernelTables
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
    random_bursts,
    random_mix,
    random_plan,
    run,
)
from waiting import PATIENCE_S


@dataclass(frozen=True)
class Integral:
    work_ns: npt.NDArray[np.float64]  # per kernel record: its speed integrated over its time
    slack_ns: npt.NDArray[np.float64]  # what rounding event times to whole ns can do to that
    profiled_ns: npt.NDArray[np.float64]
    energy_uj: float


def integrate(log: RunLog, profiles: Sequence[Profile], calibration: Calibration) -> Integral:
    """Replay the kernel records, which must hold the whole run, through the contention model."""
    plan, topology = log.plan, log.plan.topology
    lane_units = np.array(
        [
            [float(u * (s in lane.mask)) for s, u in enumerate(topology.slice_units)]
            for lane in plan.lanes
        ]
    )
    limits = limits_of(calibration)
    start, end = np.array(log.kernels.start_ns), np.array(log.kernels.end_ns)
    running = np.zeros(len(start), dtype=RUNNING_KERNEL)
    # In the order they came: by time, and at equal times by worker.
    running["ticket"][np.lexsort([np.array(log.kernels.worker), start])] = np.arange(len(start))
    for row, worker, position, lane in zip(
        running, log.kernels.worker, log.kernels.position, log.kernels.lane, strict=True
    ):
        profile, units = profiles[worker], plan.units(lane)
        busy = profile.busy_at(units)[position]
        blocks = profile.trace.kernels[position].blocks
        waves = blocks / (units * profile.blocks_per_unit[position])
        row["lane"], row["remaining"] = lane, busy
        row["tail_ns"] = busy / math.ceil(waves)
        row["body_room"], row["tail_room"] = min(waves, 1.0), waves - math.ceil(waves) + 1
        row["open"] = 1 - 1 / profile.blocks_per_unit[position]
        row["dram_rate"] = profile.dram_bytes[position] / busy
        row["l2_rate"] = profile.l2_bytes[position] / busy
        whole = profile.busy_at(topology.units)[position]
        row["pressing"] = math.sqrt(profile.l2_bytes[position] / whole) * whole / busy
        row["power_w"] = (
            min(blocks, units) * calibration.power.busy_unit_w
            + row["dram_rate"] * calibration.power.dram_pj_per_byte / 1e3
        )
    profiled = running["remaining"].copy()
    slack, before = np.ones(len(start)), np.zeros(len(start))
    energy = 0.0
    scratch = np.zeros((2, len(topology.slice_units)))
    events = np.unique(np.concatenate([start, end, [0, log.duration_ns]]))
    for begin, then in itertools.pairwise(events.astype(float).tolist()):
        now = begin
        active = np.flatnonzero((start <= begin) & (end >= then))
        while now < then:
            if len(active):
                contend(
                    active, len(active), running, lane_units, lane_units.sum(1), limits, *scratch
                )
            speed = np.zeros(len(start))
            speed[active] = running["speed"][active]
            # Where a last wave begins, speeds change between two records.
            ahead = running["remaining"] - running["tail_ns"]
            soon = (ahead > 1e-6) & (speed > 0)
            until = min(then, now + float(min(ahead[soon] / speed[soon], default=np.inf)))
            running["remaining"] -= speed * (until - now)
            running["tail_ns"][soon & (running["remaining"] <= running["tail_ns"] + 1e-6)] = np.inf
            slack += 0.5 * np.abs(speed - before)
            before = speed
            if now >= 0:
                energy += draw_w(active, len(active), running, limits) * (until - now) / 1e3
            now = until
    return Integral(profiled - running["remaining"], slack + 0.5 * before, profiled, energy)


def limits_of(calibration: Calibration) -> npt.NDArray[np.void]:
    sharing, memory, power = calibration.interference, calibration.memory, calibration.power
    constants = (
        sharing.cohabit,
        sharing.crowding,
        sharing.presence,
        sharing.pressure / math.sqrt(1e3),
        memory.dram_bytes_per_s / 1e9,
        memory.l2_bytes_per_s / 1e9,
        power.idle_w,
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
    # No warm-up: what a kernel had done before 0 would depend on others that no record shows.
    log = run(plan, profiles, random_bursts(seed, len(profiles), 0, 3_000_000))
    assert sum(log.unfinished) == 0
    integral = integrate(log, profiles, CALIBRATIONS[topology.name])
    assert len(log.kernels.worker) > 20
    error = np.abs(integral.work_ns - integral.profiled_ns)
    assert (error <= integral.slack_ns).all(), (error - integral.slack_ns).max()
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


# --- Calibrations -----------------------------------------------------------------------------


def test_calibration_of_a_twin_of_the_device_is_used_with_a_warning() -> None:
    profile = flat_profile("a", [1000], H200)
    twin = store.load_builtin("h100", Calibration)
    log = run(pinned([profile], ["0"], H200), [profile], arrivals([0]), twin)
    assert any("H100" in warning for warning in log.warnings)


def test_calibration_of_another_device_is_refused() -> None:
    with pytest.raises(MismatchError, match="units 60 against 132"):
        sim.SimDevice(H200, CALIBRATIONS["mi50"])


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


def test_the_simulator_is_compiled_for_one_type_of_time() -> None:
    """Numba takes three seconds for every other one."""
    profile = flat_profile("a", [1000])
    plan = pinned([profile], ["0"])
    run(plan, [profile], closed(plan), seconds=0.01, trace_ms=0)
    sim.glimpse(plan, KernelTables([profile], CALIBRATIONS["mi50"]), closed(plan), 1_000_000)
    compiled: Any = events.advance
    assert {str(kinds[2]) for kinds in compiled.signatures} == {"float64"}


def test_progress_rises_to_the_end() -> None:
    profile = flat_profile("a", [1000])
    plan = pinned([profile], ["0"])
    seen: list[float] = []

    class Watched(Progress):
        def part(self, share: float) -> None:
            seen.append(share)

    device = sim.SimDevice(MI50, CALIBRATIONS["mi50"], progress=Watched())
    with device.open(lower(plan, [profile.trace]), [profile]) as session:
        session.run(closed(plan), Window(seconds=0.3, warmup_seconds=0.1))
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


LONG_RUN = """
import resource, time
import numpy as np
from eclip.files import store
from eclip.core.calibration import Calibration
from eclip.core.device import MAX_SECONDS, Window
from eclip.core.load import Load
from eclip.sim import device as sim
from eclip.models.synthetic import synthetic_profile
from eclip.rig.rig import alone_rates
from eclip.core.plan import unpartitioned
from eclip.progress import Progress
from eclip.core.program import lower
from eclip.core.topology import Topology

h200 = store.load_builtin("h200", Topology)
profiles = [synthetic_profile(seed, 20, h200, name=f"m{seed}") for seed in range(3)]
sim._CHUNK_NS = 1e13
device = sim.SimDevice(h200, store.load_builtin("h200", Calibration))
session = device.open(lower(unpartitioned(h200, profiles), [p.trace for p in profiles]), profiles)
late = np.full(200, round((MAX_SECONDS - 1) * 1e9))
short, long = (Window(seconds=s, warmup_seconds=0.0, trace_ms=0.0) for s in (0.01, MAX_SECONDS))
session.run(Load("late", 0, (late,) * 3), short)  # compiles
# Seconds of work from here on, whatever else this machine does; then the kernel ends the process.
most = int(time.process_time()) + 20
resource.setrlimit(resource.RLIMIT_CPU, (most, most))
log = session.run(Load("late", 0, (late,) * 3), long)
assert len(log.requests.worker) == 600, len(log.requests.worker)
"""


def test_longest_run_allowed_comes_to_its_end() -> None:
    """In a process of its own: compiled code that does not end cannot be interrupted."""
    subprocess.run([sys.executable, "-c", LONG_RUN], check=True, timeout=PATIENCE_S)


def test_kernel_presses_by_the_root_of_its_rate_and_in_proportion_to_its_progress() -> None:
    profile = synthetic_profile(1, 40, H200)
    tables = KernelTables([profile], CALIBRATIONS[H200.name])
    whole, half = tables.at(0, H200.units), tables.at(0, 64)
    assert whole["pressing"] == pytest.approx(np.sqrt(whole["l2_rate"]))
    progress = whole["busy_ns"] / half["busy_ns"]
    assert progress.min() < 0.7
    assert half["pressing"] == pytest.approx(whole["pressing"] * progress)


def test_kernels_without_counted_traffic_have_the_usual_one() -> None:
    calibration = CALIBRATIONS[H200.name]
    memory = calibration.memory
    assert memory.usual_l2_bytes_per_s > memory.usual_dram_bytes_per_s > 0
    silent = synthetic_profile(1, 40, H200)
    nothing = (0,) * len(silent.trace.kernels)
    silent = msgspec.structs.replace(silent, dram_bytes=nothing, l2_bytes=nothing)
    few = msgspec.structs.replace(silent, l2_bytes=(1, *nothing[1:]))
    tables = KernelTables([silent, few], calibration)
    whole, half = tables.at(0, H200.units), tables.at(0, 64)
    assert whole["l2_rate"] == pytest.approx(memory.usual_l2_bytes_per_s / 1e9)
    assert whole["dram_rate"] == pytest.approx(memory.usual_dram_bytes_per_s / 1e9)
    # The same bytes, in the longer time that they take on fewer units.
    assert half["l2_rate"] * half["busy_ns"] == pytest.approx(whole["l2_rate"] * whole["busy_ns"])
    assert tables.at(1, H200.units)["l2_rate"][1:].max() == 0  # counted, and there was none


def test_host_that_stalls_begins_requests_later_and_their_arrival_stays() -> None:
    times = np.array([1_000_000, 5_000_000, 5_100_000, 9_000_000])
    begins = np.array([1_000_000, 8_000_000, 8_000_001, 9_000_000])
    profile = flat_profile("a", [100_000] * 3, H200)
    plan = unpartitioned(H200, [profile])
    window, device = Window(0.02, 0.0, 0.0), sim.SimDevice(H200, CALIBRATIONS["h200"])
    with device.open(lower(plan, [profile.trace]), [profile]) as session:
        usual = session.run(Load("by hand", 0, (times,)), window).requests
        stalled = session.run(Load("by hand", 0, (times,), (begins,)), window).requests
    assert usual.arrival_ns == stalled.arrival_ns == tuple(times.tolist())
    assert usual.start_ns[1] == 5_000_000
    assert stalled.start_ns[1] == 8_000_000
    assert stalled.start_ns[2] == stalled.end_ns[1]  # behind the one before it
    assert stalled.start_ns[3] >= 9_000_000
