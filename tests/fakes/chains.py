"""Chains of our own kernels as models on a GPU: small, and the same in every process."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

from eclip.core.device import Closing
from eclip.core.model_key import ModelKey
from eclip.core.trace import Trace
from eclip.cuda.driver import Gpu, call, cu
from eclip.cuda.processes.alone import ServedCapture, open_capture
from eclip.cuda.processes.child import Attached, Job
from eclip.cuda.stressors import Stressors
from eclip.gpu.executables import Capture
from gpu_host import captured_from

CLUSTERED = ModelKey("clustered", 1)
_CLUSTER = 2
_KERNELS = 12  # of the first model, and one more of each after it
_SCRATCH_BYTES = 1 << 20


class Chains(Closing):
    """Captures of the models m0, m1, …, and of one whose kernels come in clusters."""

    def __init__(self, gpu: Gpu) -> None:
        self._stack = contextlib.ExitStack()
        self._stressors = Stressors(gpu)
        self._stack.callback(self._stressors.close)
        self._scratch = int(call(cu.cuMemAlloc, _SCRATCH_BYTES))
        self._stack.callback(call, cu.cuMemFree, self._scratch)
        self._stack.callback(call, cu.cuCtxSynchronize)

    def capture(self, model: ModelKey) -> Capture:
        graph = self._stack.enter_context(captured_from(lambda stream: self._put(model, stream)))
        return Capture(graph, Trace(model=model, kernels=graph.kernels()), None)

    def close(self) -> None:
        self._stack.close()

    def _put(self, model: ModelKey, stream: Any) -> None:
        """Kernels that want the whole device in turn with some that one slice holds, so that a plan
        has reason to switch lanes."""
        if model == CLUSTERED:
            for _ in range(4):
                enqueue_cluster(self._stressors, stream, _CLUSTER, self._scratch)
            return
        for kernel in range(_KERNELS + int(model.name.removeprefix("m"))):
            blocks = 528 if kernel // 3 % 2 == 0 else 8
            self._stressors.launch("fma", stream, blocks, 256, self._scratch, 0, 6 + kernel)


def enqueue_cluster(stressors: Stressors, stream: Any, cluster: int, data: int = 0) -> None:
    """A kernel whose blocks come in clusters of so many."""
    attribute = cu.CUlaunchAttribute()
    attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    shape = attribute.value.clusterDim
    shape.x, shape.y, shape.z = cluster, 1, 1
    config = cu.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = 2 * cluster, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = 128, 1, 1
    config.hStream = stream
    config.attrs, config.numAttrs = [attribute], 1
    arguments = ((data, 0, 1), (ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_int))
    call(cu.cuLaunchKernelEx, config, cu.CUfunction(int(stressors.kernels["fma"])), arguments, 0)


@contextlib.contextmanager
def open_chain(model: ModelKey, attached: Attached | None = None) -> Iterator[ServedCapture]:
    """A model in a process of its own: what ``job_of`` runs in a child."""
    with (
        contextlib.closing(Gpu(0, connections=None)) as gpu,
        Chains(gpu) as chains,
        open_capture(gpu, chains.capture(model), attached, warmups=1) as served,
    ):
        yield served


def job_of(model: ModelKey) -> Job:
    return Job(f"{__name__}:open_chain", model)
