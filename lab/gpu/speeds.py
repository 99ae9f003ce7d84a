"""Claim of docs/results/lanes.md: graphs run faster once another context was made on the GPU.

    PYTHONPATH=src:.gpu-deps python3 lab/gpu/speeds.py

Requests/s of one captured model in a process that nothing else disturbs, then after a context of
its own or of another process was made, worked, and went; before anything was captured, and after.
Beside it the memory that is free, and how long it takes to make the spare context.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import torch

from eclip.capture import named as models
from eclip.capture.torch import CapturedModule, capture
from eclip.core.model_key import ModelKey
from eclip.cuda.driver import Gpu, call, cu

MODEL = ModelKey("shufflenet", 8)
SECONDS = 0.25
ANOTHER = f"""
import sys
sys.path[:0] = {sys.path!r}
from eclip.cuda.driver import Gpu, call, cu
gpu = None
for line in sys.stdin:
    if line.strip() == "context":
        gpu = Gpu(0, None)
    elif line.strip() == "work":
        call(cu.cuMemsetD8, call(cu.cuMemAlloc, 1 << 20), 1, 1 << 20)
        call(cu.cuCtxSynchronize)
    print("done", flush=True)
"""


def captured() -> CapturedModule:
    torch.cuda.set_device(0)
    module, inputs = models.build(MODEL)
    return capture(module, inputs, MODEL)


def rate(model: CapturedModule) -> float:
    model.graph.replay()
    torch.cuda.synchronize()
    begin, requests = time.perf_counter(), 0
    while time.perf_counter() - begin < SECONDS:
        model.graph.replay()
        torch.cuda.synchronize()
        requests += 1
    return requests / (time.perf_counter() - begin)


def show(what: str, model: CapturedModule) -> None:
    rates = [f"{rate(model):.0f}" for _ in range(3)]
    free, _ = call(cu.cuMemGetInfo)
    print(f"{what:48}", *rates, f"{free >> 20} MiB free", flush=True)


def own_context() -> None:
    gpu, model = Gpu(0), captured()
    show("alone", model)
    other = call(cu.cuCtxCreate, None, 0, gpu.handle)
    gpu.make_current()
    show("a second context of its own", model)
    call(cu.cuCtxDestroy, other)
    show("... destroyed", model)


def other_process() -> None:
    Gpu(0)
    model = captured()
    child = subprocess.Popen(
        [sys.executable, "-c", ANOTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None and child.stdout is not None
    show("another process, without CUDA", model)
    for order in ("context", "work"):
        print(order, file=child.stdin, flush=True)
        child.stdout.readline()
        show(f"another process: {order}", model)
    child.stdin.close()
    child.wait()
    show("... ended", model)
    time.sleep(8)
    show("... 8 s later", model)


def quickened() -> None:
    gpu = Gpu(0)
    begin = time.perf_counter()
    gpu.quicken()
    print(f"the spare context took {time.perf_counter() - begin:.2f} s", flush=True)
    model = captured()
    show("quickened before the capture", model)
    gpu.quicken()
    show("quickened after it", model)


WAYS = {way.__name__: way for way in (own_context, other_process, quickened)}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        WAYS[sys.argv[1]]()
    else:  # each in a process of its own: what was done is not undone
        for name in WAYS:
            subprocess.run([sys.executable, __file__, name], check=True)
