"""Claim of docs/results/lanes.md: workers fall into lock-step if many segments are queued.

    PYTHONPATH=src:.gpu-deps python3 lab/gpu/lockstep.py [CONNECTIONS ...]

Two models under plain streams, a static split and plans with switches, as one graph and as
segments of which so many are queued at most, in a process of its own for every number of
connections. Lock-step shows as equal rates.
"""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import torch

from eclip.capture.named import capture_worker
from eclip.core.calibration import Calibration
from eclip.core.device import Window
from eclip.core.load import closed_loop
from eclip.core.measures import measure
from eclip.core.mix import parse_mix
from eclip.core.program import lower
from eclip.cuda.device import CudaDevice
from eclip.files import store
from eclip.gpu import steps
from eclip.gpu.session import Execution
from eclip.models.library import find_profile
from eclip.planner.alone import alone_rates
from eclip.planner.policies import make_plan
from eclip.planner.problem import Problem
from eclip.planner.search.placement import Home, Placer

MIX = "resnext101:8,shufflenet:8"
NUMBERS = ("8", "32")
QUEUED = (99, 1, 2, 3, 4)
WINDOW = Window(seconds=0.6, warmup_seconds=0.1, trace_ms=0.0)
PLACES = {
    "static split, 11 and 5 slices": (Home(0, 1, 11, 0.0, 0), Home(15, -1, 5, 0.0, 0)),
    "up to 16 and 6 slices, 14 switches each": (Home(0, 1, 16, 0.5, 14), Home(15, -1, 6, 0.5, 14)),
    "up to 12 and 6 slices, 14 switches each": (Home(0, 1, 12, 0.5, 14), Home(15, -1, 6, 0.5, 14)),
    "up to 12 and 4 slices, 14 switches each": (Home(0, 1, 12, 0.5, 14), Home(15, -1, 4, 0.5, 14)),
    "one lane of 12, up to 4 with 14 switches": (Home(0, 1, 12, 0.0, 0), Home(15, -1, 4, 0.5, 14)),
    "up to 12 with 14 switches, one lane of 4": (Home(0, 1, 12, 0.5, 14), Home(15, -1, 4, 0.5, 0)),
}


def measure_with(connections: int) -> None:
    device = CudaDevice(connections=connections)
    torch.cuda.set_device(0)
    mix = parse_mix(MIX)
    calibration = store.load_builtin("h200", Calibration)
    profiles = tuple(
        find_profile(worker.model, device.topology, calibration, []) for worker in mix.workers
    )
    sources = [capture_worker(profile, 0) for profile in profiles]
    alone = alone_rates(device, profiles, sources)
    problem = Problem(mix, device.topology, profiles)
    placer = Placer(problem)
    plans = {name: make_plan(name, problem) for name in ("shared", "eclip")}
    plans |= {name: placer.plan(homes, "search", "") for name, homes in PLACES.items()}
    load = closed_loop(len(profiles))
    traces = [profile.trace for profile in profiles]
    for name, plan in plans.items():
        found = []
        for execution, ahead in ((Execution.WHOLE, 0), *((Execution.SEGMENTS, n) for n in QUEUED)):
            device.execution, steps.AHEAD = execution, ahead
            with device.open(lower(plan, traces), sources) as session:
                log = session.run(load, WINDOW)
            measured = measure(msgspec.structs.replace(log, alone_rps=alone))
            rates = " + ".join(f"{worker.rate_rps:.0f}" for worker in measured.workers)
            way = f"at most {ahead} queued" if ahead else "one graph"
            found.append(f"{way} {rates}/s (STP {measured.stp:.2f})")
        print(f"{connections} connections, {name}: {', '.join(found)}", flush=True)


if __name__ == "__main__":
    if (chosen := os.environ.get("BENCH_CONNECTIONS")) is not None:
        measure_with(int(chosen))
    else:
        for number in sys.argv[1:] or NUMBERS:
            environment = {**os.environ, "BENCH_CONNECTIONS": number}
            environment.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
            subprocess.run([sys.executable, __file__], env=environment, check=True)
