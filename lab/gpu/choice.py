"""Claim of docs/results/throughput.md: kernels chosen for fewer SMs run better side by side.

    PYTHONPATH=src:.gpu-deps python3 lab/gpu/choice.py [MODEL:BATCH,MODEL:BATCH ...]

Every pair of models on all SMs, on halves and on overlapping three quarters, with the kernels that
libraries choose for all SMs, for two thirds, for half and for a third of them. STP is over
the rates alone of the own kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from lab.support.tables import print_table

from eclip.capture.named import build
from eclip.capture.torch import capture
from eclip.core.device import Window
from eclip.core.load import closed_loop
from eclip.core.measures import Measures, measure
from eclip.core.mix import mix_of
from eclip.core.model_key import parse_model
from eclip.core.plan import Assignment, Group, Lane, Plan, PlannedWorker, Variant
from eclip.core.program import lower
from eclip.core.topology import Mask
from eclip.core.trace import with_traces
from eclip.cuda.device import CudaDevice
from eclip.gpu.executables import Capture

PAIRS = ("gpt2:8,vit_b_16:8", "bert:8,albert:8")
WINDOW = Window(seconds=0.6, warmup_seconds=0.1, trace_ms=0.0)


def captured(key: str, units: int) -> Capture:
    model = parse_model(key).with_kernels_for(units)
    module, inputs = build(model)
    return capture(module, inputs, model).capture


def run(device: CudaDevice, sources: Sequence[Capture], masks: Sequence[Mask]) -> Measures:
    traces = [source.trace for source in sources]
    mix = mix_of(trace.model for trace in traces)
    everyone = tuple(range(len(traces)))
    whole = [Group(index, len(trace.kernels), 1) for index, trace in enumerate(traces)]
    plan = Plan(
        mix=mix,
        policy="choice",
        topology=device.topology,
        fingerprint=with_traces(device.topology.fingerprint, traces),
        modelled=False,
        workers=tuple(
            PlannedWorker(name=worker.name, model=worker.model, kernels=group.kernels, why="")
            for worker, group in zip(mix.workers, whole, strict=True)
        ),
        lanes=tuple(Lane(index, mask) for index, mask in enumerate(masks)),
        variants=(
            Variant(everyone, tuple(Assignment(index, (whole[index],)) for index in everyone)),
        ),
        why="",
    )
    with device.open(lower(plan, traces), sources) as session:
        log = session.run(closed_loop(len(traces)), WINDOW)
    return measure(msgspec.structs.replace(log, alone_rps=(1.0,) * len(traces)))


def main(pairs: Sequence[str]) -> None:
    device = CudaDevice()
    torch.cuda.set_device(0)
    units, slices = device.topology.units, len(device.topology.slice_units)
    full = device.topology.full
    lanes = {
        "all": (full, full),
        "halves": (Mask(range(slices // 2)), Mask(range(slices // 2, slices))),
        "three quarters": (Mask(range(3 * slices // 4)), Mask(range(slices // 4, slices))),
    }
    for pair in pairs:
        keys = pair.split(",")
        own = [captured(key, 0) for key in keys]
        alone = [run(device, [source], [full]).workers[0].rate_rps for source in own]
        rows = []
        for chosen in (0, 2 * units // 3, units // 2, units // 3):
            sources = [captured(key, chosen) for key in keys] if chosen else own
            for title, masks in lanes.items():
                found = run(device, sources, masks)
                shares = [
                    worker.rate_rps / rate
                    for worker, rate in zip(found.workers, alone, strict=True)
                ]
                rows.append(
                    [
                        str(chosen or units), title, f"{sum(shares):.3f}",
                        f"{min(shares) / max(shares):.2f}", f"{found.power_w:.0f}",
                        f"{1000 * sum(shares) / found.power_w:.2f}",
                    ]
                )  # fmt: skip
        columns = ["kernels for", "SMs of each", "STP", "fairness", "W", "STP·s/kJ"]
        print_table(pair, columns, rows)


if __name__ == "__main__":
    main(sys.argv[1:] or PAIRS)
