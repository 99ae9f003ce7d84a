"""Measuring mechanisms on the GPU at hand, and the machine file that is fitted to them.

A request is timed as a user meets it: its input has just been written, and nothing else is queued.
The host's launch is hidden behind a short wait on the device, so that times are the device's own.

Two graphs of one stage need not be equally fast: of those with a loop every other one took 2.4 us
longer on an H200, with any capacity. A point is therefore a mean over several graphs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, cast

import msgspec
import torch

from eclip.capture.torch import libraries
from eclip.core.device import Closing
from eclip.cuda.device import CudaDevice
from eclip.cuda.driver import call, cu
from eclip.devices import open_device
from eclip.errors import DeviceError
from eclip.files.machine import GpuStage, Machine
from eclip.varout import gpu_model
from eclip.varout.cuda.stage import DOUBLED, Compaction, built
from eclip.varout.gpu_model import Sample
from eclip.varout.mechanisms import Mechanism

REPEATS = 24  # requests of a point, over all its graphs
BUILDS = 4  # graphs of a stage with a loop
SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24, 1 << 26)  # inputs: caches, then memory
_MOST_NS = 20e6  # of all repeats of a point: a loop of a thousand turns needs no twenty
_HIDING_CYCLES = 60_000  # 30 us: a graph is launched in less
_SMALLEST = 1024  # inputs of a request that is all fixed cost
_SHARES = (0.0, 0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0)  # lengths over inputs
_CAPACITY_SHARES = (1 / 256, 1 / 64, 1 / 16, 1 / 4)
_ONE_CAPACITY = (Mechanism.EXACT, Mechanism.MAXIMUM, Mechanism.MERGE)  # none to vary
# Loops are built often and have few constants of their own, so fewer points suffice.
_LOOPING = (*DOUBLED, Mechanism.SWAP)
_LOOPING_SHARES = (0.0, 0.005, 0.02, 0.05, 0.25, 1.0)
_LOOPING_CAPACITY_SHARES = (1 / 256, 1 / 64, 1 / 4)
_BUILDS = {Mechanism.RESIDENT: 2} | dict.fromkeys(_LOOPING, BUILDS)
_LONG_NS = 200e3  # of a request: differences between graphs are negligible from here on


def data_of(inputs: int, length: int, seed: int = 0) -> torch.Tensor:
    """Data of ``inputs`` elements, with ``length`` nonzero elements at random places."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.rand(inputs, device="cuda", generator=generator) + 0.5
    out = torch.randperm(inputs, device="cuda", generator=generator)[length:]
    x[out] = 0.0
    return x


class Timed(Closing):
    """A stage whose input is written before each request; only the request is timed."""

    def __init__(
        self,
        mechanism: Mechanism,
        capacity: int,
        inputs: int,
        stream: Any,
        apply: str = "2.0f * v + 1.0f",
    ) -> None:
        self.x = torch.zeros(inputs, device="cuda")
        self.y = torch.zeros_like(self.x)
        self.stage = Compaction(self.x, self.y, mechanism, capacity, apply=apply)
        self._stream = stream
        self._torch_stream = torch.cuda.ExternalStream(int(stream))
        self._owner = ExitStack()
        self._begin, self._end = (call(cu.cuEventCreate, 0) for _ in range(2))
        for event in (self._begin, self._end):
            self._owner.callback(call, cu.cuEventDestroy, event)
        self._graph = self._owner.enter_context(ExitStack())
        self.rebuild()

    def rebuild(self) -> None:
        """Another graph of the same stage."""
        self._graph.close()
        self._executable = self._graph.enter_context(built(self.stage, self._stream))

    def request_ns(self, given: torch.Tensor) -> float:
        with torch.cuda.stream(self._torch_stream):
            torch.cuda._sleep(_HIDING_CYCLES)
            self.x.copy_(given)
        call(cu.cuEventRecord, self._begin, self._stream)
        call(cu.cuGraphLaunch, self._executable.handle, self._stream)
        call(cu.cuEventRecord, self._end, self._stream)
        call(cu.cuStreamSynchronize, self._stream)
        return float(call(cu.cuEventElapsedTime, self._begin, self._end)) * 1e6

    def time_ns(self, given: torch.Tensor) -> float:
        """The time of the median request, as a mean over ``builds`` graphs."""
        builds = _BUILDS.get(self.stage.mechanism, 1)
        found = [self._median_ns(given, builds)]
        while len(found) < builds and found[0] < _LONG_NS:
            self.rebuild()
            found.append(self._median_ns(given, builds))
        return statistics.fmean(found)

    def _median_ns(self, given: torch.Tensor, builds: int) -> float:
        for _ in range(3):
            warm = self.request_ns(given)
        repeats = max(3, min(REPEATS // builds, round(_MOST_NS / warm)))
        return statistics.median(self.request_ns(given) for _ in range(repeats))

    def close(self) -> None:
        self._owner.close()


def measure(
    mechanism: Mechanism,
    capacity: int,
    given: torch.Tensor,
    length: int,
    stream: Any,
    apply: str = "2.0f * v + 1.0f",
) -> Sample:
    """One point: a stage built, timed, and checked against the plain result."""
    known = max(1, length) if mechanism is Mechanism.EXACT else capacity
    torch.cuda.synchronize()  # ``given`` is written now
    with Timed(mechanism, known, len(given), stream, apply) as timed:
        found = timed.time_ns(given)
    if timed.stage.count() != length or not torch.equal(timed.y != 0, given != 0):
        raise DeviceError(f"{mechanism.value} gave a wrong result; its time means nothing")
    return Sample(mechanism, capacity, length, found)


def measure_stage(inputs: int, stream: Any) -> tuple[GpuStage, int]:
    """The constants for ``inputs`` inputs, and the number of fitted points."""
    samples = []
    for part in _SHARES:
        length = round(part * inputs)
        given = data_of(inputs, length)
        for mechanism in Mechanism:
            for share in _capacity_shares(mechanism, part):
                capacity = max(2, round(share * inputs))
                samples.append(measure(mechanism, capacity, given, length, stream))
    nothing = data_of(_SMALLEST, 0)
    stage = gpu_model.fit(
        samples,
        inputs=inputs,
        word_bytes=8,
        node_ns=measure(Mechanism.EXACT, 1, nothing, 0, stream).time_ns / 2,
        merge_base_ns=measure(Mechanism.MERGE, 1, nothing, 0, stream).time_ns,
        consume_share=0.5,
        largest_ratio=1.0,
    )
    return stage, len(samples)


def _capacity_shares(mechanism: Mechanism, part: float) -> Sequence[float]:
    """The capacities that a mechanism is measured at, if its output is such a part of the input."""
    if mechanism in _LOOPING:
        return _LOOPING_CAPACITY_SHARES if part in _LOOPING_SHARES else ()
    return _CAPACITY_SHARES[:1] if mechanism in _ONE_CAPACITY else _CAPACITY_SHARES


def measure_machine(
    gpu: int = 0,
    inputs: int = 1 << 20,
    sizes: Sequence[int] = SIZES,
    progress: Callable[[float], None] = lambda share: None,
) -> Machine:
    """A machine file for this GPU, from points of every mechanism on all its units."""
    with ExitStack() as stack:
        device = cast(CudaDevice, open_device(f"cuda:{gpu}"))
        stack.callback(device.close)
        torch.cuda.set_device(gpu)
        stream = call(cu.cuStreamCreate, cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
        stack.callback(call, cu.cuStreamDestroy, stream)
        wanted = sorted({inputs, *sizes})
        stages, points = {}, 0
        for index, size in enumerate(wanted):
            stages[size], count = measure_stage(size, stream)
            progress((index + 1) / len(wanted))
            points += count
        topology = device.topology
        return Machine(
            name=topology.name,
            title=f"{topology.title}: compaction of {inputs} elements and a consumer",
            modelled=False,
            source=f"fitted to {points} measured points at {len(wanted)} sizes, median of up to "
            f"{REPEATS} requests each, their input just written, over {BUILDS} graphs of a loop",
            fingerprint=msgspec.structs.replace(
                topology.fingerprint, device=device.gpu.name, libraries=libraries()
            ),
            gpu=stages.pop(inputs),
            sizes=tuple(stages.values()),
        )
