"""Measuring a profile on a GPU: every kernel at every lane size.

Untraced replays give the request's time, which the profile closes against; traced ones (CUPTI) give
each kernel's busy time, its spread and the gap after it. Tracing stretches gaps, not kernels, so
the gaps are scaled to the rest of the untraced request. Tracing comes last, after all untraced
measurements. A kernel that does not fit a size (because of its clusters) is measured on the next
larger size that fits, and marked as illegal. Copies between host and device are timed alone, each
as a separate graph, because the tracer sees kernels only.

With torch for ROCm, rocm.py measures; this module is for NVIDIA.

The footprint is read where the memory is taken: weights, activations and workspaces by torch's
allocator during the capture (torch.py), executables by the driver's free memory around their
instantiation.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from eclip.capture import rocm
from eclip.capture.named import build
from eclip.capture.request_energy import request_energy_uj
from eclip.capture.torch import CapturedModule, capture, on_rocm
from eclip.core.copies import Copy
from eclip.core.device import Closing
from eclip.core.model_key import parse_model
from eclip.core.profile import Profile
from eclip.core.topology import Mask
from eclip.core.trace import with_traces
from eclip.cuda.device import CudaDevice
from eclip.cuda.driver import call, cu, free_memory
from eclip.cuda.graphs import (
    Executable,
    blocks_per_unit,
    fits,
    place_pieces,
    place_whole,
)
from eclip.cuda.lanes import GpuLane, LanePool
from eclip.cuda.stressors import Stressors
from eclip.cuda.tracer import Tracer
from eclip.devices import open_device
from eclip.errors import DeviceError, EclipError
from eclip.files import store
from eclip.gpu.pieces import KERNEL, CapturedGraph, Piece
from eclip.models.library import file_of
from eclip.models.spans import (
    close_spans,
    even_shares,
    fit_copies,
    refuse_slow_tracing,
    rows_of,
)

_WARMUPS = 3
_UNTRACED = 15
_TRACED = 7
_STRESS_BYTES = {"dram": 1 << 30, "l2": 24 << 20}


def measure_profile(
    device: Any,  # of the vendor that this torch is built for
    captured: CapturedModule,
    *,
    sizes: Sequence[int] | None = None,
    energy_seconds: float = 1.0,
    stress: bool = True,
) -> Profile:
    """The profile of a captured model. On ROCm ``stress`` has no effect."""
    if on_rocm():
        return rocm.measure_profile(
            device, captured.capture, captured.memory, sizes=sizes, energy_seconds=energy_seconds
        )
    return _measure_on_cuda(device, captured, sizes, energy_seconds, stress)


def _measure_on_cuda(
    device: CudaDevice,
    captured: CapturedModule,
    sizes: Sequence[int] | None,
    energy_seconds: float,
    stress: bool,
) -> Profile:
    topology, memory = device.topology, captured.memory
    wanted = tuple(sizes or topology.lane_sizes)
    graph = captured.capture.graph
    order = range(len(topology.slice_units))
    with ExitStack() as stack:
        pool = LanePool(device.slices, [topology.take(size, order) for size in wanted])
        stack.callback(pool.close)
        contexts: list[list[Any]] = []
        illegal: tuple[tuple[int, int], ...] = ()
        free_bytes = free_memory()
        if captured.capture.recapture is not None:
            placed = [_captured_on(captured.capture.recapture, lane, stack) for lane in pool.lanes]
        else:
            contexts, illegal = _legal_contexts(graph, pool.lanes)
            placed = [_placed(graph, row, stack) for row in contexts]
        runs = [(one.handle, lane.stream) for one, lane in zip(placed, pool.lanes, strict=True)]
        for executable, lane in zip(placed, pool.lanes, strict=True):
            executable.upload(lane.stream)
            call(cu.cuStreamSynchronize, lane.stream)
        # The driver takes memory in pieces larger than one executable may need: the mean of all.
        # Of a graph with a loop, the pool of its capture on the lane is in it, too.
        executables_bytes = max(0, free_bytes - free_memory()) // len(placed)
        device.gpu.quicken()
        request_ns = [_request_ns(handle, stream) for handle, stream in runs]
        energy_uj = [
            request_energy_uj(device.gpu, device.nvml, handle, stream, energy_seconds)
            for handle, stream in runs
            if energy_seconds > 0
        ]
        beside = _beside_stressors(device, graph) if stress and not graph.atomic else {}
        alone = _copies(graph, contexts[-1], pool.lanes[-1], stack) if contexts else []
        # Loops turn as often as the data asks for, so their kernels have no fixed place in a trace.
        names = [kernel.name for kernel in captured.capture.trace.kernels]
        spans = None if graph.atomic else _trace(runs, names)
    if spans is None:
        copies: tuple[Copy, ...] = ()
        busy, gap, spread = even_shares(request_ns, graph.kernel_count)
    else:
        refuse_slow_tracing(spans, np.array(request_ns))
        copies = fit_copies(alone, spans, np.array(request_ns))
        busy, gap, spread = close_spans(spans, np.array(request_ns), copies)
    trace = captured.capture.trace
    return Profile(
        trace=trace,
        fingerprint=msgspec.structs.replace(
            with_traces(topology.fingerprint, [trace]),
            driver=device.nvml.driver(),
            libraries=trace.libraries,
        ),
        modelled=False,
        source=f"measured on {topology.title} on {time.strftime('%Y-%m-%d')}",
        sizes=wanted,
        request_ns=tuple((busy + gap).sum(axis=0).astype(np.int64).tolist()),
        busy_ns=rows_of(busy),
        gap_ns=rows_of(gap),
        spread_ns=rows_of(spread),
        dram_bytes=(0,) * graph.kernel_count,
        l2_bytes=(0,) * graph.kernel_count,
        blocks_per_unit=tuple(blocks_per_unit(node) for node in graph.nodes if node.kind == KERNEL),
        footprint=None if memory is None else memory.footprint(executables_bytes),
        illegal=illegal,
        energy_uj=tuple(energy_uj),
        slowdown_beside=beside,
        copies=copies,
    )


def _captured_on(
    recapture: Callable[[Any], tuple[int, Closing]], lane: GpuLane, owner: ExitStack
) -> Executable:
    raw, again = recapture(lane.stream)
    owner.callback(again.close)
    return _owned(Executable(cu.CUgraph(raw)), owner)


def _placed(graph: CapturedGraph, contexts: Sequence[Any], owner: ExitStack) -> Executable:
    return _owned(place_whole(graph, contexts), owner)


def _owned(executable: Executable, owner: ExitStack) -> Executable:
    owner.callback(executable.close)
    return executable


def _legal_contexts(
    graph: CapturedGraph, lanes: Sequence[GpuLane]
) -> tuple[list[list[Any]], tuple[tuple[int, int], ...]]:
    """Per size the context of every kernel, and the (kernel, size) pairs that had to move up."""
    illegal = []
    contexts: list[list[Any]] = [[] for _ in lanes]
    for kernel, node in enumerate(node for node in graph.nodes if node.kind == KERNEL):
        legal = [fits(node, lane.stream) for lane in lanes]
        for index, lane in enumerate(lanes):
            if legal[index]:
                contexts[index].append(lane.context)
                continue
            larger = [above for above in range(index + 1, len(lanes)) if legal[above]]
            if not larger:
                raise DeviceError(f"kernel {kernel} fits no lane of this GPU")
            contexts[index].append(lanes[larger[0]].context)
            illegal.append((kernel, index))
    return contexts, tuple(illegal)


def _request_ns(handle: Any, stream: Any) -> float:
    begin, end = (call(cu.cuEventCreate, 0) for _ in range(2))
    times = []
    for repeat in range(_WARMUPS + _UNTRACED):
        call(cu.cuEventRecord, begin, stream)
        call(cu.cuGraphLaunch, handle, stream)
        call(cu.cuEventRecord, end, stream)
        call(cu.cuStreamSynchronize, stream)
        if repeat >= _WARMUPS:
            times.append(call(cu.cuEventElapsedTime, begin, end) * 1e6)
    for event in (begin, end):
        call(cu.cuEventDestroy, event)
    return float(np.median(times))


def _copies(
    graph: CapturedGraph, contexts: Sequence[Any], lane: GpuLane, owner: ExitStack
) -> list[Copy]:
    """The copies between host and device, with their times alone."""
    places = [place for place, node in enumerate(graph.nodes) if node.copy_bytes]
    if not places:
        return []
    pieces = [Piece(range(0), (place,)) for place in places]
    made = [_owned(executable, owner) for executable in place_pieces(graph, contexts, pieces)]
    copies = []
    for place, executable in zip(places, made, strict=True):
        node = graph.nodes[place]
        copies.append(
            Copy(
                before=sum(earlier.kind == KERNEL for earlier in graph.nodes[:place]),
                to_device=node.to_device,
                bytes=node.copy_bytes,
                ns=round(_request_ns(executable.handle, lane.stream)),
            )
        )
    return copies


def _trace(runs: Sequence[tuple[Any, Any]], names: Sequence[str]) -> npt.NDArray[np.int64]:
    """Start and end of every kernel: size × repeat × kernel × 2, nanoseconds."""
    with Tracer(names) as tracer:
        for handle, stream in runs:
            for _ in range(_TRACED):
                call(cu.cuGraphLaunch, handle, stream)
                call(cu.cuStreamSynchronize, stream)
    expected = len(runs) * _TRACED * len(names)
    if len(tracer.spans) != expected:
        raise DeviceError(f"CUPTI recorded {len(tracer.spans)} kernels instead of {expected}")
    times = [(span.start_ns, span.end_ns) for span in tracer.spans]
    return np.array(times, dtype=np.int64).reshape(len(runs), _TRACED, len(names), 2)


def _beside_stressors(device: CudaDevice, graph: CapturedGraph) -> dict[str, float]:
    """The slowdown of a request on half the slices, beside each stressor on the other half."""
    slices = len(device.topology.slice_units)
    halves = [Mask(range(slices // 2)), Mask(range(slices // 2, slices))]
    slowdown = {}
    with ExitStack() as stack:
        pool = LanePool(device.slices, [*halves, device.topology.full])
        stack.callback(pool.close)
        mine, other, whole = pool.lanes
        (contexts, _), _ = _legal_contexts(graph, [mine, whole])
        executable = place_whole(graph, contexts)
        stack.callback(executable.close)
        stressors = Stressors(device.gpu)
        stack.callback(stressors.close)
        device.gpu.quicken()
        alone_ns = _request_ns(executable.handle, mine.stream)
        blocks = 2 * device.topology.units_of(halves[1])
        for name, size in _STRESS_BYTES.items():
            data = torch.ones(size, dtype=torch.uint8, device="cuda")

            def stress(rounds: int, name: str = name, data: torch.Tensor = data) -> None:
                words = data.numel() // 16
                stressors.launch(name, other.stream, blocks, 1024, data.data_ptr(), words, rounds)

            torch.cuda.synchronize()
            stress(1)
            call(cu.cuStreamSynchronize, other.stream)
            began = time.perf_counter()
            stress(10)
            call(cu.cuStreamSynchronize, other.stream)
            round_ns = (time.perf_counter() - began) * 1e8
            # Long enough for all repeats at eight times their time alone.
            stress(round(8 * (_WARMUPS + _UNTRACED) * alone_ns / round_ns) + 10)
            beside_ns = _request_ns(executable.handle, mine.stream)
            if cu.cuStreamQuery(other.stream)[0] == cu.CUresult.CUDA_SUCCESS:
                raise DeviceError(f"the {name} stressor ended before the requests beside it")
            slowdown[name] = beside_ns / alone_ns
            call(cu.cuStreamSynchronize, other.stream)
            del data
            torch.cuda.empty_cache()
    return slowdown


def _main(
    gpu: int, energy_seconds: float, folder: Path, keys: Sequence[str], *, quick: bool
) -> None:
    """The child of ``eclip profile``: prints a line when ready, and a line per finished model."""
    if torch.version.hip is None and torch.version.cuda is None:
        raise DeviceError(
            f"torch {torch.__version__} is built for CPUs only; install its build for this GPU "
            f"(ROCm for AMD, CUDA for NVIDIA)"
        )
    device: Any = open_device(f"{'hip' if on_rocm() else 'cuda'}:{gpu}")
    torch.cuda.set_device(gpu)
    others = device.counter.other_processes() if device.counter is not None else []
    if others:
        raise DeviceError(
            f"other processes use GPU {gpu} ({', '.join(map(str, others))}); profiles measured "
            f"beside them would be wrong. Stop them first"
        )
    if not on_rocm():
        Tracer([])  # raises now if CUPTI is missing
    _tell("ready")
    for key in keys:
        model = parse_model(key)
        module, inputs = build(model)
        captured = capture(module, inputs, model)
        profile = measure_profile(device, captured, energy_seconds=energy_seconds, stress=not quick)
        del module, inputs, captured
        torch.cuda.empty_cache()
        store.save(profile, file_of(folder, model))
        _tell(f"done {key}")


def _tell(word: str) -> None:
    """Send ``word`` to the parent, with the size of stderr: later output is of the next model."""
    sys.stderr.flush()
    print(word, os.fstat(sys.stderr.fileno()).st_size, flush=True)


if __name__ == "__main__":
    try:
        gpu, energy_seconds, kind, folder, *keys = sys.argv[1:]
        _main(int(gpu), float(energy_seconds), Path(folder), keys, quick=kind == "quick")
    except EclipError as error:
        sys.exit(f"eclip: {error}")
