"""The cost of lanes on this GPU, and interference between kernels: the paper's characterisation.

Only synthetic kernels (``stressors.cu``) are used, so that figures depend on the device alone.
Every figure is a median; times come from CUDA events on the lane that finishes last.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import msgspec
import numpy as np

from eclip.core.topology import Mask
from eclip.cuda.driver import Gpu, call, cu
from eclip.cuda.graphs import CudaGraph, place_segments, place_whole
from eclip.cuda.lanes import GpuLane, LanePool, Slices
from eclip.cuda.stressors import Stressors
from eclip.errors import DeviceError
from eclip.gpu import worker_loop
from eclip.gpu.steps import LAUNCH, whole_request

_CHAIN = 100  # kernels
_SHORT_ROUNDS = 20
_REPEATS = 11
_BUFFER_BYTES = 1 << 30
_RELATIONS = {
    "same": (Mask(range(7)), Mask(range(7))),
    "nested": (Mask(range(14)), Mask(range(7))),
    "overlapping": (Mask(range(7)), Mask(range(4, 11))),
    "disjoint": (Mask(range(7)), Mask(range(7, 14))),
}
# Bytes of each class, and rounds that make launches of all classes about equally long.
_CLASSES = {"fma": (1 << 20, 300), "dram": (1 << 29, 1), "l2": (24 << 20, 12)}


class LaneFigure(msgspec.Struct, frozen=True, kw_only=True):
    table: str
    row: str
    column: str
    value: float
    unit: str


def characterise(gpu: int, progress: Callable[[float], None]) -> list[LaneFigure]:
    parts: list[Callable[[int], list[LaneFigure]]] = [
        _lane_creation,
        _switch_cost,
        _pair_slowdown,
        _lanes_in_use,
    ]
    figures = []
    for index, part in enumerate(parts):
        figures += part(gpu)
        progress((index + 1) / len(parts))
    return figures


class _Bench:
    """Lanes, stressors and a buffer for one experiment; released together."""

    def __init__(self, gpu: int, masks: Sequence[Mask], connections: int | None = None) -> None:
        self._stack = ExitStack()
        try:
            self.gpu = Gpu(gpu) if connections is None else Gpu(gpu, connections)
            self._stack.callback(self.gpu.close)
            slices = Slices(self.gpu)
            self._stack.callback(slices.close)
            pool = LanePool(slices, masks)
            self._stack.callback(pool.close)
            self.lanes: list[GpuLane] = pool.lanes
            self.stressors = Stressors(self.gpu)
            self._stack.callback(self.stressors.close)
            self.buffer = int(call(cu.cuMemAlloc, _BUFFER_BYTES))
            self._stack.callback(call, cu.cuMemFree, self.buffer)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> _Bench:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def short(self, stream: Any) -> None:
        """A kernel that fits any lane and takes longer than Python takes to launch the next."""
        self.stressors.launch("fma", stream, 8, 128, self.buffer, 0, _SHORT_ROUNDS)

    def hog(self, name: str, stream: Any) -> None:
        size, rounds = _CLASSES[name]
        self.stressors.launch(name, stream, 112, 1024, self.buffer, size // 16, rounds)

    def capture(self, kernels: int, launch: Callable[[Any], None]) -> tuple[Any, CudaGraph]:
        """A chain of equal launches as a captured graph; the caller destroys the graph."""
        stream = call(cu.cuStreamCreate, cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        call(cu.cuStreamBeginCapture, stream, mode)
        for _ in range(kernels):
            launch(stream)
        graph = call(cu.cuStreamEndCapture, stream)
        call(cu.cuStreamDestroy, stream)
        return graph, CudaGraph(int(graph))


def _median_us(launch: Callable[[], None], first: Any, last: Any) -> float:
    """GPU time of a launch that begins on one stream and ends on another."""
    begin, end = (call(cu.cuEventCreate, 0) for _ in range(2))
    times = []
    for repeat in range(_REPEATS + 2):
        call(cu.cuEventRecord, begin, first)
        launch()
        call(cu.cuEventRecord, end, last)
        call(cu.cuEventSynchronize, end)
        if repeat >= 2:
            times.append(call(cu.cuEventElapsedTime, begin, end) * 1e3)
    for event in (begin, end):
        call(cu.cuEventDestroy, event)
    return float(np.median(times))


def _lane_creation(gpu: int) -> list[LaneFigure]:
    with _Bench(gpu, []) as bench:
        slices = Slices(bench.gpu)
        times = []
        for count in range(1, 15):
            began = time.perf_counter()
            pool = LanePool(slices, [Mask(range(count))])
            made = time.perf_counter()
            pool.close()
            times.append((made - began, time.perf_counter() - made))
        create, destroy = np.median(np.array(times), axis=0) * 1e3
    table = "Lane"
    return [
        LaneFigure(table=table, row="one lane", column="make", value=float(create), unit="ms"),
        LaneFigure(table=table, row="one lane", column="release", value=float(destroy), unit="ms"),
    ]


def _switch_cost(gpu: int) -> list[LaneFigure]:
    """The time that each switch adds to a chain which changes its lane after every kernel."""
    figures = []
    for relation, masks in _RELATIONS.items():
        with _Bench(gpu, masks) as bench, ExitStack() as stack:
            here, there = bench.lanes
            graph, captured = bench.capture(_CHAIN, bench.short)
            stack.callback(call, cu.cuGraphDestroy, graph)
            turns = [here if index % 2 == 0 else there for index in range(_CHAIN)]
            event = call(cu.cuEventCreate, cu.CUevent_flags.CU_EVENT_DISABLE_TIMING)
            stack.callback(call, cu.cuEventDestroy, event)
            whole = place_whole(captured, [lane.context for lane in turns])
            stack.callback(whole.close)
            plain = place_whole(captured, [here.context] * _CHAIN)
            stack.callback(plain.close)
            contexts = [lane.context for lane in turns]
            segments = []
            each = [range(index, index + 1) for index in range(_CHAIN)]
            for segment in place_segments(captured, contexts, each):
                stack.callback(segment.close)
                segments.append(segment.handle)

            def eager(bench: _Bench = bench, turns: list[GpuLane] = turns, e: Any = event) -> None:
                for index, lane in enumerate(turns):
                    if index:
                        call(cu.cuEventRecord, e, turns[index - 1].stream)
                        call(cu.cuStreamWaitEvent, lane.stream, e, 0)
                    bench.short(lane.stream)

            def eager_plain(bench: _Bench = bench, lane: GpuLane = here) -> None:
                for _ in range(_CHAIN):
                    bench.short(lane.stream)

            def chained(
                turns: list[GpuLane] = turns, handles: list[Any] = segments, e: Any = event
            ) -> None:
                for index, lane in enumerate(turns):
                    if index:
                        call(cu.cuEventRecord, e, turns[index - 1].stream)
                        call(cu.cuStreamWaitEvent, lane.stream, e, 0)
                    call(cu.cuGraphLaunch, handles[index], lane.stream)

            def launch(handle: Any, lane: GpuLane = here) -> Callable[[], None]:
                return lambda: call(cu.cuGraphLaunch, handle, lane.stream)

            base_us = _median_us(launch(plain.handle), here.stream, here.stream)
            eager_us = _median_us(eager_plain, here.stream, here.stream)
            ways = {
                "eager": _median_us(eager, here.stream, there.stream) - eager_us,
                "one graph": _median_us(launch(whole.handle), here.stream, here.stream) - base_us,
                "segments": _median_us(chained, here.stream, there.stream) - base_us,
            }
            figures += [
                LaneFigure(
                    table="Lane switch",
                    row=relation,
                    column=way,
                    value=extra / (_CHAIN - 1),
                    unit="µs",
                )
                for way, extra in ways.items()
            ]
    return figures


def _pair_slowdown(gpu: int) -> list[LaneFigure]:
    """How much longer a kernel takes while one of another class loops beside it."""
    figures = []
    for relation in ("same", "overlapping", "disjoint"):
        with _Bench(gpu, _RELATIONS[relation]) as bench, ExitStack() as stack:
            mine, other = bench.lanes

            def time_us(name: str, bench: _Bench = bench, lane: GpuLane = mine) -> float:
                return _median_us(partial(bench.hog, name, lane.stream), lane.stream, lane.stream)

            alone = {name: time_us(name) for name in _CLASSES}
            for neighbour in _CLASSES:
                # Launched over and over: one long kernel would not let the other in at all.
                graph, captured = bench.capture(1, partial(bench.hog, neighbour))
                stack.callback(call, cu.cuGraphDestroy, graph)
                executable = place_whole(captured, [other.context])
                stack.callback(executable.close)
                with worker_loop.Repeater(bench.gpu, executable.handle, other.stream):
                    beside = {name: time_us(name) for name in _CLASSES}
                figures += [
                    LaneFigure(
                        table=f"Slowdown of the row beside the column, {relation} units",
                        row=name,
                        column=neighbour,
                        value=beside[name] / alone[name],
                        unit="×",
                    )
                    for name in _CLASSES
                ]
    return figures


def _lanes_in_use(gpu: int) -> list[LaneFigure]:
    """Latency of short kernels against lanes in use; each setting needs a fresh process."""
    figures = []
    for connections in (8, 32):
        command = [sys.executable, "-m", "eclip.cuda.characterise"]
        done = subprocess.run(
            [*command, str(gpu), str(connections)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=_without_connections(),
        )
        if done.returncode != 0:
            raise DeviceError(f"the lanes experiment failed: {done.stderr.strip()[-200:]}")
        for lanes, latency_us in json.loads(done.stdout):
            figures.append(
                LaneFigure(
                    table="Latency of 20 short kernels against lanes in use",
                    row=f"{lanes} lanes",
                    column=f"{connections} connections",
                    value=latency_us,
                    unit="µs",
                )
            )
    return figures


def _without_connections() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if "MAX_CONNECTIONS" not in name}


def _measure_lanes(gpu: int, connections: int) -> list[tuple[int, float]]:
    most = 14  # a slice each, and a core each for the threads that wait
    found = []
    with _Bench(gpu, [Mask([index]) for index in range(most)], connections) as bench:
        graph, captured = bench.capture(20, bench.short)
        executables = [place_whole(captured, [lane.context] * 20) for lane in bench.lanes]
        for lanes in (1, 2, 4, 7, 8, 9, 12, 14):
            stop = np.zeros(1, dtype=np.int64)
            workers = []
            for index in range(lanes):
                launch = (LAUNCH, executables[index].handle, bench.lanes[index].stream)
                workers.append(worker_loop.WorkerLoop(bench.gpu, whole_request(launch)))
            runners = [
                worker_loop.Runner(partial(worker.drive, stop=stop), stop) for worker in workers
            ]
            for runner in runners:
                runner.start()
            time.sleep(0.15)
            stop[0] = 1
            rows = np.concatenate([runner.rows()[5:] for runner in runners])
            found.append((lanes, float(np.median(rows[:, 2] - rows[:, 1])) / 1e3))
        for executable in executables:
            executable.close()
        call(cu.cuGraphDestroy, graph)
    return found


if __name__ == "__main__":
    print(json.dumps(_measure_lanes(int(sys.argv[1]), int(sys.argv[2]))))
