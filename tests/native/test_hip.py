"""AMD GPUs on the stand-in for HIP: lanes, order, closing in any state, and planted faults."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import hip_bench
from eclip.core.device import Window
from eclip.core.load import CLOSED_LOOP, Load
from eclip.core.plan import Lane, Plan, Promise, Slack
from eclip.core.program import lower
from eclip.core.topology import Mask
from eclip.errors import DeviceError, EclipError
from eclip.gpu.executables import Capture
from eclip.hip import doctor
from eclip.hip.device import HipDevice
from eclip.hip.driver import QUEUES_VARIABLE, Build, HipGpu
from eclip.hip.graphs import HipGraph, instantiate, instantiate_piece
from eclip.hip.lanes import MaskedLanes, MaskedStreams, mask_words, slice_bits
from eclip.planner.joints import JointRules, give_way
from eclip.planner.policies import make_plan
from eclip.planner.problem import Problem
from hip_bench import BEGIN, END, ENGINES, STREAM, UNITS, WHO, StandIn, launch

WORKERS = 2
SHORT = Window(seconds=0.08, warmup_seconds=0.0, trace_ms=0.0)
BUSY = Load(label="closed loop", seed=0, arrivals=(CLOSED_LOOP,) * WORKERS)
MI50 = Build(compute="gfx906", units=60, unit_threads=2560, engines=4, dies=1)


@dataclass(frozen=True)
class Stage:
    stand_in: StandIn
    device: HipDevice
    problem: Problem
    sources: Sequence[Capture]

    def open(self, plan: Plan) -> Any:
        program = lower(plan, [profile.trace for profile in self.problem.profiles])
        return self.device.open(program, self.sources)

    @property
    def plan(self) -> Plan:
        return make_plan("eclip", self.problem)

    def giving_way(self) -> Plan:
        """Worker 1 moves into a corner while worker 0, a service, is busy."""
        alone_ns = self.problem.profiles[0].request_ns[-1]
        promise = Promise(bound_ns=20 * alone_ns, request_ns=alone_ns, some_ns=0, none_ns=0)
        rules = JointRules(None, Slack.PLENTY, Mask([0]), kernels=2)
        plan = make_plan("shared", self.problem)
        return give_way(plan, self.problem.profiles, {0: promise}, {1: rules})


@pytest.fixture
def stage(hip: StandIn) -> Iterator[Stage]:
    with hip.device() as device:
        problem = hip_bench.make_problem(device.topology, WORKERS)
        sources = [
            hip.capture(device.gpu, number, profile)
            for number, profile in enumerate(problem.profiles)
        ]
        yield Stage(hip, device, problem, sources)


Lines = npt.NDArray[np.int64]


def run_watched(stage: Stage, plan: Plan, requests: int = 6) -> Lines:
    """So many requests of worker 1 beside as many as it takes of worker 0."""
    with stage.stand_in.watched() as lines, stage.open(plan) as session:
        session.request(1)  # with nobody beside it
        done = threading.Event()

        def serve() -> None:
            while not done.is_set():
                session.request(0)

        other = threading.Thread(target=serve)
        other.start()
        for _ in range(requests):
            session.request(1)
        done.set()
        other.join()
        return lines()


def of_worker(lines: Lines, worker: int) -> Lines:
    found: Lines = lines[lines[:, WHO] // 1000 == worker]
    return found


def check_order(stage: Stage, lines: Lines) -> None:
    for worker, profile in enumerate(stage.problem.profiles):
        ran = of_worker(lines, worker)
        assert len(ran) > 0
        kernels = len(profile.trace.kernels)
        assert (ran[:, WHO] % 1000).tolist() == [at % kernels for at in range(len(ran))]
        assert np.all(ran[1:, BEGIN] >= ran[:-1, END])


def check_lanes(stage: Stage, plan: Plan, lines: Lines) -> None:
    """Every kernel ran in the shader engines of its lane's slices, and in all of them."""
    assert len(lines)
    for route in lower(plan, [profile.trace for profile in stage.problem.profiles]).routes[0]:
        for line in of_worker(lines, route.worker):
            mask = plan.lanes[route.lane[line[WHO] % 1000]].mask
            assert line[ENGINES] == sum(1 << index for index in mask)
            assert line[UNITS] == stage.device.topology.units_of(mask)


# --- Masks ------------------------------------------------------------------------------------


def test_one_shader_engine_of_an_mi50_is_every_fourth_bit() -> None:
    assert [len(bits) for bits in slice_bits(MI50)] == [15] * 4
    assert slice_bits(MI50)[1][:3] == (1, 5, 9)
    assert mask_words(MI50, Mask([0])) == [0x11111111, 0x01111111]
    assert mask_words(MI50, Mask([0, 1, 2, 3])) == [0xFFFFFFFF, 0x0FFFFFFF]


def test_every_xcd_keeps_units_in_every_slice() -> None:
    """A thread block that is dealt to an XCD without units would never run."""
    mi300x = Build(compute="gfx942", units=304, unit_threads=2048, engines=4, dies=8)
    slices = slice_bits(mi300x)
    assert [len(bits) for bits in slices] == [72, 72, 72, 72, 16]
    for bits in slices:
        assert {bit % 8 for bit in bits} == set(range(8))
    assert sorted(bit for bits in slices for bit in bits) == list(range(304))


def test_on_rdna_a_unit_is_a_wgp(hip: StandIn) -> None:
    """Two CUs each; HIP's masks have a bit for a WGP."""
    navi = "simd_count 192\nsimd_per_cu 2\narray_count 12\nsimd_arrays_per_engine 2\n"
    waves = "max_waves_per_simd 16\nwave_front_size 32\n"
    place = "location_id 17152\ndomain 0\ngfx_target_version 110000\n"
    (hip.nodes / "1" / "properties").write_text(navi + waves + place)
    build = hip.gpu().build
    assert build == Build(compute="gfx1100", units=48, unit_threads=2048, engines=6, dies=1)
    assert build.unit_name == "WGP"


def test_lanes_run_in_the_engines_of_their_slices_and_in_order(stage: Stage) -> None:
    lines = run_watched(stage, stage.plan)
    assert len(np.unique(of_worker(lines, 1)[:, STREAM])) > 1  # it switches lanes
    check_order(stage, lines)
    check_lanes(stage, stage.plan, lines)


def test_background_moves_to_its_corner_and_keeps_its_order(stage: Stage) -> None:
    lines = run_watched(stage, stage.giving_way())
    check_order(stage, lines)
    assert {1, 255} == set(of_worker(lines, 1)[:, ENGINES].tolist())
    assert {255} == set(of_worker(lines, 0)[:, ENGINES].tolist())


def test_streams_are_handed_out_again_and_not_made_anew(stage: Stage) -> None:
    streams = MaskedStreams(stage.device.gpu)
    lanes = [Lane(0, Mask([0])), Lane(1, Mask([0])), Lane(1, Mask([1, 2]))]
    before = stage.stand_in.alive()[0]
    for _ in range(20):
        MaskedLanes(streams, lanes).close()
    assert stage.stand_in.alive()[0] == before + 3
    streams.close()
    assert stage.stand_in.alive()[0] == before


# --- Planted faults are caught ----------------------------------------------------------------


def test_masks_in_another_order_are_caught(stage: Stage) -> None:
    with stage.stand_in.planted(hip_bench.MASK_ORDER):
        lines = run_watched(stage, stage.plan)
    with pytest.raises(AssertionError):
        check_lanes(stage, stage.plan, lines)


def test_masks_that_do_nothing_are_caught(stage: Stage) -> None:
    with stage.stand_in.planted(hip_bench.MASK_IGNORED):
        lines = run_watched(stage, stage.plan)
    with pytest.raises(AssertionError):
        check_lanes(stage, stage.plan, lines)


def test_lost_waits_are_caught(stage: Stage) -> None:
    with stage.stand_in.planted(hip_bench.LOST_WAIT):
        lines = run_watched(stage, stage.plan)
    with pytest.raises(AssertionError):
        check_order(stage, lines)


def test_masks_that_hip_does_not_keep_are_refused_and_leave_nothing(stage: Stage) -> None:
    before = stage.stand_in.alive()
    with (
        stage.stand_in.planted(hip_bench.MASK_REFUSED),
        pytest.raises(DeviceError, match="HIP gave the lane of slices"),
    ):
        stage.open(stage.plan)
    assert stage.stand_in.alive()[1:] == before[1:]


# --- Graphs -----------------------------------------------------------------------------------


def branching(gpu: HipGpu, copy: bool = False) -> tuple[int, Any]:
    """Three kernels, the middle one on a second stream; perhaps a copy at the end."""
    library = ctypes.CDLL(gpu.hip.path)
    table = np.full(gpu.build.units + 1, 100_000, dtype=np.int64)

    def enqueue(stream: int) -> Any:
        side = gpu.hip.made("hipStreamCreateWithFlags", 1)
        fork, join = (gpu.hip.made("hipEventCreateWithFlags", 0) for _ in range(2))
        kept = [launch(gpu, stream, "first", 0, table)]
        gpu.hip.call("hipEventRecord", fork, stream)
        gpu.hip.call("hipStreamWaitEvent", side, fork, 0)
        kept.append(launch(gpu, side, "second", 1, table))
        kept.append(launch(gpu, stream, "third", 2, table))
        gpu.hip.call("hipEventRecord", join, side)
        gpu.hip.call("hipStreamWaitEvent", stream, join, 0)
        if copy:
            library.hipMemcpyAsync(None, None, ctypes.c_size_t(8), 3, ctypes.c_void_p(stream))
        kept.append(launch(gpu, stream, "fourth", 3, table))
        return kept

    return hip_bench.captured_from(gpu, enqueue)


def test_branches_are_put_in_a_row_because_hip_would_take_them_off_the_lane(stage: Stage) -> None:
    gpu = stage.device.gpu
    raw, kept = branching(gpu)
    streams = MaskedStreams(gpu)
    stream = streams.take(Mask([2]))
    graph = HipGraph(gpu.hip, raw)
    row = instantiate_piece(gpu.hip, graph, graph.piece(range(4)))
    as_it_was = instantiate(gpu.hip, raw)
    engines = []
    for executable in (row, as_it_was):
        with stage.stand_in.watched() as lines:
            gpu.hip.call("hipGraphLaunch", executable, stream)
            gpu.wait_for(stream)
            ran = lines()
        assert ran[0, WHO] == 0 and ran[-1, WHO] == 3
        engines.append(set(ran[:, ENGINES].tolist()))
    assert engines == [{4}, {4, 255}]
    assert len(kept) == 4


def test_a_graph_that_cannot_be_read_back_runs_whole_on_one_lane_or_not_at_all(
    stage: Stage,
) -> None:
    gpu = stage.device.gpu
    with pytest.raises(DeviceError, match="copies and branches"):
        HipGraph(gpu.hip, branching(gpu, copy=True)[0])

    def enqueue(stream: int) -> Any:
        library = ctypes.CDLL(gpu.hip.path)
        table = np.full(gpu.build.units + 1, 100_000, dtype=np.int64)
        kept = [launch(gpu, stream, kernel.name, 0, table, kernel.grid) for kernel in kernels]
        library.hipMemcpyAsync(None, None, ctypes.c_size_t(8), 3, ctypes.c_void_p(stream))
        return kept

    kernels = stage.problem.profiles[0].trace.kernels
    raw, kept = hip_bench.captured_from(gpu, enqueue)
    source = Capture(HipGraph(gpu.hip, raw), stage.problem.profiles[0].trace, kept)
    own = Stage(stage.stand_in, stage.device, stage.problem, [source, stage.sources[1]])
    with own.open(make_plan("shared", stage.problem)) as session:
        session.request(0)
    with pytest.raises(DeviceError, match="plan it with a policy that does not switch lanes"):
        own.open(make_plan("kernel", stage.problem))


@pytest.mark.parametrize("count", [hip_bench.NONE, hip_bench.NEWER_COUNT])
def test_memsets_of_a_capture_are_kept_however_hip_counts_kinds(stage: Stage, count: int) -> None:
    gpu = stage.stand_in.gpu()
    memory = ctypes.create_string_buffer(b"x" * 8, 8)
    table = np.full(gpu.build.units + 1, 1000, dtype=np.int64)

    def enqueue(stream: int) -> Any:
        library = ctypes.CDLL(gpu.hip.path)
        address, size = ctypes.addressof(memory), ctypes.c_size_t(8)
        library.hipMemsetAsync(ctypes.c_void_p(address), 7, size, ctypes.c_void_p(stream))
        return launch(gpu, stream, "kernel", 0, table)

    raw, kept = hip_bench.captured_from(gpu, enqueue)
    with stage.stand_in.planted(count):
        graph = HipGraph(gpu.hip, raw)
    stream = gpu.hip.made("hipStreamCreateWithFlags", 1)
    executable = instantiate_piece(gpu.hip, graph, graph.piece(range(1)))
    gpu.hip.call("hipGraphLaunch", executable, stream)
    gpu.wait_for(stream)
    assert memory.raw == b"\7" * 8 and kept


# --- Closing in any state ---------------------------------------------------------------------


def test_a_session_leaves_nothing_behind_whatever_it_is_closed_in(stage: Stage) -> None:
    with stage.open(stage.plan):
        pass
    before = stage.stand_in.alive()
    session = stage.open(stage.plan)  # between two runs
    session.run(BUSY, SHORT)
    session.close()
    session = stage.open(stage.giving_way())  # in the middle of one

    def run_long() -> None:
        with contextlib.suppress(EclipError):
            session.run(BUSY, Window(seconds=5, warmup_seconds=0, trace_ms=0))

    runner = threading.Thread(target=run_long)
    runner.start()
    time.sleep(0.05)
    session.close()
    runner.join(timeout=20)
    assert not runner.is_alive()
    stage.open(stage.plan)  # by the garbage collector
    gc.collect()
    with stage.stand_in.planted(hip_bench.FAILING_LAUNCH):  # after a failure
        session = stage.open(stage.plan)
        with pytest.raises(DeviceError, match="a launch failed"):
            session.run(BUSY, SHORT)
        session.close()
    assert stage.stand_in.alive()[1:] == before[1:]


def test_a_device_closes_its_sessions_and_streams(hip: StandIn) -> None:
    before = hip.alive()
    device = hip.device()
    problem = hip_bench.make_problem(device.topology, 1)
    source = hip.capture(device.gpu, 0, problem.profiles[0])
    program = lower(make_plan("model", problem), [source.trace])
    session = device.open(program, [source])
    device.close()
    device.close()
    assert hip.alive()[:2] == before[:2] and hip.alive()[3] == before[3]
    with pytest.raises(DeviceError, match="session is closed"):
        session.run(BUSY, SHORT)
    with pytest.raises(DeviceError, match="device is closed"):
        device.open(program, [source])


def test_a_session_closes_while_somebody_captures(stage: Stage) -> None:
    """In the mode that forbids everybody's waits."""
    session = stage.open(stage.plan)
    library = ctypes.CDLL(stage.device.gpu.hip.path)
    stream = ctypes.c_void_p(stage.device.gpu.hip.made("hipStreamCreateWithFlags", 1))
    graph = ctypes.c_void_p()
    assert library.hipStreamBeginCapture(stream, 0) == 0
    try:
        session.close()
    finally:
        assert library.hipStreamEndCapture(stream, ctypes.byref(graph)) == 0


# --- The host ---------------------------------------------------------------------------------


def test_doctor_finds_everything_on_the_stand_in(hip: StandIn) -> None:
    findings = {one.what: one for one in doctor.examine(0, hip_bench.LIBRARY, hip.nodes)}
    states = {what: one.state for what, one in findings.items()}
    assert states.pop("entry points") == "warning"  # it is a 5.2
    assert set(states.values()) == {"ok"}
    assert "8 shader engines" in findings["CU masks"].found


@pytest.mark.parametrize("name", ["HSA_CU_MASK", "ROC_GLOBAL_CU_MASK", QUEUES_VARIABLE])
def test_settings_that_would_change_lanes_are_refused(
    hip: StandIn, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "3")
    with pytest.raises(DeviceError, match=name):
        hip.gpu()


def test_a_gpu_that_the_kernel_driver_does_not_tell_of_is_refused(hip: StandIn) -> None:
    (hip.nodes / "1" / "properties").unlink()
    with pytest.raises(DeviceError, match=r"does not tell of the GPU at 0000:43:00\.0"):
        hip.gpu()
    with pytest.raises(DeviceError, match="there is no GPU 1; this host has 1"):
        HipGpu(1, hip_bench.LIBRARY, hip.nodes)
