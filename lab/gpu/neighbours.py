"""Claim of docs/results/lanes.md: how much models on disjoint lanes slow each other down.

    PYTHONPATH=src:.gpu-deps python3 lab/gpu/neighbours.py [MODEL:BATCH ...]

Every pair of models back to back on two halves of the GPU, for three ways to halve it. Prints the
slowdown of the row beside the column, and the SM clock while they ran.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pynvml
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from lab.support.tables import print_table

from eclip.capture.named import build
from eclip.capture.torch import capture
from eclip.core.model_key import parse_model
from eclip.core.topology import Mask
from eclip.cuda.device import CudaDevice
from eclip.cuda.graphs import Executable, place_whole
from eclip.cuda.lanes import GpuLane, LanePool
from eclip.gpu.executables import Capture
from eclip.gpu.worker_loop import Repeater

MODELS = ("albert:8", "shufflenet:8", "gpt2:8", "vgg19:8", "densenet121:8")
SECONDS = 0.2


def captured(key: str) -> Capture:
    model = parse_model(key)
    module, inputs = build(model)
    return capture(module, inputs, model).capture


def request_us(device: CudaDevice, runs: list[tuple[Executable, GpuLane]]) -> float:
    """Of the first, while the others run beside it."""
    with ExitStack() as stack:
        loops = [
            stack.enter_context(Repeater(device.gpu, executable.handle, lane.stream))
            for executable, lane in runs
        ]
        time.sleep(SECONDS)
    ends = loops[0].ends_ns()
    settled = ends[len(ends) // 4 :]
    return float(settled[-1] - settled[0]) / (len(settled) - 1) / 1e3


def main(keys: list[str]) -> None:
    device = CudaDevice()
    torch.cuda.set_device(0)
    slices = len(device.topology.slice_units)
    quarter = slices // 4
    halves = {
        "lower and upper": range(slices // 2),
        "even and odd": range(0, slices, 2),
        "quarters in turns": [*range(quarter), *range(2 * quarter, 3 * quarter)],
    }
    sources = {key: (captured(key), captured(key)) for key in keys}
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(device.gpu.uuid)
    clocks = []
    for title, first in halves.items():
        here = Mask(first)
        there = Mask(index for index in range(slices) if index not in here)
        with ExitStack() as stack:
            pool = LanePool(device.slices, [here, there])
            stack.callback(pool.close)
            placed = {}
            for key, pair in sources.items():
                for side, (source, lane) in enumerate(zip(pair, pool.lanes, strict=True)):
                    contexts = [lane.context] * source.graph.kernel_count
                    placed[key, side] = place_whole(source.graph, contexts), lane
                    stack.callback(placed[key, side][0].close)
            rows = []
            for key in keys:
                alone = request_us(device, [placed[key, 0]])
                beside = [request_us(device, [placed[key, 0], placed[other, 1]]) for other in keys]
                clocks.append(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))
                rows.append([key, f"{alone:.0f}", *(f"{each / alone:.2f}" for each in beside)])
        print_table(f"Halves: {title}", ["", "alone, µs", *keys], rows)
    print(f"SM clock {np.min(clocks)} to {np.max(clocks)} MHz")


if __name__ == "__main__":
    main(sys.argv[1:] or list(MODELS))
