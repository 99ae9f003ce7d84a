"""A GPU as a device: captures in, run logs out.

A session owns its lanes, executables and events, and releases them in that order backwards. A plan
runs as one graph whose nodes live in several contexts, or as one graph per group chained by events;
``Execution.AUTO`` tries both with all workers running and keeps the faster.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from eclip.artefacts.memory import check_memory, memory_of_plan
from eclip.artefacts.plan import MOST_VARIANTS, Plan
from eclip.artefacts.runlog import KernelRecords, RunLog
from eclip.artefacts.topology import Topology
from eclip.artefacts.trace import Trace
from eclip.devices.base import Closing, Window, check_load, check_sources
from eclip.devices.cuda.driver import CONNECTIONS, Gpu, call, cu
from eclip.devices.cuda.energy import Nvml, mean_power_w
from eclip.devices.cuda.graphs import CapturedGraph, Executable, place_segments, place_whole
from eclip.devices.cuda.lanes import GpuLane, LanePool, Slices
from eclip.devices.cuda.legality import check_clusters
from eclip.devices.cuda.tracer import Tracer
from eclip.devices.gpu import loop
from eclip.devices.gpu.recording import (
    NO_KERNELS,
    Placed,
    make_log,
    record_kernels,
    window_warnings,
)
from eclip.devices.load import CLOSED_LOOP, Arrivals, Load
from eclip.errors import DeviceError, TracingError, UsageError
from eclip.runtime.program import NO_WAIT, Program, Route

_TRIAL_SECONDS = 0.15  # to decide between one graph and segments
_TRIAL_REQUESTS = 8
_TRACE_WARMUP_S = 0.02  # of the run that records kernels; the graphs are warm already


class Execution(enum.Enum):
    AUTO = "auto"
    WHOLE = "whole"
    SEGMENTS = "segments"


@dataclass(frozen=True)
class Capture:
    """A captured model: the graph, its trace, and whatever must live as long as it.

    A graph with a loop cannot be moved; ``recapture`` captures the model again on a lane's stream
    and gives the raw graph and what must live as long as it.
    """

    graph: CapturedGraph
    trace: Trace
    keep: Any
    recapture: Callable[[Any], tuple[int, Any]] | None = None


class CudaDevice(Closing):
    def __init__(
        self,
        gpu: int = 0,
        fine: bool = False,
        execution: Execution = Execution.AUTO,
        connections: int = CONNECTIONS,
    ) -> None:
        self.execution = execution
        self.gpu = Gpu(gpu, connections)
        try:
            self.slices = Slices(self.gpu, fine)
            self.topology: Topology = self.slices.topology()
            self.nvml = Nvml(self.gpu.uuid)
        except BaseException:
            self.gpu.close()
            raise

    @property
    def title(self) -> str:
        return f"{self.gpu.name}, driver {self.nvml.driver()}"

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self.gpu.close)
            stack.callback(self.nvml.close)
            stack.callback(self.slices.close)

    def open(self, program: Program, sources: Sequence[Capture]) -> CudaSession:
        plan = program.plan
        warnings = plan.fingerprint.check(
            self.topology.fingerprint, "the plan", self.topology.title
        )
        check_sources(plan, [source.trace for source in sources])
        check_memory(memory_of_plan(plan, self.topology), "the plan")
        if any(_variants_of(plan, worker) > MOST_VARIANTS for worker in plan.everyone):
            raise UsageError(f"a worker can have at most {MOST_VARIANTS} variants of a plan")
        if plan.turns:
            raise DeviceError(
                "time-slicing needs one process per model and does not run inside one; leave the "
                "policy timeslice out"
            )
        return CudaSession(self, program, sources, warnings)


class CudaSession(Closing):
    def __init__(
        self,
        device: CudaDevice,
        program: Program,
        captures: Sequence[Capture],
        warnings: tuple[str, ...],
    ) -> None:
        self._device = device
        self._program = program
        self._captures = captures
        self._warnings = warnings
        self._placed: dict[int, Placed] = {}  # by the executable's handle, while it lives
        self._stack = contextlib.ExitStack()
        try:
            lanes = program.plan.lanes
            self._pool = LanePool(
                device.slices, [lane.mask for lane in lanes], [lane.priority for lane in lanes]
            )
            self._stack.callback(self._pool.close)
            check_clusters(
                program,
                [capture.graph for capture in captures],
                [capture.trace for capture in captures],
                self._pool.lanes,
            )
            self._loops = self._open_loops()
        except BaseException:
            self._stack.close()
            raise
        device.gpu.quicken()  # for whoever serves requests without a run

    def close(self) -> None:
        self._stack.close()

    def _open_loops(self) -> list[loop.WorkerLoop]:
        """Every worker's loop, in the way the device asks for or, if that is AUTO, the faster one.

        Both are tried with all workers at once: alone a graph over several contexts may win and
        then, beside others, fall into lock-step with them.
        """
        wanted = self._device.execution
        barriers = sum(route.barriers for routes in self._program.routes for route in routes)
        if wanted is not Execution.AUTO or barriers == 0:
            return self._make_loops(wanted, self._stack)
        with contextlib.ExitStack() as whole_stack, contextlib.ExitStack() as segments_stack:
            whole = self._make_loops(Execution.WHOLE, whole_stack)
            segments = self._make_loops(Execution.SEGMENTS, segments_stack)
            ratio = np.mean(self._try_rates(whole) / self._try_rates(segments))
            winner, loops = (whole_stack, whole) if ratio > 1 else (segments_stack, segments)
            self._stack.push(winner.pop_all())  # the other is released here
            return loops

    def _make_loops(self, way: Execution, owner: contextlib.ExitStack) -> list[loop.WorkerLoop]:
        active = np.zeros(len(self._captures), dtype=np.int64)
        prepare = self._segments if way is Execution.SEGMENTS else self._whole
        return [
            loop.WorkerLoop(
                self._device.gpu,
                [
                    (sum(1 << other for other in variant.active), prepare(route, owner))
                    for variant, routes in zip(
                        self._program.plan.variants, self._program.routes, strict=True
                    )
                    for route in routes
                    if route.worker == worker
                ],
                worker,
                active,
            )
            for worker in self._program.plan.everyone
        ]

    def _try_rates(self, loops: Sequence[loop.WorkerLoop]) -> npt.NDArray[np.float64]:
        """Requests per second of every worker, all of them back to back for a moment."""
        longest_ns = max(
            sum(group.predicted_ns for group in part.groups)
            for part in self._program.plan.main.assignments
        )
        seconds = max(_TRIAL_SECONDS, _TRIAL_REQUESTS * longest_ns / 1e9)
        stop = np.zeros(1, dtype=np.int64)
        runners = [loop.Runner(functools.partial(one.drive, stop=stop), stop) for one in loops]
        with _running(runners, stop):
            time.sleep(seconds)
        rates = []
        for runner in runners:
            ends = runner.rows()[:, 2]
            rates.append((len(ends) - 1) * 1e9 / (ends[-1] - ends[0]) if len(ends) > 1 else 1e-9)
        return np.array(rates)

    def _whole(self, route: Route, owner: contextlib.ExitStack) -> loop.Steps:
        """One graph; its own edges are the barriers."""
        first = self._pool.lanes[route.lane[0]]
        source = self._captures[route.worker]
        if source.graph.atomic:
            executable = self._captured_on(first, source, route, owner)
        else:
            executable = place_whole(source.graph, self._contexts(route), self._priorities(route))
        self._keep(executable, Placed(route, range(len(route.lane))), owner)
        executable.upload(first.stream)
        return loop.steps_of([(loop.LAUNCH, executable.handle, first.stream)])

    def _captured_on(
        self, lane: GpuLane, source: Capture, route: Route, owner: contextlib.ExitStack
    ) -> Executable:
        """A graph that cannot be moved, captured again on the one lane it is to run on."""
        if len(set(route.lane)) > 1 or source.recapture is None:
            raise DeviceError(
                f"{source.trace.key} has a loop in its graph, so it runs whole on one lane; plan "
                f"it with a policy that does not switch lanes: shared or model"
            )
        raw, keep = source.recapture(lane.stream)
        owner.callback(lambda kept: None, keep)  # holds it until the executable has been released
        return Executable(cu.CUgraph(raw))

    def _segments(self, route: Route, owner: contextlib.ExitStack) -> loop.Steps:
        """A graph for every segment; an event for every barrier."""
        if self._captures[route.worker].graph.atomic:
            return self._whole(route, owner)
        segments = route.segments()
        executables = place_segments(
            self._captures[route.worker].graph,
            self._contexts(route),
            segments,
            self._priorities(route),
        )
        for kernels, executable in zip(segments, executables, strict=True):
            self._keep(executable, Placed(route, kernels), owner)  # before anything can fail
        parts = []
        for kernels, executable in zip(segments, executables, strict=True):
            lane = self._pool.lanes[route.lane[kernels.start]]
            waits_on = route.wait_on[kernels.start]
            barrier = None
            if waits_on != NO_WAIT:
                event = call(cu.cuEventCreate, cu.CUevent_flags.CU_EVENT_DISABLE_TIMING)
                owner.callback(call, cu.cuEventDestroy, event)
                barrier = (event, self._pool.lanes[waits_on].stream)
            executable.upload(lane.stream)
            parts.append((executable.handle, lane.stream, barrier))
        return loop.chained(parts)

    def _keep(self, executable: Executable, part: Placed, owner: contextlib.ExitStack) -> None:
        owner.callback(executable.close)
        handle = int(executable.handle)
        self._placed[handle] = part
        owner.callback(self._placed.pop, handle)

    def _contexts(self, route: Route) -> list[Any]:
        return [self._pool.lanes[lane].context for lane in route.lane]

    def _priorities(self, route: Route) -> list[int]:
        return [self._pool.lanes[lane].priority for lane in route.lane]

    def steps(self, worker: int) -> loop.Steps:
        """What a request of a worker takes while everybody is active, for measuring it."""
        return self._loops[worker].steps

    def request(self, worker: int) -> None:
        """Run one request of a worker and wait for it: one thread at a time for each worker."""
        self._loops[worker].drive(most_requests=1)

    def run(self, load: Load, window: Window, alone_rps: Sequence[float]) -> RunLog:
        plan = self._program.plan
        check_load(plan, load)
        warnings = [*self._warnings, *window_warnings(window)]
        others = self._device.nvml.other_processes()
        if others:
            warnings.append(f"other processes used the GPU: {', '.join(map(str, others))}")
        duration_ns = round(window.seconds * 1e9)
        self._device.gpu.quicken()
        zero = _now_ns() + round(window.warmup_seconds * 1e9)
        stop = np.zeros(1, dtype=np.int64)
        runners = self._runners(load, zero, zero + duration_ns, stop)
        power = self._run_threads(runners, zero, zero + duration_ns, stop)
        served = [runner.rows() - zero for runner in runners]
        kernels = NO_KERNELS
        if window.trace_ms > 0:
            try:
                kernels = self._trace(load, window)
            except TracingError as error:
                warnings.append(f"kernels are not recorded: {error}")
        return make_log(
            plan,
            self._device.title,
            load,
            served,
            [worker.kernels for worker in plan.workers],
            kernels,
            duration_ns,
            power,
            alone_rps,
            warnings,
        )

    def _runners(self, load: Load, zero: int, end_ns: int, stop: Arrivals) -> list[loop.Runner]:
        return [
            loop.Runner(
                functools.partial(
                    self._loops[worker].drive,
                    None if arrivals is CLOSED_LOOP else arrivals + zero,
                    end_ns,
                    stop,
                ),
                stop,
            )
            for worker, arrivals in enumerate(load.arrivals)
        ]

    def _trace(self, load: Load, window: Window) -> KernelRecords:
        """The load once more from its start, only as long as the trace window, and recorded."""
        window_ns = round(window.trace_ms * 1e6)
        warmup_ns = round(min(window.warmup_seconds, _TRACE_WARMUP_S) * 1e9)
        # What arrived longer ago would all be served at once at the beginning.
        recent = tuple(
            None if arrivals is CLOSED_LOOP else arrivals[arrivals >= -warmup_ns]
            for arrivals in load.arrivals
        )
        stop = np.zeros(1, dtype=np.int64)
        self._device.gpu.make_current()  # in the caller's thread, for the tracer
        names = {kernel.name for one in self._captures for kernel in one.trace.kernels}
        with Tracer(names) as tracer:
            ids = {tracer.executable_id(handle): part for handle, part in self._placed.items()}
            zero = _now_ns() + warmup_ns
            again = dataclasses.replace(load, arrivals=recent)
            runners = self._runners(again, zero, zero + window_ns, stop)
            with _running(runners, stop):
                while _now_ns() < zero + window_ns and not stop[0]:
                    time.sleep(0.001)
            served = sum(len(runner.rows()) for runner in runners)
        if served and not any(span.executable in ids for span in tracer.spans):
            raise TracingError(f"CUPTI saw no kernel of {served} requests")
        return record_kernels(tracer.spans, ids, zero, window_ns)

    def _run_threads(
        self, runners: Sequence[loop.Runner], zero: int, end_ns: int, stop: Arrivals
    ) -> float:
        """Run all workers; the mean power between the first and the last energy tick inside."""
        with _running(runners, stop):
            power = mean_power_w(self._device.nvml, zero, end_ns, lambda: bool(stop[0]))
            while _now_ns() < end_ns and not stop[0]:
                time.sleep(0.001)
        return power


def _variants_of(plan: Plan, worker: int) -> int:
    return sum(worker in variant.active for variant in plan.variants)


@contextlib.contextmanager
def _running(runners: Sequence[loop.Runner], stop: Arrivals) -> Iterator[None]:
    """The workers' loops while the block lasts; at its end, or when it is interrupted, they stop
    after the request in flight. They use the session's graphs, so it waits for all of them."""
    try:
        for runner in runners:
            runner.start()
        yield
    finally:
        stop[0] = 1
        _join_all(runners)


def _join_all(runners: Sequence[loop.Runner]) -> None:
    """Wait for every loop, whatever else happens meanwhile; a second interrupt comes after."""
    try:
        for runner in runners:
            if runner.ident is not None:
                runner.join()
    except KeyboardInterrupt:
        _join_all(runners)
        raise


def _now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)
