"""What the tests on a GPU share; where there is no GPU, all of them are skipped with the reason."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from eclip.core.device import Window
from eclip.core.load import closed_loop
from eclip.core.mix import mix_of
from eclip.core.plan import Assignment, Group, Lane, Plan, PlannedWorker, Variant
from eclip.core.program import lower
from eclip.core.runlog import RunLog
from eclip.core.topology import Mask, Topology
from eclip.core.trace import Trace, with_traces
from eclip.cuda.device import CudaDevice
from eclip.cuda.driver import call, cu
from eclip.cuda.graphs import CudaGraph, fits
from eclip.cuda.lanes import LanePool
from eclip.cuda.stressors import Stressors
from eclip.gpu.executables import Capture
from eclip.gpu.session import Execution, GpuSession
from eclip.gpu.steps import LAUNCH, RECORD, WAIT, Steps
from gpu_host import captured_from, missing
from own_process import MARKER, failure_of, is_inside

# Libraries' own warnings; ours are still errors.
_TOLERATED = [
    f"ignore::{category}:{library}.*"
    for library in ("torch", "torchvision", "transformers")
    for category in ("UserWarning", "FutureWarning", "DeprecationWarning")
]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--piece", default="1/1", help="1/4: the first, fifth, ... of the tests")


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        f"{MARKER}: runs in a child, which may abort",
        "alone: times something or counts the device's memory, so no other process may use it",
        "simulated: the same test on the simulator, which needs no GPU",
    ):
        config.addinivalue_line("markers", line)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if pyfuncitem.get_closest_marker(MARKER) is None or is_inside():
        return None
    failure = failure_of(pyfuncitem.config.rootpath, pyfuncitem.nodeid)
    if failure is not None:
        pytest.fail(failure, pytrace=False)
    return True


@pytest.hookimpl(trylast=True)  # after -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    piece, pieces = map(int, config.getoption("--piece", "1/1").split("/"))
    items[:] = items[piece - 1 :: pieces]
    mine = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    reason = missing() if mine else None
    for item in mine:
        if reason is not None and item.get_closest_marker("simulated") is None:
            item.add_marker(pytest.mark.skip(reason=reason))
        # A kernel that hangs cannot be interrupted by a signal: the thread method ends the process.
        item.add_marker(pytest.mark.timeout(300, method="thread"))
        for warning in _TOLERATED:
            item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(scope="session")
def device() -> Iterator[CudaDevice]:
    made = CudaDevice()
    yield made
    call(cu.cuCtxSynchronize)
    made.close()


@pytest.fixture(scope="session")
def stressors(device: CudaDevice) -> Iterator[Stressors]:
    made = Stressors(device.gpu)
    yield made
    call(cu.cuCtxSynchronize)
    made.close()


def plan_of(
    topology: Topology,
    traces: Sequence[Trace],
    masks: Sequence[Sequence[Mask]],
    routes: Sequence[Sequence[int]],
) -> Plan:
    """Per worker the masks of its lanes and, for every kernel, which of them it takes."""
    mix = mix_of(trace.model for trace in traces)
    lanes: list[Lane] = []
    parts = []
    for worker, (own, route) in enumerate(zip(masks, routes, strict=True)):
        first = len(lanes)
        lanes += [Lane(worker, mask) for mask in own]
        runs = [(lane, len(list(run))) for lane, run in itertools.groupby(route)]
        parts.append(Assignment(worker, tuple(Group(first + lane, n, 0) for lane, n in runs)))
    return Plan(
        mix=mix,
        policy="test",
        topology=topology,
        fingerprint=with_traces(topology.fingerprint, traces),
        modelled=False,
        workers=tuple(
            PlannedWorker(name=worker.name, model=trace.model, kernels=len(trace.kernels), why="")
            for worker, trace in zip(mix.workers, traces, strict=True)
        ),
        lanes=tuple(lanes),
        variants=(Variant(tuple(range(len(traces))), tuple(parts)),),
        why="",
    )


def random_route(random: np.random.Generator, kernels: int, switches: int, lanes: int) -> list[int]:
    """A lane for every kernel, with so many switches at random places (or all there can be)."""
    switches = min(switches, kernels - 1)
    cuts = np.sort(random.choice(kernels - 1, switches, replace=False)) + 1
    lane = int(random.integers(lanes))
    route: list[int] = []
    for first, last in itertools.pairwise([0, *cuts.tolist(), kernels]):
        route += [lane] * (last - first)
        lane = (lane + int(random.integers(1, lanes))) % lanes
    return route


def legal(
    device: CudaDevice, source: Capture, masks: Sequence[Mask], route: Sequence[int]
) -> list[int]:
    """The route with kernels whose clusters do not fit their lane on the first that holds them."""
    nodes = [node for node in source.graph.nodes if node.kind == "KERNEL"]
    moved = list(route)
    with contextlib.closing(LanePool(device.slices, masks)) as pool:
        streams = [lane.stream for lane in pool.lanes]
        for kernel, node in enumerate(nodes):
            if not fits(node, streams[route[kernel]]):
                moved[kernel] = [fits(node, stream) for stream in streams].index(True)
    return moved


@contextlib.contextmanager
def opened(
    device: CudaDevice, plan: Plan, captures: Sequence[Capture], execution: Execution
) -> Iterator[GpuSession]:
    before, device.execution = device.execution, execution
    try:
        program = lower(plan, [source.trace for source in captures])
        with device.open(program, captures) as session:
            assert isinstance(session, GpuSession)
            yield session
    finally:
        device.execution = before


def run_closed(session: GpuSession, workers: int, seconds: float, warmup: float = 0.1) -> RunLog:
    window = Window(seconds=seconds, warmup_seconds=warmup, trace_ms=0.0)
    log = session.run(closed_loop(workers), window)
    return msgspec.structs.replace(log, alone_rps=(1.0,) * workers)  # so that it can be measured


def held() -> tuple[int, int]:
    """Bytes of device memory in use, and open files of this process."""
    call(cu.cuCtxSynchronize)
    free, total = call(cu.cuMemGetInfo)
    return total - free, len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(scope="session")
def sms_of(device: CudaDevice, stressors: Stressors) -> Callable[[Mask], frozenset[int]]:
    """The SMs that a kernel launched on a lane of this mask sees."""

    def look(mask: Mask) -> frozenset[int]:
        with contextlib.closing(LanePool(device.slices, [mask])) as pool:
            return stressors.sms_of(pool.lanes[0].stream)

    return look


class Stopwatch:
    """GPU time between events on the streams where a request begins and ends."""

    def __init__(self) -> None:
        self._begin, self._end = (call(cu.cuEventCreate, 0) for _ in range(2))

    def time_ns(self, launch: Callable[[], None], begin: int, end: int) -> float:
        call(cu.cuEventRecord, self._begin, begin)
        launch()
        call(cu.cuEventRecord, self._end, end)
        call(cu.cuStreamSynchronize, end)
        return float(call(cu.cuEventElapsedTime, self._begin, self._end)) * 1e6

    def steps_ns(self, steps: Steps) -> float:
        """One request, taken as the driving loop takes it."""
        columns = (steps.kind.tolist(), steps.first.tolist(), steps.second.tolist())
        todo = list(zip(*columns, strict=True))

        def take() -> None:
            for kind, first, second in todo:
                if kind == LAUNCH:
                    call(cu.cuGraphLaunch, first, second)
                elif kind == RECORD:
                    call(cu.cuEventRecord, first, second)
                elif kind == WAIT:
                    call(cu.cuStreamWaitEvent, first, second, 0)
                else:
                    call(cu.cuEventSynchronize, first)

        return self.time_ns(take, todo[0][2], steps.stream)

    def close(self) -> None:
        for event in (self._begin, self._end):
            call(cu.cuEventDestroy, event)


@pytest.fixture
def stopwatch(device: CudaDevice) -> Iterator[Stopwatch]:
    with contextlib.closing(Stopwatch()) as made:
        yield made


# Test modules cannot import each other in importlib mode: they get these functions as fixtures.
@pytest.fixture(scope="session", name="captured_from")
def _captured_from() -> Callable[..., contextlib.AbstractContextManager[CudaGraph]]:
    return captured_from


@pytest.fixture(scope="session", name="plan_of")
def _plan_of() -> Callable[..., Plan]:
    return plan_of


@pytest.fixture(scope="session", name="random_route")
def _random_route() -> Callable[..., list[int]]:
    return random_route


@pytest.fixture(scope="session", name="legal")
def _legal() -> Callable[..., list[int]]:
    return legal


@pytest.fixture(scope="session", name="opened")
def _opened() -> Callable[..., contextlib.AbstractContextManager[GpuSession]]:
    return opened


@pytest.fixture(scope="session", name="run_closed")
def _run_closed() -> Callable[..., RunLog]:
    return run_closed


@pytest.fixture(scope="session", name="held")
def _held() -> Callable[[], tuple[int, int]]:
    return held
