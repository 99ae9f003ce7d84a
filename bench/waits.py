"""What busy CPU cores cost a service whose thread waits for the device.

    python bench/waits.py [--requests N]

The loop that drives a GPU, with a driver that spins for as long as a device would take: 1 ms a
request, Poisson arrivals at a load of 0.35. On idle cores, and with every core kept busy by another
program. No GPU is in it: what is measured is the thread. Needs g++.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from bench.support.cores import busy_cores
from bench.support.tables import print_table

from eclip.devices.gpu.steps import LAUNCH, Ints, whole_request
from eclip.devices.gpu.worker_loop import Runner, WorkerLoop
from eclip.devices.requests import ARRIVAL, END
from spinning_gpu import SpinningGpu

TAKES_NS, LOAD = 1_000_000, 0.35
TURNS = 4  # idle and busy, so that what drifts meets both
LEAD_NS, LINGER_NS = 50_000_000, 1_000_000_000


def serve(gpu: SpinningGpu, arrivals: Ints) -> Ints:
    loop = WorkerLoop(gpu, whole_request((LAUNCH, 1, 1)))
    due = arrivals + time.monotonic_ns() + LEAD_NS
    runner = Runner(
        lambda: loop.drive(due, stop_at_ns=int(due[-1]) + LINGER_NS), np.zeros(1, dtype=np.int64)
    )
    runner.start()
    rows = runner.rows()
    return rows[:, END] - rows[:, ARRIVAL]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=2000)
    given = parser.parse_args()
    latencies: dict[bool, list[Ints]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        gpu = SpinningGpu(Path(folder))
        gpu.take(TAKES_NS)
        for turn in range(TURNS):
            gaps = np.random.default_rng(turn).exponential(TAKES_NS / LOAD, given.requests // TURNS)
            for busy, found in latencies.items():
                with busy_cores(busy):
                    found.append(serve(gpu, gaps.cumsum().astype(np.int64)))
    lines = []
    for busy, found in latencies.items():
        ms = np.percentile(np.concatenate(found), [50, 90, 99]) / 1e6
        lines.append(["all busy" if busy else "idle", *(f"{one:.2f}" for one in ms)])
    print_table("Latency, ms", ["cores", "p50", "p90", "p99"], lines)


if __name__ == "__main__":
    main()
