"""Torch's builds for ROCm: captures read through HIP, profiles by torch.profiler.

A profile is made as on NVIDIA: untraced replays give the request's time, traced ones each kernel's.
torch.profiler records kernels with name, start and duration; the grid is there only for kernels
that were launched one by one, not by a graph. How many blocks of a kernel a unit holds is bounded
by its threads, not asked. This module is written from torch's and kineto's sources and has not run
on an AMD GPU (docs/amd.md). Torch is heavy and imported where kernels are recorded.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from eclip.capture.memory import CaptureMemory
from eclip.capture.request_energy import request_energy_uj
from eclip.core.plan import Lane
from eclip.core.profile import Profile
from eclip.core.program import on_one_lane
from eclip.core.trace import Kernel, with_traces
from eclip.errors import DeviceError
from eclip.gpu.closing import Releases
from eclip.gpu.executables import Capture, Executables
from eclip.gpu.pieces import CapturedGraph
from eclip.hip.api import Hip
from eclip.hip.device import HipDevice
from eclip.hip.graphs import HipGraph
from eclip.models.spans import close_spans, even_shares, refuse_slow_tracing, rows_of

_WARMUPS = 3
_UNTRACED = 15
_TRACED = 7
# Memsets and copies of a graph run as kernels of HIP's own (rocclr, device/blitcl.cpp).
_OF_HIP_ITSELF = "__amd_rocclr_"


class KernelRecord(NamedTuple):
    start_ns: int
    end_ns: int
    name: str
    grid: tuple[int, ...] | None  # None: not told


def read_graph(raw: int) -> tuple[CapturedGraph, tuple[Kernel, ...]]:
    """The graph that torch captured, and its kernels, read through torch's own HIP library."""
    hip = Hip()
    graph = HipGraph(hip, raw)
    return graph, graph.kernels(hip)


def read_records(trace: str) -> list[KernelRecord]:
    """The kernels of a trace that torch.profiler wrote, in order of start.

    Times are microseconds with three decimals. Of a run that takes days, a float would lose them.
    """
    found = []
    for event in json.loads(trace, parse_float=Decimal)["traceEvents"]:
        if event.get("cat") != "kernel" or event["name"].startswith(_OF_HIP_ITSELF):
            continue
        start_ns = round(event["ts"] * 1000)
        grid = event.get("args", {}).get("grid")
        found.append(
            KernelRecord(
                start_ns,
                start_ns + round(event["dur"] * 1000),
                event["name"],
                None if grid is None else tuple(grid),
            )
        )
    return sorted(found, key=lambda record: record.start_ns)


def spans_of(
    records: Sequence[KernelRecord], kernels: Sequence[Kernel], launches: int
) -> npt.NDArray[np.int64]:
    """Start and end of every kernel of every launch: launch × kernel × 2.

    A kernel's name is demangled in the records and not in the capture, so launches are held against
    each other, and grids against the capture where they are told.
    """
    if len(records) != launches * len(kernels):
        raise DeviceError(
            f"torch.profiler recorded {len(records)} kernels instead of {launches * len(kernels)} "
            f"({launches} launches of {len(kernels)}); profile again on an idle GPU, or update ROCm"
        )
    for index, record in enumerate(records):
        first, kernel = records[index % len(kernels)], kernels[index % len(kernels)]
        if record.name != first.name or record.grid not in (None, kernel.grid):
            raise DeviceError(
                f"torch.profiler recorded {record.name} where the model launches {kernel.name}; "
                f"profile again on an idle GPU"
            )
    times = [(record.start_ns, record.end_ns) for record in records]
    return np.array(times, dtype=np.int64).reshape(launches, len(kernels), 2)


def record_by_torch(work: Callable[[], None]) -> list[KernelRecord]:
    """The kernels that the work launches and waits for."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:  # ROCm's, too
        work()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        return read_records(path.read_text())


def measure_profile(
    device: HipDevice,
    capture: Capture,
    memory: CaptureMemory | None,
    *,
    sizes: Sequence[int] | None = None,
    energy_seconds: float = 1.0,
    record: Callable[[Callable[[], None]], Sequence[KernelRecord]] = record_by_torch,
) -> Profile:
    topology, trace, kernels = device.topology, capture.trace, capture.trace.kernels
    wanted = tuple(sizes or topology.lane_sizes)
    order = range(len(topology.slice_units))
    with closing(Releases()) as owner:
        placer = device.place_lanes([Lane(0, topology.take(size, order)) for size in wanted], owner)
        executables = Executables([capture], placer)
        free_bytes = device.gpu.free_memory()
        steps = [
            executables.segments(on_one_lane(0, len(kernels), lane), owner)
            for lane in range(len(wanted))
        ]
        runs = [(int(one.first[0]), one.stream) for one in steps]  # one graph each
        executables_bytes = max(0, free_bytes - device.gpu.free_memory()) // len(runs)
        hip = device.gpu.hip
        request_ns = [_request_ns(hip, executable, stream) for executable, stream in runs]
        energy_uj = [
            request_energy_uj(device.gpu, device.counter, executable, stream, energy_seconds)
            for executable, stream in runs
            if energy_seconds > 0 and device.counter is not None
        ]

        def replay() -> None:
            for executable, stream in runs:
                for _ in range(_TRACED):
                    hip.call("hipGraphLaunch", executable, stream)
                    device.gpu.wait_for(stream)

        if capture.graph.atomic:  # copies may appear as kernels, so spans are ambiguous
            busy, gap, spread = even_shares(request_ns, len(kernels))
        else:
            spans = spans_of(record(replay), kernels, len(runs) * _TRACED)
            spans = spans.reshape(len(runs), _TRACED, len(kernels), 2)
            refuse_slow_tracing(spans, np.array(request_ns))
            busy, gap, spread = close_spans(spans, np.array(request_ns))
    return Profile(
        trace=trace,
        fingerprint=msgspec.structs.replace(
            with_traces(topology.fingerprint, [trace]),
            driver=device.driver,
            libraries=trace.libraries,
        ),
        modelled=False,
        source=f"measured on {topology.title} on {time.strftime('%Y-%m-%d')}",
        sizes=wanted,
        request_ns=tuple((busy + gap).sum(axis=0).astype(np.int64).tolist()),
        busy_ns=rows_of(busy),
        gap_ns=rows_of(gap),
        spread_ns=rows_of(spread),
        dram_bytes=(0,) * len(kernels),
        l2_bytes=(0,) * len(kernels),
        blocks_per_unit=tuple(
            max(1, device.gpu.build.unit_threads // int(np.prod(kernel.block)))
            for kernel in kernels
        ),
        footprint=None if memory is None else memory.footprint(executables_bytes),
        energy_uj=tuple(energy_uj),
    )


def _request_ns(hip: Hip, executable: int, stream: int) -> float:
    """The median of replays, by events around them."""
    with closing(Releases()) as owner:
        begin, end = (hip.made("hipEventCreateWithFlags", 0) for _ in range(2))
        for event in (begin, end):
            owner.callback(hip.call, "hipEventDestroy", event)
        times = []
        for repeat in range(_WARMUPS + _UNTRACED):
            hip.call("hipEventRecord", begin, stream)
            hip.call("hipGraphLaunch", executable, stream)
            hip.call("hipEventRecord", end, stream)
            hip.call("hipStreamSynchronize", stream)
            if repeat >= _WARMUPS:
                times.append(hip.elapsed_ns(begin, end))
    return float(np.median(times))
