"""Questions to a GPU and its host that decide how eclip is built.

    PYTHONPATH=.:src:.gpu-deps python3 lab/gpu/probes.py FOLDER [--only smid,partition,decode,wakes]

docs/results/probes.md has the answers.

*smid*: do lanes of two processes over the same slices run on the same SMs, with and without MPS?
*partition*: does this driver's MPS know static partitions (-S)? *decode*: a decode step of an 8B
model on lanes of 32 to 132 SMs, beside matrix products, beside copies, and beside nothing.
*wakes*: how long one process takes to hear from another. Each answer is a line of
FOLDER/probes.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from lab.support.mps import gpu_uuid

from eclip.core.topology import Mask
from eclip.cuda.processes.mps import CONTROL, PIPES, MpsDaemon

BLOCKS = 2112  # 16 for each SM of an H200, so that no SM of a lane stays without one
CYCLES = 200_000
BUSY_ROUNDS = 3000  # of the arithmetic hog: about 10 ms on a lane
LANES = (32, 48, 64, 80, 96, 112, 132)
STEPS = 40
SKIPPED = 5
QUEUED = 20
NEIGHBOURS = ("nothing", "products", "copies")


# --- smid -------------------------------------------------------------------------------------


def sight(words: list[str]) -> None:
    """A child: prints the SMs of its lane, then times the hog whenever a line comes."""
    from eclip.cuda.driver import Gpu, call, cu
    from eclip.cuda.lanes import LanePool, Slices
    from eclip.cuda.stressors import Stressors

    gpu = Gpu()
    slices = Slices(gpu)
    mask = Mask(range(int(words[0]), int(words[1])))
    lane = LanePool(slices, [mask]).lanes[0]
    stressors = Stressors(gpu)
    seen = call(cu.cuMemAlloc, 4 * 1024)
    call(cu.cuMemsetD8, seen, 0, 4 * 1024)
    stressors.launch("where", lane.stream, BLOCKS, 32, int(seen), CYCLES, 0)
    call(cu.cuStreamSynchronize, lane.stream)
    counts = np.zeros(1024, np.uint32)
    call(cu.cuMemcpyDtoH, counts.ctypes.data, seen, counts.nbytes)
    print(json.dumps([int(sm) for sm in np.flatnonzero(counts)]), flush=True)
    units = sum(slices.units[index] for index in mask)
    for _ in sys.stdin:
        times = []
        for _ in range(20):
            begin = time.perf_counter()
            stressors.launch("fma", lane.stream, 2 * units, 1024, int(seen), 0, BUSY_ROUNDS)
            call(cu.cuStreamSynchronize, lane.stream)
            times.append(time.perf_counter() - begin)
        print(json.dumps(float(np.median(times) * 1e3)), flush=True)


@contextlib.contextmanager
def child(first: int, end: int, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, __file__, "--child", str(first), str(end)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def ask(*processes: subprocess.Popen[str]) -> list[float]:
    """Milliseconds of the hog in each process, all at once."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    return [said(process) for process in processes]


def smid() -> Iterator[dict[str, Any]]:
    uuid = gpu_uuid()
    for mps in (False, True):
        with contextlib.ExitStack() as stack:
            environment = dict(os.environ)
            if mps:
                daemon = stack.enter_context(MpsDaemon(uuid))
                environment |= {PIPES: str(daemon.pipes), "CUDA_VISIBLE_DEVICES": uuid}
            for name, ranges in (
                ("same slices", ((0, 4), (0, 4))),
                ("disjoint slices", ((0, 4), (4, 8))),
                ("overlapping slices", ((0, 6), (4, 10))),
                ("a half each", ((0, 8), (8, 16))),
            ):
                with child(*ranges[0], environment) as one, child(*ranges[1], environment) as other:
                    sms = [said(one), said(other)]
                    alone = [*ask(one), *ask(other)]
                    beside = ask(one, other)
                yield {
                    "mps": mps,
                    "lanes": name,
                    "slices": ranges,
                    "sms": sms,
                    "common": len(set(sms[0]) & set(sms[1])),
                    "alone_ms": alone,
                    "beside_ms": beside,
                }


# --- partition --------------------------------------------------------------------------------


def partition() -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        environment = dict(os.environ) | {PIPES: folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        for words in (["-d", "-S"], ["-h"]):
            done = subprocess.run(
                [CONTROL, *words], env=environment, capture_output=True, text=True, timeout=30
            )
            yield {"command": " ".join([CONTROL, *words]), "status": done.returncode,
                   "said": (done.stdout + done.stderr)[-3000:]}  # fmt: skip
            for order in ("get_default_active_thread_percentage", "sm_partition help", "quit"):
                if words[0] == "-h" or done.returncode:
                    break
                done = subprocess.run(
                    [CONTROL], input=order + "\n", env=environment, capture_output=True, text=True,
                    timeout=30,
                )  # fmt: skip
                yield {"order": order, "said": (done.stdout + done.stderr)[-1000:]}
        log = Path(folder) / "control.log"
        if log.exists():
            yield {"log": log.read_text()[-2000:]}


# --- decode -----------------------------------------------------------------------------------


def decode() -> Iterator[dict[str, Any]]:
    import torch
    from lab.gpu.workloads import llama_decode

    from eclip.cuda.driver import Gpu
    from eclip.cuda.lanes import LanePool, Slices

    slices = Slices(Gpu())
    model, inputs = llama_decode(8)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    cache = sum(b.numel() * b.element_size() for b in model.buffers())
    sides = [torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    source = torch.empty(1 << 29, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)

    def neighbour(name: str) -> None:
        for _ in range(4):
            if name == "products":
                torch.mm(*sides)
            else:
                torch.bitwise_not(source, out=target)  # a kernel: no copy engine

    def captured(stream: Any, work: Any) -> Any:
        with torch.cuda.stream(stream), torch.inference_mode():
            for _ in range(2):
                work()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin()
            work()
            graph.capture_end()
        return graph

    total = sum(slices.units)
    for wanted in LANES:
        count = next(i for i in range(1, len(slices.units) + 1) if sum(slices.units[:i]) >= wanted)
        masks = [Mask(range(count))]
        if count < len(slices.units):
            masks.append(Mask(range(count, len(slices.units))))
        pool = LanePool(slices, masks)
        streams = [torch.cuda.ExternalStream(int(lane.stream)) for lane in pool.lanes]
        step = captured(streams[0], lambda: model(*inputs))
        for name in NEIGHBOURS:
            if name != "nothing" and len(streams) == 1:
                continue
            beside = (
                None if name == "nothing" else captured(streams[1], lambda n=name: neighbour(n))
            )
            rate_alone = rate_beside = 0.0
            if beside is not None:
                rate_alone = rate(streams[1], beside)
            events = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
            with torch.cuda.stream(streams[0]):
                for event in events:
                    step.replay()
                    event.record()
            if beside is not None:
                rate_beside = rate(streams[1], beside, until=events[-1].query)
            torch.cuda.synchronize()
            # The neighbour comes a little later than the first steps.
            times = [a.elapsed_time(b) for a, b in itertools.pairwise(events)][SKIPPED:]
            yield {
                "sms": sum(slices.units[:count]),
                "of": total,
                "neighbour": name,
                "step_ms_p50": float(np.median(times)),
                "step_ms_p99": float(np.quantile(times, 0.99)),
                "neighbour_of_alone_there": rate_beside / rate_alone if rate_alone else None,
                "neighbour_per_s": rate_beside,
                "weights_gb": weights / 1e9,
                "cache_gb": cache / 1e9,
            }
        del step
        pool.close()
    stream = torch.cuda.Stream()
    for name in NEIGHBOURS[1:]:
        graph = captured(stream, lambda n=name: neighbour(n))
        yield {"sms": total, "alone": name, "per_s": rate(stream, graph)}


def rate(stream: Any, graph: Any, until: Callable[[], bool] | None = None) -> float:
    """Replays a second, about 20 of them queued; for half a second unless told until when."""
    import torch

    marks: list[Any] = []
    begin = time.perf_counter()
    with torch.cuda.stream(stream):
        while not until() if until else time.perf_counter() - begin < 0.5:
            graph.replay()
            marks.append(torch.cuda.Event())
            marks[-1].record()
            if len(marks) > QUEUED:
                marks[-QUEUED].synchronize()
    done = sum(bool(mark.query()) for mark in marks)
    seconds = time.perf_counter() - begin
    stream.synchronize()
    return done / seconds


# --- wakes ------------------------------------------------------------------------------------


def wakes() -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "wakes"
        source = Path(__file__).with_name("wakes.cpp")
        subprocess.run(["g++", "-O2", "-std=c++20", source, "-o", program], check=True)
        for pause_us in (50, 1000):
            done = subprocess.run(
                [program, "10000", str(pause_us)], capture_output=True, text=True, timeout=120
            )
            yield from map(json.loads, done.stdout.splitlines())


PROBES = {"smid": smid, "partition": partition, "wakes": wakes, "decode": decode}


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        sight(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default=",".join(PROBES))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with (options.folder / "probes.jsonl").open("a") as file:
        for name in options.only.split(","):
            try:
                for answer in PROBES[name]():
                    line = json.dumps({"probe": name, **answer})
                    file.write(line + "\n")
                    file.flush()
                    print(line[:400], flush=True)
            except Exception:  # the other questions are still to be asked
                traceback.print_exc()


if __name__ == "__main__":
    main()
