"""A model in a process of its own: built, captured, and served from one stream.

This is what ``ProcessSets`` runs in its children. The captured graph is launched as it is, in the
primary context: which units it gets is the business of MPS, or of nobody.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from eclip.artefacts.model_key import ModelKey
from eclip.devices.cuda.driver import Gpu, call, cu
from eclip.devices.cuda.graphs import Executable
from eclip.devices.gpu import loop
from eclip.devices.remote_child import Facts
from eclip.frontends.models import build
from eclip.frontends.torch import capture

_WARMUPS = 5


class ServedModel:
    def __init__(self, facts: Facts, worker: loop.WorkerLoop) -> None:
        self.facts = facts
        self._worker = worker

    def serve(self, arrivals: loop.Ints | None, stop_at_ns: int, stop: loop.Ints) -> loop.Ints:
        return self._worker.drive(arrivals, stop_at_ns, stop)


@contextlib.contextmanager
def open_model(model: ModelKey) -> Iterator[ServedModel]:
    """The model on the one GPU that this process sees."""
    with contextlib.ExitStack() as stack:
        gpu = Gpu(0, connections=None)
        stack.callback(gpu.close)
        module, inputs = build(model)
        made = capture(module, inputs, model).capture
        stream = call(cu.cuStreamCreate, cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
        stack.callback(call, cu.cuStreamDestroy, stream)
        executable = Executable(made.graph.graph)
        stack.callback(executable.close)
        executable.upload(stream)
        launch = (loop.LAUNCH, executable.handle, stream)
        worker = loop.WorkerLoop(gpu, loop.whole_request(launch))
        worker.drive(most_requests=_WARMUPS)
        facts = Facts(
            trace=made.trace.digest,
            kernels=len(made.trace.kernels),
            units=gpu.attribute("MULTIPROCESSOR_COUNT"),
            mps=bool(gpu.attribute("MPS_ENABLED")),
        )
        yield ServedModel(facts, worker)
