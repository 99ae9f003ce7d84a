"""Measuring mechanisms on the GPU at hand, and the machine file that is fitted to them."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import msgspec
import torch

from eclip.devices.cuda.device import CudaDevice
from eclip.devices.cuda.driver import call, cu
from eclip.devices.cuda.graphs import Executable
from eclip.errors import DeviceError
from eclip.frontends.torch import libraries
from eclip.machine import Machine
from eclip.varout import gpu_model
from eclip.varout.cuda.stage import Compaction, built
from eclip.varout.gpu_model import Sample
from eclip.varout.mechanisms import Mechanism

REPEATS = 30
_SHARES = (0.0, 0.001, 0.01, 0.05, 0.2, 0.5, 1.0)  # lengths over inputs
_CAPACITY_SHARES = (1 / 256, 1 / 64, 1 / 16, 1 / 4)


def data_of(inputs: int, length: int, seed: int = 0) -> torch.Tensor:
    """So many elements that are not zero, anywhere."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.rand(inputs, device="cuda", generator=generator) + 0.5
    out = torch.randperm(inputs, device="cuda", generator=generator)[length:]
    x[out] = 0.0
    return x


def time_graph_ns(executable: Executable, stream: Any, repeats: int = REPEATS) -> float:
    """The median time of a launch, by events around it; the first ones warm up."""
    begin, end = (call(cu.cuEventCreate, 0) for _ in range(2))
    times = []
    try:
        for repeat in range(repeats + 5):
            call(cu.cuEventRecord, begin, stream)
            call(cu.cuGraphLaunch, executable.handle, stream)
            call(cu.cuEventRecord, end, stream)
            call(cu.cuStreamSynchronize, stream)
            if repeat >= 5:
                times.append(float(call(cu.cuEventElapsedTime, begin, end)) * 1e6)
    finally:
        call(cu.cuEventDestroy, begin)
        call(cu.cuEventDestroy, end)
    return statistics.median(times)


def measure(
    mechanism: Mechanism,
    capacity: int,
    inputs: int,
    length: int,
    stream: Any,
    apply: str = "2.0f * v + 1.0f",
) -> Sample:
    """One point: a stage built, checked against the plain result, and timed."""
    x = data_of(inputs, length)
    y = torch.zeros_like(x)
    known = max(1, length) if mechanism is Mechanism.EXACT else capacity
    stage = Compaction(x, y, mechanism, known, apply=apply)
    with built(stage, stream) as executable:
        found = time_graph_ns(executable, stream)
    if stage.count() != length or not torch.equal(y != 0, x != 0):
        raise DeviceError(f"{mechanism.value} gave a wrong result; its time means nothing")
    return Sample(mechanism, capacity, length, found)


def measure_machine(
    gpu: int = 0, inputs: int = 1 << 20, progress: Callable[[float], None] = lambda share: None
) -> Machine:
    """A machine file for this GPU, from points of every mechanism on all its units."""
    with ExitStack() as stack:
        device = CudaDevice(gpu)
        stack.callback(device.close)
        torch.cuda.set_device(gpu)
        stream = call(cu.cuStreamCreate, cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
        stack.callback(call, cu.cuStreamDestroy, stream)
        plan = [
            (mechanism, max(2, round(share * inputs)), round(part * inputs))
            for mechanism in Mechanism
            for share in _CAPACITY_SHARES
            for part in _SHARES
            # Without a capacity to vary one column is enough.
            if share == _CAPACITY_SHARES[0]
            or mechanism not in (Mechanism.EXACT, Mechanism.MAXIMUM, Mechanism.MERGE)
        ]
        samples = []
        for index, (mechanism, capacity, length) in enumerate(plan):
            samples.append(measure(mechanism, capacity, inputs, length, stream))
            progress((index + 1) / len(plan))
        smallest = measure(Mechanism.EXACT, 1, 1024, 0, stream)
        stage = gpu_model.fit(
            samples,
            inputs=inputs,
            word_bytes=8,
            node_ns=smallest.time_ns / 2,
            consume_share=0.5,
            largest_ratio=1.0,
        )
        topology = device.topology
        return Machine(
            name=topology.name,
            title=f"{topology.title}: compaction of {inputs} elements and a consumer",
            modelled=False,
            source=f"fitted to {len(samples)} measured points, median of {REPEATS} launches each",
            fingerprint=msgspec.structs.replace(
                topology.fingerprint, device=device.gpu.name, libraries=libraries()
            ),
            gpu=stage,
        )
