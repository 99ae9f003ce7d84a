"""What tests on a GPU need before they can run, and graphs for them to run."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

from eclip.cuda.driver import call, cu
from eclip.cuda.graphs import CudaGraph

_PACKAGES = ("cuda.bindings", "pynvml", "cupti", "torch")


def missing() -> str | None:
    """What this host or run lacks for tests on a GPU, in words."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return "tests on a GPU measure times, so they run alone: make gpu-test"
    for package in _PACKAGES:
        found = None
        with contextlib.suppress(ModuleNotFoundError):
            found = importlib.util.find_spec(package)
        if found is None:
            return f"tests on a GPU need the Python package {package}"
    import pynvml

    # NVML, not CUDA: asking CUDA here would be too early to choose the number of connections.
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return f"tests on a GPU need one by NVIDIA: {error}"
    return None if count else "tests on a GPU need one by NVIDIA"


@contextlib.contextmanager
def captured_from(enqueue: Callable[[Any], None]) -> Iterator[CudaGraph]:
    """The graph of what a function puts onto a stream; destroyed when the block ends."""
    stream = call(cu.cuStreamCreate, cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
    mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    call(cu.cuStreamBeginCapture, stream, mode)
    enqueue(stream)
    graph = call(cu.cuStreamEndCapture, stream)
    call(cu.cuStreamDestroy, stream)
    try:
        yield CudaGraph(int(graph))
    finally:
        call(cu.cuGraphDestroy, graph)
