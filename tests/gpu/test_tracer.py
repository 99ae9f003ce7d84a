"""Tracing: what is recorded is what ran, and afterwards nothing is slower than before."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from typing import Any

import numpy as np
import pytest

from eclip.core.device import Window
from eclip.core.load import CLOSED_LOOP, Load
from eclip.core.model_key import ModelKey
from eclip.core.plan import Plan
from eclip.core.topology import Mask
from eclip.core.trace import Trace
from eclip.cuda.device import CudaDevice
from eclip.cuda.driver import call, cu
from eclip.cuda.graphs import CudaGraph, place_whole
from eclip.cuda.lanes import LanePool
from eclip.cuda.stressors import Stressors
from eclip.cuda.tracer import Tracer
from eclip.gpu.executables import Capture
from eclip.gpu.session import Execution, GpuSession

pytestmark = pytest.mark.alone

KERNELS = 40
ROUNDS = 7
PAUSE_S = 0.05
TRACE_MS = 20.0

CapturedFrom = Callable[..., AbstractContextManager[CudaGraph]]
Opened = Callable[..., AbstractContextManager[GpuSession]]


@pytest.fixture
def chain(
    device: CudaDevice, stressors: Stressors, captured_from: CapturedFrom
) -> Iterator[CudaGraph]:
    """Kernels each longer than the one before, so that their order can be read from their times."""
    scratch = int(call(cu.cuMemAlloc, 1 << 20))

    def enqueue(stream: Any) -> None:
        for kernel in range(KERNELS):
            stressors.launch("fma", stream, 8, 128, scratch, 0, 2 + 3 * kernel)

    with captured_from(enqueue) as graph:
        yield graph
    call(cu.cuCtxSynchronize)
    call(cu.cuMemFree, scratch)


def host_us(handle: Any, stream: Any) -> float:
    """Median host time of a launch."""
    times = []
    for _ in range(60):
        before = time.perf_counter_ns()
        call(cu.cuGraphLaunch, handle, stream)
        times.append(time.perf_counter_ns() - before)
        call(cu.cuStreamSynchronize, stream)
    return float(np.median(times[10:])) / 1e3


def settled_us(device: CudaDevice, handle: Any, stream: Any) -> float:
    """The least of several such medians, always at the higher of the two speeds.

    CUPTI that stayed attached slows down all of them, others' work on this host only some.
    """
    device.gpu.quicken()
    medians = []
    for _ in range(ROUNDS):
        medians.append(host_us(handle, stream))
        time.sleep(PAUSE_S)
    return min(medians)


def names(graph: CudaGraph) -> list[str]:
    return [kernel.name for kernel in graph.kernels()]


@pytest.mark.own_process  # in which nothing has attached CUPTI before
def test_launches_are_as_fast_after_a_trace_as_before(device: CudaDevice, chain: CudaGraph) -> None:
    masks = [device.topology.full, Mask(range(4)), Mask(range(4, 9))]
    with closing(LanePool(device.slices, masks)) as pool:
        full, here, there = pool.lanes
        turns = [(here, there)[kernel // 10 % 2].context for kernel in range(KERNELS)]
        with (
            closing(place_whole(chain, [full.context] * KERNELS)) as plain,
            closing(place_whole(chain, turns)) as switching,
        ):
            runs = [(plain.handle, full.stream), (switching.handle, here.stream)]
            for run in runs:
                settled_us(device, *run)  # the process is new: its first launches are slower
            before = [settled_us(device, *run) for run in runs]  # all of them before any trace
            seen = []
            for repeat in range(3):
                for handle, stream in runs:
                    with Tracer(names(chain)) as tracer:
                        mine = tracer.executable_id(handle)
                        for _ in range(5):
                            call(cu.cuGraphLaunch, handle, stream)
                            call(cu.cuStreamSynchronize, stream)
                    assert {span.executable for span in tracer.spans} == {mine}
                    assert len(tracer.spans) == 5 * KERNELS, f"in trace {repeat}"
                    assert len({span.launch for span in tracer.spans}) == 5
                after = [settled_us(device, *run) for run in runs]
                seen.append(after)
                for first, then in zip(before, after, strict=True):
                    assert then <= 1.3 * first + 3, f"µs a launch: {before} before, {seen} after"


@pytest.mark.parametrize("execution", [Execution.WHOLE, Execution.SEGMENTS])
def test_kernels_of_a_run_are_told_by_worker_position_and_lane(
    execution: Execution,
    device: CudaDevice,
    chain: CudaGraph,
    plan_of: Callable[..., Plan],
    opened: Opened,
) -> None:
    sources = [
        Capture(chain, Trace(model=ModelKey(name, 1), kernels=chain.kernels()), None)
        for name in "ab"
    ]
    masks = [[Mask([0, 1]), Mask([2])], [Mask([4, 5]), Mask([6, 7, 8])]]
    routes = [[kernel // 7 % 2 for kernel in range(KERNELS)], [0] * 11 + [1] * (KERNELS - 11)]
    plan = plan_of(device.topology, [source.trace for source in sources], masks, routes)
    load = Load(label="closed loop", seed=0, arrivals=(CLOSED_LOOP,) * 2)
    window = Window(seconds=0.4, warmup_seconds=0.05, trace_ms=TRACE_MS)
    with opened(device, plan, sources, execution) as session:
        first, second = (session.run(load, window) for _ in range(2))
    for log in (first, second):
        records = log.kernels
        assert records.own_run and records.window_ns == TRACE_MS * 1e6
        assert not [warning for warning in log.warnings if "kernels" in warning]
        assert list(records.end_ns) == sorted(records.end_ns)
        assert records.end_ns[0] >= 0 and records.end_ns[-1] < records.window_ns
        times: list[list[list[int]]] = [[[] for _ in range(KERNELS)] for _ in sources]
        last = [-1, -1]
        for worker, position, lane, start, end in records.rows():
            if last[worker] >= 0:
                assert position == (last[worker] + 1) % KERNELS
            last[worker] = position
            assert lane == 2 * worker + routes[worker][position]
            times[worker][position].append(end - start)
        for rows in times:
            median = [float(np.median(row)) for row in rows]
            assert median == sorted(median), "a kernel was taken for another"
        # The traced run is busy from its beginning to its end, not a burst somewhere in it.
        assert records.start_ns[0] < 2e6 and records.end_ns[-1] > records.window_ns - 2e6
    # The second run was measured after a trace.
    spans = [
        np.subtract(log.requests.end_ns, log.requests.start_ns)[
            np.array(log.requests.worker) == worker
        ]
        for worker in range(2)
        for log in (first, second)
    ]
    for before, after in zip(spans[::2], spans[1::2], strict=True):
        assert np.median(after) <= 1.03 * np.median(before)


def test_a_profile_after_a_profile_is_the_same(device: CudaDevice, chain: CudaGraph) -> None:
    from eclip.capture.profiler import measure_profile
    from eclip.capture.torch import CapturedModule

    trace = Trace(model=ModelKey("chain", 1), kernels=chain.kernels())
    captured = CapturedModule(Capture(chain, trace, None), None, (), None)
    first, second = (
        measure_profile(device, captured, energy_seconds=0.0, stress=False) for _ in range(2)
    )
    assert np.allclose(first.request_ns, second.request_ns, rtol=0.02)
    before, after = (np.array(profile.busy_ns).sum(axis=0) for profile in (first, second))
    assert np.allclose(before, after, rtol=0.03)


@pytest.mark.own_process
def test_a_block_that_fails_leaves_nothing_attached(device: CudaDevice, chain: CudaGraph) -> None:
    with closing(LanePool(device.slices, [device.topology.full])) as pool:
        (lane,) = pool.lanes
        with closing(place_whole(chain, [lane.context] * KERNELS)) as executable:
            settled_us(device, executable.handle, lane.stream)
            before = settled_us(device, executable.handle, lane.stream)
            with pytest.raises(ZeroDivisionError), Tracer(names(chain)):
                call(cu.cuGraphLaunch, executable.handle, lane.stream)
                raise ZeroDivisionError
            call(cu.cuStreamSynchronize, lane.stream)
            assert settled_us(device, executable.handle, lane.stream) <= 1.3 * before + 3
            with Tracer(names(chain)) as tracer:
                call(cu.cuGraphLaunch, executable.handle, lane.stream)
    assert len(tracer.spans) == KERNELS
