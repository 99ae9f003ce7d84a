"""A worker in a separate process: its captured graph on one stream of the primary context.

The graph is launched whole, or cut at the worker's joints. Under MPS its share of units is set by
MPS; otherwise there is no limit.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from eclip.core.program import on_one_lane
from eclip.core.rules import NO_RULES
from eclip.core.topology import Mask
from eclip.cuda.driver import Gpu, call, cu
from eclip.cuda.graphs import Executable
from eclip.cuda.lanes import GpuLane
from eclip.cuda.placing import CudaPlacer
from eclip.cuda.processes.child import Attached, Facts
from eclip.errors import MismatchError
from eclip.gpu import worker_loop
from eclip.gpu.closing import Releases
from eclip.gpu.executables import Capture, Executables
from eclip.gpu.steps import ANYBODY, LAUNCH, Ints, Stretches, whole_request


class ServedCapture:
    """The entry point of a child of ``ProcessSets``."""

    def __init__(self, facts: Facts, worker: worker_loop.WorkerLoop) -> None:
        self.facts = facts
        self._worker = worker

    def serve(self, arrivals: Ints | None, stop_at_ns: int, stop: Ints) -> Ints:
        return self._worker.drive(arrivals, stop_at_ns, stop)


@contextlib.contextmanager
def open_capture(
    gpu: Gpu, made: Capture, attached: Attached | None, warmups: int
) -> Iterator[ServedCapture]:
    """``attached``: its row of the board, if workers give way. The warm-up is off the board."""
    facts = Facts(
        trace=made.trace.digest,
        kernels=len(made.trace.kernels),
        units=gpu.attribute("MULTIPROCESSOR_COUNT"),
        mps=bool(gpu.attribute("MPS_ENABLED")),
    )
    with contextlib.ExitStack() as stack:
        stream = call(cu.cuStreamCreate, cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
        stack.callback(call, cu.cuStreamDestroy, stream)
        owner = Releases()
        stack.callback(owner.close)
        lane = GpuLane(Mask(()), stream, gpu.context)
        executables = Executables([made], CudaPlacer([lane]))
        place, rules = (None, NO_RULES) if attached is None else (attached.place, attached.rules)
        if attached is None:
            stretches = _whole(made, lane, owner)
        else:
            stretches = _attached(executables, made, attached, lane, owner)
        worker_loop.WorkerLoop(gpu, stretches, rules=rules).drive(most_requests=warmups)
        yield ServedCapture(facts, worker_loop.WorkerLoop(gpu, stretches, place, rules))


def _whole(made: Capture, lane: GpuLane, owner: Releases) -> Stretches:
    executable = Executable(made.graph.graph)
    owner.callback(executable.close)
    executable.upload(lane.stream)
    return whole_request((LAUNCH, executable.handle, lane.stream))


def _attached(
    executables: Executables, made: Capture, attached: Attached, lane: GpuLane, owner: Releases
) -> Stretches:
    events, done_ns = executables.progress(0, attached.worker, attached.rules, owner)
    if attached.worker.joints is None:
        return dataclasses.replace(_whole(made, lane, owner), done_ns=done_ns)
    kernels = len(made.trace.kernels)
    if kernels != attached.worker.kernels:  # under a share libraries may choose others
        raise MismatchError(
            f"it launches {kernels} kernels in a process of its own and "
            f"{attached.worker.kernels} in its plan, so its joints mean nothing here; plan it with "
            f"lanes or a larger share"
        )
    route = on_one_lane(0, kernels, 0)
    steps = executables.stretches(route, attached.rules.stretches(kernels), owner)
    return Stretches([(ANYBODY, steps)], (), events, done_ns)
